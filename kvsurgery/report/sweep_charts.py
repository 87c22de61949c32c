"""The picture of a sweep: quality against KV bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvsurgery.console import size
from kvsurgery.evaluate.results import CONVERTED, ORIGINAL, PERPLEXITY, TaskResult
from kvsurgery.evaluate.sweep_results import Point, Sweep, named, varied
from kvsurgery.report.charts import FONT, Chart, Panel, label, looks, names_above
from kvsurgery.report.colours import LIGHT
from kvsurgery.report.findings import score, titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NUMBERS = 30  # points that have room for their values
SIZES = ("budget", "full_heads", "sparsity", "recent", "sink")  # what a line goes along, rather than other axes
MOST_LINES = 8


def quality(sweep: Sweep) -> Chart:
    """A panel for each task and metric: a line for each series, and the original's score."""
    names = titles(sweep.original)
    panels = tuple(
        Panel(names[task.task, task.metric], _alt(sweep, task), partial(_draw, sweep, task), height=3.3)
        for task in sweep.original
    )
    note = "Rings: nothing smaller scores as well. Bars are 95% bootstrap intervals of the difference to the original."
    return Chart("sweep", panels, note=note)


def axis_of(sweep: Sweep) -> str:
    """The axis that lines go along: the size with the most values, or any other axis where no size has several."""
    several = varied(sweep.axes)
    return max([name for name in SIZES if name in several] or several, key=lambda name: len(sweep.axes[name]))


def series_of(sweep: Sweep) -> dict[str, list[Point]]:
    """The points that were evaluated, by what their line is called: the values of the axes that it does not go along.

    Where these were too many lines, the axis with the fewest values makes them.
    """
    others = [name for name in varied(sweep.axes) if name != axis_of(sweep)]
    if math.prod(len(sweep.axes[name]) for name in others) > MOST_LINES:
        others = [min(others, key=lambda name: len(sweep.axes[name]))]
    series: dict[str, list[Point]] = {}
    for point in sweep.points:
        if not point.skipped:
            name = named({other: point.options[other] for other in others}) or CONVERTED
            series.setdefault(name, []).append(point)
    return series


def _alt(sweep: Sweep, task: TaskResult) -> str:
    said = "; ".join(
        f"{name}: "
        + ", ".join(f"{score(place.score, task.metric)} at {size(place.kv_bytes)}" for place in _places(points, task))
        for name, points in series_of(sweep).items()
    )
    whole = task.scores.get(ORIGINAL)
    original = f" The original: {score(whole.mean, task.metric)} at {size(sweep.dense_bytes)}." if whole else ""
    return f"{task.task}, {task.metric}, against KV bytes. {said}.{original}"


class Place(NamedTuple):
    """Where a point stands: shares in percent, and what its interval reaches from and to."""

    kv_bytes: int
    score: float
    low: float
    high: float
    point: Point


def _places(points: Sequence[Point], task: TaskResult) -> list[Place]:
    """The points of a line that have a score, from the smallest on.

    An interval is that of the difference to the original, which is paired by sample and so tells more than the score's.
    """
    places = []
    for point in points:
        found = point.result(task.task, task.metric)
        if found.scores and found.difference is not None and point.kv_bytes is not None:
            whole = found.scores[ORIGINAL].mean
            ends = whole + found.difference.low, whole + found.difference.high
            places.append(Place(point.kv_bytes, found.scores[CONVERTED].mean, *ends, point))
    return sorted(places, key=lambda place: place[:2])


def _draw(sweep: Sweep, task: TaskResult, axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    series, along, factor = series_of(sweep), axis_of(sweep), 1 if task.metric == PERPLEXITY else 100
    look = looks([*series])
    if task.scores:
        whole, colour = factor * task.scores[ORIGINAL].mean, LIGHT["original"]
        axes.axhline(whole, color=colour, lw=1.2, ls="--", label=f"original, {size(sweep.dense_bytes)}")
        axes.plot(sweep.dense_bytes, whole, "o", color=colour, ms=4.5)
    best = sweep.front(task.task, task.metric)
    for name, points in series.items():
        places = _places(points, task)
        # a line goes along one axis alone
        joined = len({place.point.options[along] for place in places}) == len(places)
        across, up = [place.kv_bytes for place in places], [factor * place.score for place in places]
        axes.plot(across, up, ls="-" if joined else "", label=label(name), **look[name])
        for place in places:
            at, colour = (place.kv_bytes, factor * place.score), look[name]["color"]
            axes.vlines(place.kv_bytes, factor * place.low, factor * place.high, color=colour, lw=1, alpha=0.5)
            if place.point in best:
                axes.plot(*at, "o", mfc="none", mec=LIGHT["ink"], mew=0.8, ms=9)
            if len(sweep.points) <= MOST_NUMBERS:
                number = axes.annotate(f"{place.point.options[along]}", at, (3, -4), textcoords="offset points")
                number.set(ha="left", va="top", fontsize=FONT - 2, color=colour)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: size(count).replace(".00", "")))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.08, y=0.15)
    if task.metric == PERPLEXITY:
        axes.set_ylabel("perplexity")
    else:
        axes.set_ylabel("score, %")
        # what differs little should look so
        axes.set_ylim(max(min(axes.get_ylim()[0], 80), -8), 103)
    numbers = f"; at points: {along.replace('_', ' ')}" if len(sweep.points) <= MOST_NUMBERS else ""
    axes.set_xlabel(f"KV cache of {sweep.tokens:,} tokens{numbers}")
    names_above(axes)
