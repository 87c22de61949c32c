"""Write a comparison: `index.html` with several checkpoints and sweeps side by side, and its chart as a PNG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvsurgery.bench.results import Bench
from kvsurgery.display.progress import Progress, silent
from kvsurgery.errors import OutputError
from kvsurgery.evaluate.results import CONVERTED, Results, TaskResult
from kvsurgery.evaluate.sweep_results import Sweep
from kvsurgery.report.charts import Chart
from kvsurgery.report.comparison import Comparison, compare
from kvsurgery.report.comparison_tables import checkpoint_rows, sweep_columns, sweep_rows
from kvsurgery.report.findings import titles
from kvsurgery.report.folder import check_output, has_page, is_sweep
from kvsurgery.report.quality_charts import BARS, Line, Place, Quality, quality_panel
from kvsurgery.report.rendering import render
from kvsurgery.report.sweep_charts import FRONT, axis_of, lines_of, quality
from kvsurgery.report.writing import PAGE, save_page, short_name, showable


def write_comparison(folders: Sequence[Path], out: Path, progress: Progress = silent) -> tuple[Path, Comparison]:
    """Write the page that compares results of `eval`, `bench` and `sweep` in several folders.

    Returns:
        The page, and what it compares.

    Raises:
        KVSurgeryError: as `compare`, or a folder's results are from another version.
        OutputError: a file cannot be written.
    """
    check_output(out)
    if has_page(out) or is_sweep(out):
        raise OutputError(f"cannot write to {out}: it has a page of its own results; give another folder")
    with showable(*folders):
        comparison = compare(folders)
        chart = quality_chart(comparison)
        progress(0, 1, "page")
        page = _page(comparison, chart)
        out.mkdir(parents=True, exist_ok=True)
        save_page(out, page, [chart] if chart else [], progress)
    return out / PAGE, comparison


def write_sweep(folder: Path, progress: Progress = silent) -> Path:
    """Write the page of a sweep and `sweep.png` into the folder of the sweep.

    Returns:
        The page.

    Raises:
        KVSurgeryError: the folder has no finished sweep, or one from another version.
        OutputError: a file cannot be written.
    """
    with showable(folder):
        comparison = compare([folder])
        chart = quality(comparison.sweeps[0].sweep)
        progress(0, 1, "page")
        save_page(folder, _page(comparison, chart), [chart], progress)
    return folder / PAGE


def quality_chart(comparison: Comparison) -> Chart | None:
    """Plot quality against the KV bytes of the longest sample: a panel for each task, with checkpoints and sweeps."""
    sizes = [
        (run.tokens, run.dense_bytes)
        for run in comparison.evaluations
        if run.tokens is not None and run.dense_bytes is not None
    ]
    if not sizes:
        return None
    names = titles(comparison.tasks)
    axes = {axis_of(entry.sweep) for entry in comparison.sweeps}
    numbers = axes.pop().replace("_", " ") if len(axes) == 1 else ""
    panels = []
    for task in comparison.tasks:
        if lines := [*_lines(comparison, task)]:
            quality = Quality(task, lines, *sizes[0], numbers)
            panels.append(quality_panel(names[task.task, task.metric], quality))
    note = f"The dashed line is the original. {BARS}"
    return Chart("quality", tuple(panels), note=f"{note} {FRONT}" if comparison.sweeps else note) if panels else None


def _lines(comparison: Comparison, task: TaskResult) -> Iterator[Line]:
    for entry in comparison.entries:
        place = Place.of(entry.results.kv_bytes if entry.results else None, entry.result(task.task, task.metric))
        if place is not None:
            yield Line(entry.name, [place])
    for entry in comparison.sweeps:
        for line in lines_of(entry.sweep, task):
            is_prefixed = len(comparison.sweeps) > 1 or len(comparison.entries) > 0
            yield Line(_series_name(entry.name, line.name) if is_prefixed else line.name, line.places, line.joined)


def _series_name(sweep: str, series: str) -> str:
    return sweep if series == CONVERTED else f"{sweep}: {series}"


def _page(comparison: Comparison, chart: Chart | None) -> str:
    entries, sweeps = comparison.entries, comparison.sweeps
    original = sweeps[0].sweep.source if sweeps else entries[0].checkpoint["surgery"]["base_model"]
    return render(
        "comparison.html.jinja",
        title=_title(comparison, original),
        original=original or "",
        chart=chart,
        names=[entry.name for entry in entries],
        rows=checkpoint_rows(comparison) if entries else [],
        sweeps=[(entry, sweep_columns(entry.sweep), sweep_rows(entry.sweep)) for entry in sweeps],
        evaluated=bool(comparison.evaluations),
        notices=comparison.notices,
        runs=[*_runs(comparison)],
    )


def _title(comparison: Comparison, original: str | None) -> str:
    """The title of the page: the kinds of results, and the model."""
    entries, sweeps = comparison.entries, comparison.sweeps
    name = short_name(original) if original else ""
    if len(entries) + len(sweeps) == 1:
        return entries[0].name if entries else f"Sweep of {name}"
    counts = [f"{len(entries)} checkpoint{'s' * (len(entries) != 1)}"] * bool(entries)
    counts += [f"{len(sweeps)} sweep{'s' * (len(sweeps) != 1)}"] * bool(sweeps)
    return f"{name and f'{name}: '}{' and '.join(counts)} compared"


def _runs(comparison: Comparison) -> Iterator[tuple[str, Results | Bench | Sweep]]:
    """The commands that produced the results."""
    for entry in comparison.entries:
        if entry.results:
            yield f"{entry.name}: evaluation", entry.results
        if entry.bench:
            yield f"{entry.name}: benchmark", entry.bench
    for entry in comparison.sweeps:
        yield f"{entry.name}: sweep", entry.sweep
