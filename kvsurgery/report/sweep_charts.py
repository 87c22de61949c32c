"""The picture of a sweep: quality against KV bytes."""

from __future__ import annotations

import math

from kvsurgery.evaluate.results import CONVERTED, TaskResult
from kvsurgery.evaluate.sweep_results import Point, Sweep, named, varied
from kvsurgery.report.charts import Chart
from kvsurgery.report.findings import titles
from kvsurgery.report.quality_charts import BARS, Line, Place, Quality, quality_panel

FRONT = "A ring marks a setting that scores better than every setting with the same or a smaller KV cache."
SIZES = ("budget", "full_heads", "sparsity", "recent", "sink")  # options that preferably vary along a line
MOST_LINES = 8


def quality(sweep: Sweep) -> Chart:
    """A panel for each task and metric: a line for each series, and the original's score."""
    names = titles(sweep.original)
    numbers = axis_of(sweep).replace("_", " ")
    panels = tuple(
        quality_panel(
            names[task.task, task.metric],
            Quality(task, lines_of(sweep, task), sweep.tokens, sweep.dense_bytes, numbers),
        )
        for task in sweep.original
    )
    return Chart("sweep", panels, note=f"{FRONT} {BARS}")


def axis_of(sweep: Sweep) -> str:
    """The option that varies along a line: the size with the most values, or another option if no size has several."""
    varied_axes = varied(sweep.axes)
    return max([name for name in SIZES if name in varied_axes] or varied_axes, key=lambda name: len(sweep.axes[name]))


def series_of(sweep: Sweep) -> dict[str, list[Point]]:
    """The evaluated points by the name of their line: the values of the options that do not vary along it.

    If there would be too many lines, only the option with the fewest values makes lines.
    """
    other_axes = [name for name in varied(sweep.axes) if name != axis_of(sweep)]
    if math.prod(len(sweep.axes[name]) for name in other_axes) > MOST_LINES:
        other_axes = [min(other_axes, key=lambda name: len(sweep.axes[name]))]
    series: dict[str, list[Point]] = {}
    for point in sweep.points:
        if not point.skipped:
            name = named({axis: point.options[axis] for axis in other_axes}) or CONVERTED
            series.setdefault(name, []).append(point)
    return series


def lines_of(sweep: Sweep, task: TaskResult) -> list[Line]:
    """The series of a task that have scores."""
    axis = axis_of(sweep)
    front_points = sweep.front(task.task, task.metric)
    lines = []
    for name, points in series_of(sweep).items():
        valued_places = [
            (place, point.options[axis])
            for point in points
            if (place := _place(point, task, axis, front=point in front_points)) is not None
        ]
        valued_places.sort(key=lambda pair: (pair[0].kv_bytes, pair[0].score))
        # a line goes along one axis alone
        joined = len({value for _, value in valued_places}) == len(valued_places)
        lines.append(Line(name, [place for place, _ in valued_places], joined))
    return lines


def _place(point: Point, task: TaskResult, axis: str, front: bool) -> Place | None:
    result = point.result(task.task, task.metric)
    return Place.of(point.kv_bytes, result, str(point.options[axis]), front)
