"""The data of tables and charts, from the results of an evaluation: averages, curves, verdicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsurgery.evaluate.results import ORIGINAL, PERPLEXITY, Cell, Interval, Results, TaskResult

# facts that say how long a sample is, in numbers or in words
LENGTHS = ("tokens", "length", "words")
SIZES = ("short", "medium", "long")  # what LongBench v2 calls lengths
BETTER, WORSE, UNCLEAR = FINDINGS = ("better", "worse", "no clear difference")
FEWEST_SAMPLES = 8  # a bootstrap interval of fewer is too narrow


@dataclass(frozen=True)
class DepthGrid:
    """The scores of one model by depth and length.

    Attributes:
        title: task and model, and the metric if the task has several.
        task, model: the task and the model of the scores.
        tokens, depths: of the columns and rows, ascending.
        scores: by (depth, tokens); a place without samples is left out.
    """

    title: str
    task: TaskResult
    model: str
    tokens: tuple[int, ...]
    depths: tuple[float, ...]
    scores: Mapping[tuple[float, int], float]


@dataclass(frozen=True)
class Curve:
    """The mean scores of a benchmark by length; all its tasks have the same weight.

    Attributes:
        name: of the benchmark: "ruler" of "ruler/niah_single_1".
        metric: the metric of all tasks, or "score" if they differ.
        tasks: number of tasks in the average.
        fact: the fact of a sample that holds its length.
        lengths: as samples have them, ascending if they are numbers.
        scores: by model, mean scores by length.
    """

    name: str
    metric: str
    tasks: int
    fact: str
    lengths: tuple[Any, ...]
    scores: Mapping[str, Mapping[Any, float]]

    @property
    def title(self) -> str:
        """A short title."""
        metric = "" if self.metric in (self.name, "score") else f", {self.metric}"
        return f"{self.name}{metric}" + (f", mean of {self.tasks} tasks" if self.tasks > 1 else "")


def models(results: Results) -> tuple[str, ...]:
    """The models that were evaluated, the original first."""
    return tuple(sorted(results.models, key=lambda name: name != ORIGINAL))


def titles(tasks: Iterable[TaskResult]) -> dict[tuple[str, str], str]:
    """The title of each task and metric; it names the metric if a task has several."""
    tasks = [*tasks]
    metrics = Counter(task.task for task in tasks)
    return {
        (task.task, task.metric): task.task if metrics[task.task] == 1 else f"{task.task}, {task.metric}"
        for task in tasks
    }


def grids(results: Results) -> tuple[DepthGrid, ...]:
    """A grid of scores for each model, for every task with several depths."""
    depth_grids, names = [], titles(results.tasks)
    for task in results.tasks:
        cells = [cell for cell in task.cells if {"tokens", "depth"} <= cell.facts.keys()]
        tokens = tuple(sorted({cell.facts["tokens"] for cell in cells}))
        depths = tuple(sorted({cell.facts["depth"] for cell in cells}))
        for model in models(results) if len(depths) > 1 else ():
            title = f"{names[task.task, task.metric]}: {model}"
            depth_grids.append(DepthGrid(title, task, model, tokens, depths, _means(cells, model, ("depth", "tokens"))))
    return tuple(depth_grids)


def curves(results: Results) -> tuple[Curve, ...]:
    """A curve for every benchmark with several lengths, except for tasks that have a grid.

    Each further metric of a task makes a curve of its own.
    """
    grid_tasks = {grid.task.task for grid in grids(results)}
    seen_tasks = set()
    benchmarks: dict[tuple[str, str | None], list[TaskResult]] = {}
    for task in results.tasks:
        if task.task not in grid_tasks:
            further_metric = task.metric if task.task in seen_tasks else None
            benchmarks.setdefault((task.task.partition("/")[0], further_metric), []).append(task)
            seen_tasks.add(task.task)
    benchmark_curves = [_curve(name, tasks, models(results)) for (name, _), tasks in benchmarks.items()]
    return tuple(curve for curve in benchmark_curves if curve is not None)


def verdict(task: TaskResult) -> str:
    """The verdict from the interval of the difference: one of `FINDINGS`, or the reason why there is none."""
    difference = task.difference
    if task.count < FEWEST_SAMPLES:
        return "too few samples"
    if difference is not None and (difference.low > 0 or difference.high < 0):  # False for NaN
        return BETTER if (difference.mean < 0) == (task.metric == PERPLEXITY) else WORSE
    if task.metric != PERPLEXITY and ORIGINAL in task.scores and task.scores[ORIGINAL].mean == 0:
        return "original scores 0"
    return UNCLEAR


def against_original(task: TaskResult) -> str:
    """The verdict on the converted model's score, for a table: "worse by 12.0 points [3.0, 20.0]"."""
    difference, finding = task.difference, verdict(task)
    if task.count < FEWEST_SAMPLES or difference is None:
        return "too few samples to tell"
    if not math.isfinite(difference.mean):
        return "not a number"
    if finding not in FINDINGS:
        return finding
    if difference.low == difference.high == 0:
        return "same"
    if finding == UNCLEAR:
        return f"{finding} [{_plain_change(difference.low, task)}, {_plain_change(difference.high, task)}]"
    values = (abs(difference.mean), *sorted((abs(difference.low), abs(difference.high))))
    size, low, high = (_plain_change(value, task, "") for value in values)
    unit = "" if task.metric == PERPLEXITY else " points"
    return f"{finding} by {size}{unit} [{low}, {high}]"


def _plain_change(value: float, task: TaskResult, sign: str = "+") -> str:
    """A difference of perplexities, or of shares in percentage points."""
    return f"{value:{sign}z.3f}" if task.metric == PERPLEXITY else f"{100 * value:{sign}z.1f}"


def _curve(name: str, tasks: Sequence[TaskResult], names: Iterable[str]) -> Curve | None:
    cells = [cell for task in tasks for cell in task.cells]
    fact = next((fact for fact in LENGTHS if any(fact in cell.facts for cell in cells)), None)
    if fact is None:
        return None
    lengths = tuple(dict.fromkeys(cell.facts[fact] for cell in cells if fact in cell.facts))
    if len(lengths) < 2:
        return None
    if {*lengths} <= {*SIZES}:
        lengths = tuple(sorted(lengths, key=SIZES.index))
    scores: dict[str, dict[Any, float]] = {}
    for model in names:
        means_by_task = [_means([cell for cell in task.cells if fact in cell.facts], model, (fact,)) for task in tasks]
        means_by_length = {
            length: [means[length,] for means in means_by_task if (length,) in means] for length in lengths
        }
        scores[model] = {length: sum(means) / len(means) for length, means in means_by_length.items() if means}
    metrics = {task.metric for task in tasks}
    metric = metrics.pop() if len(metrics) == 1 else "score"
    ordered_lengths = tuple(sorted(lengths)) if all(isinstance(length, int) for length in lengths) else lengths
    return Curve(name, metric, len(tasks), fact, ordered_lengths, scores)


def _means(cells: Collection[Cell], model: str, facts: tuple[str, ...]) -> dict[tuple, float]:
    """Mean scores of samples, grouped by some of their facts."""
    sums: dict[tuple, tuple[float, int]] = {}
    for cell in cells:
        if model in cell.scores:
            place = tuple(cell.facts[fact] for fact in facts)
            total, count = sums.get(place, (0.0, 0))
            sums[place] = total + cell.count * cell.scores[model], count + cell.count
    return {place: total / count for place, (total, count) in sums.items()}


def score(value: float, metric: str) -> str:
    """A score for people: 97.5%, or a perplexity."""
    return f"{value:.4g}" if metric == PERPLEXITY else f"{value:.1%}"


def span(interval: Interval, metric: str) -> str:
    """An interval for people: 95.0–99.0%."""
    if metric == PERPLEXITY:
        return f"{score(interval.low, metric)}–{score(interval.high, metric)}"
    return f"{100 * interval.low:.1f}–{score(interval.high, metric)}"


def change(value: float, metric: str) -> str:
    """A difference of scores for people; of shares, in percentage points."""
    if not math.isfinite(value):
        return str(value)
    text = f"{value:+z.3f}" if metric == PERPLEXITY else f"{100 * value:+z.1f}"
    return text.replace("-", "−")
