import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvsurgery.errors import PolicyError
from kvsurgery.policy.budgets import allocate_budgets

SCORES = hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(0, 2, width=32)).filter(lambda s: s.sum() > 0)


@given(SCORES, st.integers(1, 4096), st.floats(1.001, 20))
def test_total_is_exact_and_every_head_has_its_share(scores, budget, beta):
    budgets = allocate_budgets(scores, budget, beta)
    assert budgets.sum() == budget * scores.size
    assert budgets.min() >= np.floor(budget - budget / beta)


@given(SCORES, st.integers(1, 4096), st.floats(1.001, 20))
def test_more_score_never_means_a_smaller_budget(scores, budget, beta):
    budgets = allocate_budgets(scores, budget, beta)
    order = np.argsort(scores, kind="stable")
    # equal scores may differ by the entry that rounding hands out
    assert (np.diff(budgets[order]) >= -1).all()
    rises = np.diff(scores[order].astype(np.float64)) > 0
    assert (np.diff(budgets[order])[rises] >= 0).all()


@given(SCORES, st.integers(1, 4096))
def test_without_a_beta_budgets_are_in_proportion(scores, budget):
    budgets = allocate_budgets(scores, budget, None)
    assert budgets.sum() == budget * scores.size
    exact = scores.astype(np.float64) / scores.sum(dtype=np.float64) * budget * scores.size
    assert (np.abs(budgets - exact) < 1 + 1e-6 * exact.max()).all()


def test_by_hand():
    assert allocate_budgets(np.array([2.0, 1.0, 1.0, 0.0]), 100, None).tolist() == [200, 100, 100, 0]
    # share 100 - 50, pool 50 x 4 = 200 by .5 .25 .25 0
    assert allocate_budgets(np.array([2.0, 1.0, 1.0, 0.0]), 100, 2).tolist() == [150, 100, 100, 50]
    # thirds of a pool of 3: the entry left over goes to the earliest
    assert allocate_budgets(np.array([1.0, 1.0, 1.0]), 4, 1.5).tolist() == [4, 4, 4]
    assert allocate_budgets(np.array([1.0, 3.0]), 3, 2).tolist() == [2, 4]


def test_a_larger_beta_is_more_even():
    scores = np.array([0.0, 1.0, 5.0])
    spread = [np.ptp(allocate_budgets(scores, 1000, beta)) for beta in (1.01, 1.2, 2, 10)]
    assert spread == sorted(spread, reverse=True)
    assert spread[0] > 2 * spread[-1]


@pytest.mark.parametrize(
    ("budget", "beta", "scores", "message"),
    [
        (0, 1.2, [1.0], "`budgeted.budget`"),
        (1 << 25, 1.2, [1.0], "`budgeted.budget`"),
        (64, 1.0, [1.0], "`budgeted.beta`"),
        (64, float("nan"), [1.0], "`budgeted.beta`"),
        (64, float("inf"), [1.0], "`budgeted.beta`"),
        (64, 1.2, [0.0, 0.0], "all heads that need a budget have the score 0"),
    ],
)
def test_impossible_budgets(budget, beta, scores, message):
    with pytest.raises(PolicyError, match=message):
        allocate_budgets(np.array(scores), budget, beta)


def test_no_heads():
    assert allocate_budgets(np.array([]), 64, 1.2).tolist() == []
