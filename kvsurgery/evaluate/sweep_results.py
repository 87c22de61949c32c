"""`Sweep`: the scores and KV bytes of many policies, as a file that the chart and other programs read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvsurgery.evaluate.results import CONVERTED, ORIGINAL, PERPLEXITY, Interval, TaskResult
from kvsurgery.policy.layer_bits import UNQUANTIZED
from kvsurgery.system.files import document, json_values, write_table, write_whole

FILE, TABLE = "sweep.json", "sweep.csv"
FORMAT, VERSION = "kvsurgery.sweep", 1


@dataclass(frozen=True)
class Point:
    """The result of one setting.

    Attributes:
        options: of the conversion, by axis: {"full_heads": 4, "kv_bits": 16}; 16 bits are the model's dtype.
        policy: hash of the policy; settings with the same policy were evaluated once.
        kv_bytes: of one sequence of `Sweep.tokens`.
        tasks: as in `Results`, of "original" and "converted".
        skipped: why it was not evaluated, if it was not.
    """

    options: Mapping[str, Any]
    policy: str | None = None
    kv_bytes: int | None = None
    tasks: tuple[TaskResult, ...] = ()
    skipped: str | None = None

    def result(self, task: str, metric: str) -> TaskResult:
        """The result of one task by one metric.

        Raises:
            LookupError: there is none.
        """
        for result in self.tasks:
            if (result.task, result.metric) == (task, metric):
                return result
        raise LookupError(f"the setting {named(self.options)} has no {metric} of {task}")


@dataclass(frozen=True)
class Sweep:
    """Many conversions of one checkpoint, which answered the same samples.

    Attributes:
        source: the original's folder or Hub id.
        command: the command that was typed.
        settings: the options of the run, including defaults; `conversion` has those that all settings share.
        versions: of the packages that matter, and the device.
        axes: the values of each.
        tokens: of the longest sample and its answer, for which KV bytes are given.
        dense_bytes: of the original's KV cache of this many tokens, one sequence.
        original: results of the original alone.
        points: one for each setting, skipped ones too, the first axis outermost.
    """

    source: str
    command: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    axes: Mapping[str, Sequence[Any]]
    tokens: int
    dense_bytes: int
    original: tuple[TaskResult, ...]
    points: tuple[Point, ...]

    def front(self, task: str, metric: str) -> tuple[Point, ...]:
        """The points that score better than every point of equal or fewer bytes, by size."""
        sign = -1 if metric == PERPLEXITY else 1
        worth = {
            place: sign * scores[CONVERTED].mean
            for place, point in enumerate(self.points)
            if not point.skipped
            and (scores := point.result(task, metric).scores)
            and math.isfinite(scores[CONVERTED].mean)
        }
        best_places: list[int] = []
        for place in sorted(worth, key=lambda place: (self.points[place].kv_bytes, -worth[place])):
            if not best_places or worth[place] > worth[best_places[-1]]:
                best_places.append(place)
        return tuple(self.points[place] for place in best_places)

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON values."""
        return json_values({"format": FORMAT, "version": VERSION, **asdict(self)})

    def save(self, folder: Path) -> None:
        """Write `sweep.json` and, for spreadsheets, `sweep.csv` with a row for each setting, task and metric."""
        write_whole(folder / FILE, json.dumps(self.to_json(), indent=1) + "\n")
        write_table(folder / TABLE, [*_rows(self)])

    @classmethod
    def load(cls, folder: Path) -> Sweep:
        """Read `sweep.json`.

        Raises:
            KVSurgeryError: it is missing, or not what `save` writes.
        """
        with document(folder / FILE, (FORMAT, VERSION), "kvsurgery sweep") as content:
            axes = {name: tuple(values) for name, values in content.pop("axes").items()}
            points = tuple(Point(tasks=_results(fields.pop("tasks")), **fields) for fields in content.pop("points"))
            return cls(axes=axes, original=_results(content.pop("original")), points=points, **content)


def varied(axes: Mapping[str, Sequence[Any]]) -> list[str]:
    """The axes that tell settings apart: those with several values, or else all."""
    return [name for name, values in axes.items() if len(values) > 1] or [*axes]


def named(options: Mapping[str, Any]) -> str:
    """A setting, or some of it, in words: "beta 1.2, 4 bits"."""
    words = []
    for axis, value in options.items():
        if axis == "kv_bits":
            words.append("unquantized" if value == UNQUANTIZED else f"{value} bits")
        else:
            words.append(f"{axis.replace('_', ' ')} {value}")
    return ", ".join(words)


def _results(entries: Sequence[Mapping[str, Any]]) -> tuple[TaskResult, ...]:
    return tuple(TaskResult.from_json(fields) for fields in entries)


def _rows(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """The rows of the CSV file, the original's first; missing values are empty."""
    empty_point = Point(dict.fromkeys(sweep.axes))
    yield from (_row(ORIGINAL, sweep, empty_point, sweep.dense_bytes, result) for result in sweep.original)
    for point in sweep.points:
        for result in point.tasks or [None]:
            yield _row(CONVERTED, sweep, point, point.kv_bytes, result)


def _row(model: str, sweep: Sweep, point: Point, kv_bytes: int | None, result: TaskResult | None) -> dict[str, Any]:
    return {
        "model": model,
        **point.options,
        "policy": point.policy,
        "tokens": sweep.tokens,
        "kv_bytes": kv_bytes,
        "of_original": kv_bytes and kv_bytes / sweep.dense_bytes,
        "task": result and result.task,
        "metric": result and result.metric,
        "samples": result and result.count,
        **_parts("score", result.scores.get(model) if result else None),
        **_parts("difference", result.difference if result else None),
        "skipped": point.skipped,
    }


def _parts(name: str, interval: Interval | None) -> dict[str, float | None]:
    ends = {"": "mean", "_low": "low", "_high": "high"}
    return {name + end: getattr(interval, part) if interval else None for end, part in ends.items()}
