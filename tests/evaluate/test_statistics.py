"""Means, intervals and cells, against cases counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.evaluate.sample import Sample
from kvsurgery.evaluate.statistics import resampled_means, task_result


def samples(count: int, metric: str = "qa_f1") -> list[Sample]:
    """Two of each length, then of the next."""
    tokens = np.zeros(4, dtype=np.int64)
    return [Sample("t", str(number), tokens, metric, facts={"tokens": number // 2}) for number in range(count)]


def answers(values: list[float | None], metric: str = "qa_f1") -> dict:
    """Records of so many samples; None is one that was skipped."""
    made = {}
    for number, value in enumerate(values):
        scored = {"nll": value} if metric == "perplexity" else {"scores": {metric: value}}
        made["t", str(number)] = {"skipped": "out of memory"} if value is None else scored
    return made


def test_means_differences_and_cells():
    both = {"original": answers([1, 0, 1, 1]), "converted": answers([1, 0, 0, 0])}
    found = task_result("t", "qa_f1", samples(4), both, seed=0)
    assert (found.count, found.skipped) == (4, {})
    assert (found.scores["original"].mean, found.scores["converted"].mean) == (0.75, 0.25)
    assert found.difference.mean == -0.5
    assert [(cell.facts, cell.count, cell.scores) for cell in found.cells] == [
        ({"tokens": 0}, 2, {"original": 0.5, "converted": 0.5}),
        ({"tokens": 1}, 2, {"original": 1.0, "converted": 0.0}),
    ]
    # of four samples, each of the differences 0 and -1 is drawn twice in the mean
    assert -1 <= found.difference.low < -0.5 < found.difference.high <= 0


def test_perplexity_is_the_exponential_of_a_mean():
    both = {"original": answers([1.0, 3.0], "perplexity"), "converted": answers([2.0, 3.0], "perplexity")}
    found = task_result("t", "perplexity", samples(2, "perplexity"), both, seed=0)
    assert found.scores["original"].mean == pytest.approx(math.exp(2))
    assert found.difference.mean == pytest.approx(math.exp(2.5) - math.exp(2))
    # two samples have three means
    assert found.scores["original"].low == pytest.approx(math.e)
    assert found.scores["original"].high == pytest.approx(math.exp(3))
    [cell] = found.cells
    assert cell.scores["converted"] == pytest.approx(math.exp(2.5))


def test_only_what_both_answered_is_averaged_and_the_others_are_counted():
    both = {"original": answers([1, None, None, None]), "converted": answers([0, 1, 1, None])}
    found = task_result("t", "qa_f1", samples(4), both, seed=0)
    assert found.count == 1
    assert found.skipped == {"original: out of memory": 3}
    assert found.scores["converted"].mean == 0
    # where the original answered nothing, the converted one's answers are shown
    assert [(cell.count, cell.scores) for cell in found.cells] == [
        (1, {"original": 1.0, "converted": 0.0}),
        (1, {"converted": 1.0}),
    ]


def test_without_an_answer_there_are_no_scores():
    found = task_result("t", "qa_f1", samples(2), {"converted": answers([None, None])}, seed=0)
    assert (found.count, found.scores, found.difference) == (0, {}, None)
    assert [(cell.count, cell.scores) for cell in found.cells] == [(0, {})]


def test_one_sample_says_nothing_about_another():
    both = {"original": answers([1.0]), "converted": answers([0.0])}
    found = task_result("t", "qa_f1", samples(1), both, seed=0)
    assert (found.count, found.difference) == (1, None)
    assert {model: score.mean for model, score in found.scores.items()} == {"original": 1, "converted": 0}


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12), st.integers(0, 3))
def test_intervals_are_paired_reproducible_and_hold_the_mean_of_equals(values, seed):
    both = {"original": answers(values), "converted": answers(values)}
    found = task_result("t", "qa_f1", samples(len(values)), both, seed)
    assert found == task_result("t", "qa_f1", samples(len(values)), both, seed)
    # paired: equal models differ by nothing, however samples vary
    assert (found.difference.mean, found.difference.low, found.difference.high) == (0, 0, 0)
    interval = found.scores["original"]
    assert min(values) - 1e-9 <= interval.low <= interval.high <= max(values) + 1e-9


def test_the_bootstrap_has_the_spread_of_a_mean():
    """The standard deviation over samples, divided by the root of their number."""
    values = np.random.default_rng(1).random((1, 400))
    found = resampled_means(values, 0)
    assert found.std() == pytest.approx(values.std() / 20, rel=0.1)
    assert found.mean() == pytest.approx(values.mean(), rel=0.01)
