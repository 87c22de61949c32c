"""`Results`: what an evaluation found, as a file that the report and other programs read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvsurgery.errors import OutputError
from kvsurgery.system.files import document, json_values, write_whole

FILE = "results.json"
SAMPLES = "samples.jsonl"  # the prompts
SETTINGS = "settings.json"  # of an evaluation or a sweep: its samples, and the models that answered
FORMAT, VERSION = "kvsurgery.evaluation", 1
ORIGINAL, CONVERTED = "original", "converted"
PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class Interval:
    """A mean over samples and its 95% bootstrap interval; NaN where a model's losses are no numbers."""

    mean: float
    low: float
    high: float

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Interval:
        """Read the dict that `asdict` makes, in which a number may be None."""
        return cls(**_numbers(fields))


@dataclass(frozen=True)
class Cell:
    """The mean scores of samples that have the same facts.

    Attributes:
        facts: such as {"tokens": 4096, "depth": 0.5}.
        count: samples.
        scores: by model; a model without a scored sample here is left out.
    """

    facts: Mapping[str, Any]
    count: int
    scores: Mapping[str, float]


@dataclass(frozen=True)
class TaskResult:
    """The results of one task by one metric.

    Attributes:
        task: its name.
        metric: of the scores, which are shares from 0 to 1; of "perplexity", lower is better.
        count: samples that every model answered; only these are averaged.
        skipped: samples that some model did not answer, by the reason.
        scores: by model.
        difference: the converted model's score minus the original's, paired by sample; None for a single model.
        cells: the scores by the facts of samples, in the order of the facts.
    """

    task: str
    metric: str
    count: int
    skipped: Mapping[str, int]
    scores: Mapping[str, Interval]
    difference: Interval | None
    cells: tuple[Cell, ...]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TaskResult:
        """Read the dict that `asdict` makes.

        Raises:
            TypeError, KeyError, AttributeError: it is something else.
        """
        difference = fields["difference"]
        parsed_fields: dict[str, Any] = {
            "scores": {name: Interval.from_json(interval) for name, interval in fields["scores"].items()},
            "difference": difference and Interval.from_json(difference),
            "cells": tuple(Cell(cell["facts"], cell["count"], _numbers(cell["scores"])) for cell in fields["cells"]),
        }
        return cls(**{**fields, **parsed_fields})


@dataclass(frozen=True)
class Results:
    """An evaluation of one or two models: "original" and "converted".

    Attributes:
        models: by name, where it was loaded from.
        command: the command that was typed.
        settings: the options of the run, including defaults.
        versions: of the packages that matter, and the device.
        checkpoint: `inspection.Facts.to_json()` of the converted one, or of the only one.
        tasks: in the order in which they ran.
        tokens: of the longest sample and its answer.
        kv_bytes, dense_bytes: of the converted and of the original model's KV cache of this many tokens, one sequence;
            None where no converted model was evaluated, and in files of version 0.1.0.
    """

    models: Mapping[str, str]
    command: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    checkpoint: Mapping[str, Any]
    tasks: tuple[TaskResult, ...]
    tokens: int | None = None
    kv_bytes: int | None = None
    dense_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON values."""
        return json_values({"format": FORMAT, "version": VERSION, **asdict(self)})

    def save(self, folder: Path) -> None:
        """Write `results.json`."""
        write_whole(folder / FILE, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Results:
        """Read `results.json`.

        Raises:
            KVSurgeryError: it is missing, or not what `save` writes.
        """
        with document(folder / FILE, (FORMAT, VERSION), "kvsurgery eval") as content:
            tasks = tuple(TaskResult.from_json(fields) for fields in content.pop("tasks"))
            return cls(**content, tasks=tasks)


def read_settings(folder: Path) -> dict[str, Any]:
    """`settings.json` of an evaluation or a sweep, finished or not.

    Raises:
        OutputError: it is no such file.
    """
    path = folder / SETTINGS
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings["models"], dict) or not isinstance(settings["versions"], dict):
            raise ValueError("no models or no versions")
        for name, entry in settings["models"].items():
            for name_of_field, kind in {"path": str, "fingerprint": str, "checkpoint": dict}.items():
                if not (isinstance(entry, dict) and isinstance(entry.get(name_of_field), kind)):
                    raise ValueError(f"no {name_of_field} of the model {name}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise OutputError(f"{path} has no settings of an evaluation: {error}; give another folder") from error
    return settings


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    """Numbers by name, NaN for None."""
    return {name: math.nan if value is None else value for name, value in values.items()}
