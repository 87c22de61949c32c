"""`Bench`: the results of a benchmark, with the file that the report and other programs read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvsurgery.system.files import document, write_table, write_whole

FILE, TABLE = "bench.json", "bench.csv"
FORMAT, VERSION = "kvsurgery.bench", 1
PHASES = ("prefill", "chunked", "first_token", "decode")


@dataclass(frozen=True)
class Phase:
    """Time and memory of one phase.

    Attributes:
        seconds: the median; for decoding, of one step, a token of every sequence.
        low, high: first and third quartile.
        count: how often it was measured.
        peak_bytes: the peak of tensors, without weights and the tokens of the prompt.
    """

    seconds: float
    low: float
    high: float
    count: int
    peak_bytes: int


@dataclass(frozen=True)
class Row:
    """The measurements of one contender at one length and batch size.

    Attributes:
        contender: its name in `Bench.contenders`.
        tokens: of each prompt.
        batch: prompts that are read together.
        prefill: the prompt, in one forward into an empty cache.
        chunked: the same in chunks of `settings["chunk"]` tokens; None if the prompt fits into one chunk.
        first_token: `generate` with one new token.
        decode: one step. Like `prefill`, it is None for prompts beyond REFORM's recompute budget, which only
            `generate` reads.
        kv_bytes: bytes that the cache has allocated for prompt and new tokens.
        predicted: the same, computed from the config; None unless the model is the converted one.
        floor: seconds to read weights, keys and values once at `Bench.bandwidth`.
        skipped: the reason why it was not measured, if it was not.
    """

    contender: str
    tokens: int
    batch: int
    prefill: Phase | None = None
    chunked: Phase | None = None
    first_token: Phase | None = None
    decode: Phase | None = None
    kv_bytes: int | None = None
    predicted: int | None = None
    floor: float | None = None
    skipped: str | None = None

    @property
    def share(self) -> float | None:
        """The floor as a share of a decode step; 1 means that the step is as fast as reading the memory."""
        return self.floor / self.decode.seconds if self.decode and self.floor else None


@dataclass(frozen=True)
class Bench:
    """A benchmark of one converted checkpoint.

    Attributes:
        models: by name, "converted" and "original", where their weights were loaded from; the same folder where they
            share them.
        command: the command that was typed.
        settings: the options of the run, including defaults, and the original's `attention` ("sdpa").
        versions: of the packages that matter, and the device.
        checkpoint: `inspection.Facts.to_json()` of the converted checkpoint.
        weights: bytes of a model's parameters.
        bandwidth: bytes a second that the device reads, measured in the same run.
        contenders: names, the converted model's first and the original's second.
        left_out: contenders that do not run here, and why.
        rows: by batch, then length, then contender, skipped ones too.
        original: fingerprint of the converted weights, if known.
    """

    models: Mapping[str, str]
    command: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    checkpoint: Mapping[str, Any]
    weights: int
    bandwidth: float
    contenders: tuple[str, ...]
    left_out: Mapping[str, str]
    rows: tuple[Row, ...]
    original: str | None = None

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON values."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def save(self, folder: Path) -> None:
        """Write `bench.json` and, for spreadsheets, its rows as `bench.csv`."""
        write_whole(folder / FILE, json.dumps(self.to_json(), indent=1) + "\n")
        write_table(folder / TABLE, [_table_row(row) for row in self.rows])

    @classmethod
    def load(cls, folder: Path) -> Bench:
        """Read `bench.json`.

        Raises:
            KVSurgeryError: the file is missing, or was not written by `save`.
        """
        with document(folder / FILE, (FORMAT, VERSION), "kvsurgery bench") as content:
            rows = tuple(_row(fields) for fields in content.pop("rows"))
            contenders = tuple(content.pop("contenders"))
            return cls(**content, contenders=contenders, rows=rows)


def _row(fields: dict[str, Any]) -> Row:
    phases = {name: fields.pop(name) for name in PHASES}
    return Row(**fields, **{name: phase and Phase(**phase) for name, phase in phases.items()})


def _table_row(row: Row) -> dict[str, Any]:
    """A row of the CSV file: every phase has columns of its own, seconds end in _s; missing values are empty."""
    fields = {"contender": row.contender, "tokens": row.tokens, "batch": row.batch}
    for name in PHASES:
        phase = getattr(row, name)
        columns = {"_s": "seconds", "_low_s": "low", "_high_s": "high", "_count": "count", "_peak_bytes": "peak_bytes"}
        fields |= {name + suffix: phase and getattr(phase, field) for suffix, field in columns.items()}
    byte_fields = {name: getattr(row, name) for name in ("kv_bytes", "predicted")}
    return {**fields, **byte_fields, "floor_s": row.floor, "share_of_floor": row.share, "skipped": row.skipped}
