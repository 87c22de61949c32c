"""Mean scores over samples with bootstrap intervals (Efron 1979), and means by the facts of samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kvsurgery.evaluate.results import PERPLEXITY, Cell, Interval, TaskResult
from kvsurgery.evaluate.sample import Sample

RESAMPLES = 2000
BOUNDS = (0.025, 0.975)  # of a 95% percentile interval

Records = Mapping[tuple[str, str], Mapping[str, Any]]  # by a sample's key, as a file of answers has them


def task_result(
    task: str, metric: str, samples: Sequence[Sample], answers: Mapping[str, Records], seed: int
) -> TaskResult:
    """Scores of the samples that every model answered.

    Args:
        samples: all of the task that have this metric.
        answers: records by model and sample; each has `skipped`, or `nll`, or `scores` by metric.
        seed: of the bootstrap.
    """
    values = {
        model: {
            sample.key: records[sample.key]["nll"] if metric == PERPLEXITY else records[sample.key]["scores"][metric]
            for sample in samples
            if "skipped" not in records[sample.key]
        }
        for model, records in answers.items()
    }
    common_keys = _common_keys(samples, values)
    scores: dict[str, Interval] = {}
    difference = None
    if common_keys:
        table = np.array([[by_key[key] for key in common_keys] for by_key in values.values()], dtype=np.float64)
        means = _scaled(table.mean(1), metric)
        resampled = _scaled(resampled_means(table, seed), metric)
        scores = {model: interval(means[place], resampled[place]) for place, model in enumerate(values)}
        if len(values) == 2 and len(common_keys) > 1:  # one sample says nothing about another
            difference = interval(means[1] - means[0], resampled[1] - resampled[0])
    cells = tuple(_cells(samples, values, metric))
    return TaskResult(task, metric, len(common_keys), skip_counts(samples, answers), scores, difference, cells)


def skip_counts(samples: Sequence[Sample], answers: Mapping[str, Records]) -> dict[str, int]:
    """How many samples some model did not answer, by that model and its reason."""
    reasons_by_key = {
        sample.key: [
            f"{model}: {reason}" for model, records in answers.items() if (reason := records[sample.key].get("skipped"))
        ]
        for sample in samples
    }
    return dict(sorted(Counter(reasons[0] for reasons in reasons_by_key.values() if reasons).items()))


def resampled_means(values: np.ndarray, seed: int) -> np.ndarray:
    """Means over samples drawn with replacement, the same ones for every series: that makes differences paired.

    Args:
        values: float64 [series, samples].

    Returns:
        float64 [series, RESAMPLES].
    """
    samples = values.shape[1]
    return values @ _resampled_counts(samples, seed).T / samples


@lru_cache(maxsize=4)
def _resampled_counts(samples: int, seed: int) -> np.ndarray:
    """How often each resample draws each sample, [RESAMPLES, samples]: a table needs the same ones for every cell."""
    return np.random.default_rng(seed).multinomial(samples, np.full(samples, 1 / samples), size=RESAMPLES)


def interval(mean: float, resampled: np.ndarray) -> Interval:
    """A value with the interval of the middle 95% of its resampled values, float64 [RESAMPLES]."""
    low, high = np.quantile(resampled, BOUNDS)
    return Interval(float(mean), float(low), float(high))


def _cells(
    samples: Sequence[Sample], values: Mapping[str, Mapping[tuple[str, str], float]], metric: str
) -> Iterator[Cell]:
    """Means by facts, over the samples that every model answered; if there is none, over those that each answered."""
    cells: dict[str, list[Sample]] = {}
    for sample in samples:
        cells.setdefault(json.dumps(sample.facts), []).append(sample)
    for group in cells.values():
        answered_keys = {
            model: [sample.key for sample in group if sample.key in by_key] for model, by_key in values.items()
        }
        common_keys = _common_keys(group, values)
        used_keys = {model: common_keys or keys for model, keys in answered_keys.items()}
        scores = {
            model: float(_scaled(np.mean([values[model][key] for key in keys]), metric))
            for model, keys in used_keys.items()
            if keys
        }
        yield Cell(dict(group[0].facts), max(map(len, used_keys.values())), scores)


def _common_keys(
    samples: Sequence[Sample], values: Mapping[str, Mapping[tuple[str, str], float]]
) -> list[tuple[str, str]]:
    """Of the samples that every model answered."""
    return [sample.key for sample in samples if all(sample.key in by_key for by_key in values.values())]


def _scaled(means: np.ndarray, metric: str) -> np.ndarray:
    """Means of log-likelihoods as perplexities."""
    return np.exp(means) if metric == PERPLEXITY else means
