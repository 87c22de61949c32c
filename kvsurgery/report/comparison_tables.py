"""The tables of a comparison: checkpoints side by side, and the settings of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsurgery.emit.cache_description import widest_first
from kvsurgery.evaluate.results import CONVERTED, ORIGINAL, TaskResult
from kvsurgery.evaluate.sweep_results import Point, Sweep, named, varied
from kvsurgery.heads.kinds import FULL, decided_kinds
from kvsurgery.report.charts import tokens
from kvsurgery.report.comparison import Comparison, Entry
from kvsurgery.report.findings import change, score, span, titles, verdict
from kvsurgery.report.headlines import decode_ratios, longest_place
from kvsurgery.system.sizes import size

NOTHING = "–"
UNQUANTIZED = "unquantized"


@dataclass(frozen=True)
class Cell:
    """A value, the lines below it, and "better" or "worse" if it clearly differs from the original's."""

    text: str = NOTHING
    notes: tuple[str, ...] = ()
    verdict: str = ""


@dataclass(frozen=True)
class TableRow:
    """A row and its header; the row of a skipped setting has the reason in place of cells."""

    name: str
    note: str
    cells: Sequence[Cell]
    reason: str = ""


def checkpoint_rows(comparison: Comparison) -> list[TableRow]:
    """A row for each fact and each score; the original's column is the first."""
    entries = comparison.entries
    rows = [
        *_heads(entries),
        TableRow(
            "bits of the KV cache",
            "",
            [Cell(UNQUANTIZED), *(Cell(_bits(entry)) for entry in entries)],
        ),
        _kv_bytes(entries),
    ]
    if any(entry.bench for entry in entries):
        rows.append(TableRow("decode speed", "relative to the original", [Cell("1.00×"), *_speeds(entries)]))
    if any(entry.results for entry in entries):
        rows += _scores(comparison)
    return rows


def sweep_columns(sweep: Sweep) -> list[str]:
    """The headers of `sweep_rows` after the setting's."""
    return ["KV cache", *titles(sweep.original).values()]


def sweep_rows(sweep: Sweep) -> list[TableRow]:
    """A row for each setting, the original's first: KV bytes, and the score in each task and metric."""
    fronts = {(task.task, task.metric): sweep.front(task.task, task.metric) for task in sweep.original if task.scores}
    original_cells = [Cell(size(sweep.dense_bytes), ("100%",)), *(_score(task, ORIGINAL) for task in sweep.original)]
    return [TableRow(ORIGINAL, "", original_cells), *(_setting_row(sweep, point, fronts) for point in sweep.points)]


def _setting_row(sweep: Sweep, point: Point, fronts: Mapping[tuple[str, str], Sequence[Point]]) -> TableRow:
    name = named({axis: point.options[axis] for axis in varied(sweep.axes)})
    if point.skipped or point.kv_bytes is None:
        return TableRow(name, "", (), point.skipped or "left out")
    cells = [Cell(size(point.kv_bytes), (f"{point.kv_bytes / sweep.dense_bytes:.0%}",))]
    for task in sweep.original:
        cell = _score(point.result(task.task, task.metric), CONVERTED)
        front_notes = ("○ front",) if point in fronts.get((task.task, task.metric), ()) else ()
        cells.append(Cell(cell.text, (*cell.notes, *front_notes), cell.verdict))
    return TableRow(name, "", cells)


def _heads(entries: Sequence[Entry]) -> Iterator[TableRow]:
    """The numbers of full and other KV heads that the policy decided."""
    surgeries = [entry.checkpoint["surgery"] for entry in entries]
    counts = [decided_kinds(surgery["heads"], surgery["full_heads"]) for surgery in surgeries]
    original_text = f"{counts[0].total():,} of {counts[0].total():,}"
    full_texts = [f"{entry_counts[FULL]:,} of {entry_counts.total():,}" for entry_counts in counts]
    yield TableRow("full KV heads", "they keep every token", [Cell(text) for text in (original_text, *full_texts)])
    other_texts = [
        ", ".join(f"{count:,} {kind.name}" for kind, count in entry_counts.items() if kind is not FULL)
        for entry_counts in counts
    ]
    yield TableRow("other KV heads", "", [Cell(), *(Cell(text or NOTHING) for text in other_texts)])


def _bits(entry: Entry) -> str:
    quantization = entry.checkpoint["surgery"]["quantization"]
    bits = quantization["bits"] if quantization else None
    widths = bits if isinstance(bits, list) else [bits]
    words = map(str, widest_first(widths))  # of layers that differ, each width once
    return ", ".join([*[UNQUANTIZED] * (None in widths), *words])


def _kv_bytes(entries: Sequence[Entry]) -> TableRow:
    """KV bytes at the longest length, the model's own context."""
    surgeries: list[Mapping[str, Any]] = [entry.checkpoint["surgery"] for entry in entries]
    rows = [surgery["kv_bytes"][-1] for surgery in surgeries]
    dtypes = dict.fromkeys(surgery.get("kv_dtype", "16 bit") for surgery in surgeries)
    cells = [
        Cell(size(row["after"]), (f"{row['after'] / row['before']:.0%} at {tokens(row['tokens'])} tokens",))
        for row in rows
    ]
    original_cell = Cell(size(rows[0]["before"]), (f"100% at {tokens(rows[0]['tokens'])} tokens",))
    return TableRow("KV cache", f"one sequence, model in {', '.join(dtypes)}", [original_cell, *cells])


def _speeds(entries: Sequence[Entry]) -> Iterator[Cell]:
    """Decode speeds at the longest prompt length that all benchmarks share, or else at each one's longest."""
    ratios_by_entry = [decode_ratios(entry.bench) for entry in entries]
    place_sets = [set(ratios) for ratios in ratios_by_entry if ratios]
    common_places = set.intersection(*place_sets) if place_sets else set()
    for ratios in ratios_by_entry:
        if not ratios:
            yield Cell()
            continue
        tokens, batch = place = longest_place(common_places or ratios)
        yield Cell(f"{ratios[place]:.2f}×", (f"{tokens:,} tokens, batch {batch}",))


def _scores(comparison: Comparison) -> Iterator[TableRow]:
    for task in comparison.tasks:
        samples = f"{task.metric}, {task.count:,} sample{'s' * (task.count != 1)}"
        cells = [_score(entry.result(task.task, task.metric), CONVERTED) for entry in comparison.entries]
        yield TableRow(task.task, samples, [_score(task, ORIGINAL), *cells])


def _score(result: TaskResult | None, model: str) -> Cell:
    """A score with its interval; for a converted model, also the difference from the original with its interval."""
    if result is None or model not in result.scores:
        return Cell()
    metric, interval = result.metric, result.scores[model]
    notes = [span(interval, metric)]
    if model == ORIGINAL or result.difference is None:
        return Cell(score(interval.mean, metric), tuple(notes))
    difference, finding = result.difference, verdict(result)
    notes.append(
        f"{change(difference.mean, metric)} ({change(difference.low, metric)} to {change(difference.high, metric)})"
    )
    return Cell(score(interval.mean, metric), (*notes, finding), finding.split()[0])
