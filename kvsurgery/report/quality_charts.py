"""The panel that plots quality against the bytes of the KV cache, for sweeps and for comparisons of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvsurgery.evaluate.results import CONVERTED, ORIGINAL, PERPLEXITY, TaskResult
from kvsurgery.report.charts import FONT, Panel, byte_axis, label, looks, names_above, perplexity_axis
from kvsurgery.report.colors import LIGHT
from kvsurgery.report.findings import score
from kvsurgery.system.sizes import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BARS = "Vertical bars are 95% bootstrap intervals of the difference to the original."
RING: dict[str, Any] = {"marker": "o", "mfc": "none", "mec": LIGHT["ink"], "mew": 0.8, "ms": 9}
MOST_NUMBERS = 30  # points that have room for their numbers
NUMBER_SIDES: tuple[dict[str, Any], ...] = (
    {"xytext": (3, -4), "ha": "left", "va": "top"},
    {"xytext": (-3, 4), "ha": "right", "va": "bottom"},
)


@dataclass(frozen=True)
class Place:
    """One converted checkpoint in the panel.

    Attributes:
        kv_bytes: of one sequence.
        score: mean; shares are 0 to 1.
        low, high: the original's score plus the interval of the difference. This interval is paired by sample, so it is
            narrower than the interval of the score.
        number: the value written next to the point.
        front: whether no setting of its sweep with the same or a smaller KV cache scores as well.
    """

    kv_bytes: int
    score: float
    low: float
    high: float
    number: str = ""
    front: bool = False

    @classmethod
    def of(cls, kv_bytes: int | None, result: TaskResult | None, number: str = "", front: bool = False) -> Place | None:
        """The place of a checkpoint with these bytes and this result; None where one of them is missing."""
        if kv_bytes is None or result is None or not {ORIGINAL, CONVERTED} <= result.scores.keys():
            return None
        original_score, score = result.scores[ORIGINAL].mean, result.scores[CONVERTED].mean
        interval_ends = score, score  # a single sample has no interval
        if result.difference is not None:
            interval_ends = original_score + result.difference.low, original_score + result.difference.high
        return cls(kv_bytes, score, *interval_ends, number, front)


@dataclass(frozen=True)
class Line:
    """Places of one color, by ascending size; `joined` if they differ in one option."""

    name: str
    places: Sequence[Place]
    joined: bool = False


@dataclass(frozen=True)
class Quality:
    """The content of a panel.

    Attributes:
        task: the task; the original's score is the dashed line.
        lines: converted checkpoints.
        tokens: length of the sequence for which bytes are given.
        dense_bytes: bytes of the original's KV cache.
        numbers: the option whose values are written next to the points, if any.
    """

    task: TaskResult
    lines: Sequence[Line]
    tokens: int
    dense_bytes: int
    numbers: str = ""


def quality_panel(title: str, quality: Quality) -> Panel:
    """The panel of one task and metric."""
    places = [place for line in quality.lines for place in line.places]
    marks = any(place.front for place in places) + any(place.low < place.high for place in places)
    rows = -(-(len(quality.lines) + 1 + marks) // 2)
    return Panel(title, _alt(quality), partial(_draw, quality), height=2.9 + 0.2 * rows)


def _alt(quality: Quality) -> str:
    task = quality.task
    summary = "; ".join(
        f"{line.name}: "
        + ", ".join(f"{score(place.score, task.metric)} at {size(place.kv_bytes)}" for place in line.places)
        for line in quality.lines
    )
    original_interval = task.scores.get(ORIGINAL)
    original = (
        f" The original: {score(original_interval.mean, task.metric)} at {size(quality.dense_bytes)}."
        if original_interval
        else ""
    )
    return f"{task.task}, {task.metric}, against KV bytes. {summary}.{original}"


def _draw(quality: Quality, axes: Axes) -> None:
    task, factor = quality.task, 1 if quality.task.metric == PERPLEXITY else 100
    look = looks([line.name for line in quality.lines])
    if ORIGINAL in task.scores:
        original_score, color = factor * task.scores[ORIGINAL].mean, LIGHT["original"]
        axes.axhline(original_score, color=color, lw=1.2, ls="--", label=f"original, {size(quality.dense_bytes)}")
        axes.plot(quality.dense_bytes, original_score, "o", color=color, ms=4.5)
    shows_numbers = quality.numbers and sum(len(line.places) for line in quality.lines) <= MOST_NUMBERS
    for index, line in enumerate(quality.lines):
        # numbers of neighboring lines stand on different sides, so that they do not overlap
        number_style = NUMBER_SIDES[index % 2]
        x_values = [place.kv_bytes for place in line.places]
        y_values = [factor * place.score for place in line.places]
        zorder = 2 if line.joined else 3  # a checkpoint may be a setting of the sweep, too
        axes.plot(
            x_values, y_values, ls="-" if line.joined else "", label=label(line.name), zorder=zorder, **look[line.name]
        )
        color = look[line.name]["color"]
        for place in line.places:
            point = place.kv_bytes, factor * place.score
            axes.vlines(place.kv_bytes, factor * place.low, factor * place.high, color=color, lw=1, alpha=0.5)
            if place.front:
                axes.plot(*point, **RING)
            if shows_numbers:
                axes.annotate(
                    place.number, point, textcoords="offset points", fontsize=FONT - 1.5, color=color, **number_style
                )
    places = [place for line in quality.lines for place in line.places]
    if any(place.front for place in places):
        axes.plot([], [], ls="", label="best at its size", **RING)
    if any(place.low < place.high for place in places):
        axes.plot([], [], "|", color=LIGHT["muted"], ms=11, label="95% interval")
    _scale(axes, task.metric)
    numbers = f"; numbers: {quality.numbers}" if shows_numbers else ""
    axes.set_xlabel(f"KV cache of {quality.tokens:,} tokens{numbers}")
    names_above(axes)


def _scale(axes: Axes, metric: str) -> None:
    """Set the scales: logarithmic bytes on the x-axis, scores on the y-axis."""
    axes.set_xscale("log", base=2)
    axes.margins(x=0.08, y=0.15)
    byte_axis(axes.xaxis, base=2, most=6)
    if metric == PERPLEXITY:
        perplexity_axis(axes)
    else:
        axes.set_ylabel("score, %")
        # small differences should look small
        axes.set_ylim(max(min(axes.get_ylim()[0], 80), -8), 103)
