"""Charts of scores: needle heat maps, all tasks side by side, and curves by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvsurgery.evaluate.results import PERPLEXITY, Results, TaskResult
from kvsurgery.report.charts import Chart, Panel, curve, label, looks, names_above, perplexity_axis, tokens
from kvsurgery.report.colors import LIGHT
from kvsurgery.report.findings import Curve, DepthGrid, curves, grids, models, score, span, titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NUMBERS = 12  # columns of a heat map that have room for numbers


def needle_maps(results: Results) -> Chart | None:
    """Needle heat maps: scores by depth and length, side by side for the models."""
    depth_grids = grids(results)
    panels = tuple(
        Panel(
            grid.title,
            f"{grid.title}, by depth and length: {_score_range(grid)}.",
            partial(_draw_grid, grid),
            _height(grid),
        )
        for grid in depth_grids
    )
    note = (
        "Columns are lengths of the text, and rows are depths of the needle in it. Bright cells are high scores, dark "
        "cells low ones."
    )
    return Chart("needle", panels, len(models(results)), note) if panels else None


def _height(grid: DepthGrid) -> float:
    return min(max(0.26 * len(grid.depths), 1), 4) + 0.8


def _score_range(grid: DepthGrid) -> str:
    if not grid.scores:
        return "no scores"
    low = score(min(grid.scores.values()), grid.task.metric)
    high = score(max(grid.scores.values()), grid.task.metric)
    return f"scores from {low} to {high}"


def _draw_grid(grid: DepthGrid, axes: Axes) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    top = max([1.0, *grid.scores.values()])
    for (depth, length), value in grid.scores.items():
        column = grid.tokens.index(length)
        row = grid.depths.index(depth)
        color = colormaps["viridis"](value / top)
        cell = Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=color, edgecolor=LIGHT["paper"], lw=0.8)
        axes.add_patch(cell)
        if len(grid.tokens) <= MOST_NUMBERS:
            # black or white, whichever stands out
            luminance = 0.2126 * color[0] + 0.7152 * color[1] + 0.0722 * color[2]
            ink = "#000000" if luminance > 0.5 else "#ffffff"
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=ink, fontsize=7.5)
    step = -(-len(grid.tokens) // 8)
    axes.set_xticks(range(0, len(grid.tokens), step), [tokens(length) for length in grid.tokens[::step]])
    step = -(-len(grid.depths) // 11)
    axes.set_yticks(range(0, len(grid.depths), step), [f"{depth:.0%}" for depth in grid.depths[::step]])
    axes.set_xlim(-0.5, len(grid.tokens) - 0.5)
    axes.set_ylim(len(grid.depths) - 0.5, -0.5)
    axes.grid(False)
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth")


def task_scores(results: Results) -> Chart | None:
    """Scores of all tasks with their intervals, without perplexities, which have another scale."""
    tasks = [task for task in results.tasks if task.metric != PERPLEXITY and task.scores]
    if not tasks:
        return None
    names = {titles(results.tasks)[task.task, task.metric]: task for task in tasks}
    summary = "; ".join(
        f"{name}: "
        + ", ".join(
            f"{model} {score(interval.mean, task.metric)} ({span(interval, task.metric)})"
            for model, interval in task.scores.items()
        )
        for name, task in names.items()
    )
    draw = partial(_draw_tasks, names, models(results))
    panel = Panel("Score by task", f"Scores with 95% intervals. {summary}.", draw, 0.3 * len(tasks) + 0.9)
    return Chart("tasks", (panel,), note="Bars are 95% bootstrap intervals.")


def _draw_tasks(tasks: Mapping[str, TaskResult], names: Sequence[str], axes: Axes) -> None:
    for place, name in enumerate(names):
        rows = [(row, task.scores[name]) for row, task in enumerate(tasks.values()) if name in task.scores]
        shift = 0.3 * (place - (len(names) - 1) / 2)
        axes.errorbar(
            [100 * interval.mean for _, interval in rows],
            [row + shift for row, _ in rows],
            xerr=[
                [100 * max(interval.mean - interval.low, 0) for _, interval in rows],
                [100 * max(interval.high - interval.mean, 0) for _, interval in rows],
            ],
            ls="",
            label=label(name),
            **looks(names)[name],
        )
    axes.set_yticks(range(len(tasks)), [label(name) for name in tasks], parse_math=False)
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    axes.set_xlim(-3, 103)
    axes.set_xlabel("score, %")
    names_above(axes)


def length_curves(results: Results) -> Chart | None:
    """Curves of scores by length, for each benchmark with several lengths."""
    score_curves = curves(results)
    panels = tuple(
        Panel(score_curve.title, _alt(score_curve), partial(_draw_curve, score_curve)) for score_curve in score_curves
    )
    note = (
        "Lower perplexity is better." if any(score_curve.metric == PERPLEXITY for score_curve in score_curves) else ""
    )
    return Chart("lengths", panels, note=note) if panels else None


def _alt(score_curve: Curve) -> str:
    summary = "; ".join(
        f"{model}: "
        + ", ".join(f"{score(value, score_curve.metric)} at {tokens(length)}" for length, value in values.items())
        for model, values in score_curve.scores.items()
    )
    return f"{score_curve.title}, by {score_curve.fact}. {summary}."


def _draw_curve(score_curve: Curve, axes: Axes) -> None:
    scale = 1 if score_curve.metric == PERPLEXITY else 100
    lines = {
        model: {length: scale * value for length, value in values.items()}
        for model, values in score_curve.scores.items()
    }
    curve(axes, lines, score_curve.lengths, looks([*lines]), score_curve.fact)
    if score_curve.metric == PERPLEXITY:
        axes.margins(y=0.2)
        perplexity_axis(axes)
    else:
        axes.set_ylabel("score, %")
        axes.set_ylim(-3, 103)
