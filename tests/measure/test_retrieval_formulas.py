"""The formulas of retrieval scores, by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.measure.retrieval import copy_score, mass_score, most_attended

# one query of three heads over six tokens
WEIGHTS = torch.tensor(
    [
        [0.05, 0.30, 0.10, 0.25, 0.20, 0.10],
        [0.40, 0.10, 0.10, 0.10, 0.10, 0.20],
        [0.00, 0.00, 0.50, 0.00, 0.50, 0.00],
    ]
)


def test_the_most_attended_by_hand():
    top = most_attended(WEIGHTS, 4)
    assert top.positions.tolist() == [[1, 3, 4, 2], [0, 5, 1, 2], [2, 4, 0, 1]]
    torch.testing.assert_close(
        top.weights, torch.tensor([[0.30, 0.25, 0.20, 0.10], [0.40, 0.20, 0.10, 0.10], [0.50, 0.50, 0.00, 0.00]])
    )


def test_positions_go_on_from_the_first():
    assert most_attended(WEIGHTS, 2, first_position=100).positions.tolist() == [[101, 103], [100, 105], [102, 104]]


def test_fewer_keys_than_asked_for():
    assert most_attended(WEIGHTS, 9).positions.shape == (3, 6)


@given(
    st.integers(1, 6),
    st.lists(st.lists(st.sampled_from([0.0, 1e-30, 0.1, 0.5, 1.0]), min_size=6, max_size=6), min_size=1),
)
def test_in_falling_order_and_earlier_tokens_first(top, rows):
    made = most_attended(torch.tensor(rows), top)
    for row, weights, positions in zip(rows, made.weights, made.positions.tolist(), strict=True):
        assert positions == sorted(range(6), key=lambda place: (-row[place], place))[:top]
        torch.testing.assert_close(weights, torch.tensor(row)[positions])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        # heads look at positions 1, 0, 2; the needle is 1 to 3, its tokens are 11, 12, 12
        (11, [1 / 3, 0, 0]),
        (12, [0, 0, 1 / 3]),
        (10, [0, 0, 0]),
        (99, [0, 0, 0]),
    ],
    ids=["first head", "last head", "outside of the needle", "not there"],
)
def test_r_by_hand(said, expected):
    prompt = np.array([10, 11, 12, 12, 13])
    assert copy_score(most_attended(WEIGHTS, 3), range(1, 4), prompt, said).tolist() == expected


def test_r_of_a_tie_is_the_earlier_token():
    # the last head looks at positions 2 and 4 alike
    attended = most_attended(WEIGHTS, 1)
    assert copy_score(attended, range(2, 3), np.arange(6), 2).tolist() == [0, 0, 1]
    assert copy_score(attended, range(4, 5), np.arange(6), 4).tolist() == [0, 0, 0]


def test_r_looks_at_the_needle_and_not_at_the_same_token_elsewhere():
    attended = most_attended(WEIGHTS, 1)
    assert copy_score(attended, range(3, 5), np.array([7, 7, 7, 7, 7, 7]), 7).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("needle", "expected"),
    [
        # N = 1: the one most attended token
        (range(1, 2), [0.30, 0, 0]),
        (range(0, 1), [0, 0.40, 0]),
        # N = 2: {1, 3}, {0, 5}, {2, 4}
        (range(3, 5), [0.25 / 2, 0, 0.50 / 2]),
        (range(0, 2), [0.30 / 2, 0.40 / 2, 0]),
        # N = 3: {1, 3, 4}, {0, 5, 1}, {2, 4, 0}; tokens of the needle that others outrank do not count
        (range(1, 4), [0.55 / 3, 0.10 / 3, 0.50 / 3]),
        # a tie for the last place: the second head takes 1 of 1 to 4
        (range(2, 5), [0.45 / 3, 0, 1.00 / 3]),
        (range(0, 6), [1 / 6, 1 / 6, 1 / 6]),
    ],
)
def test_er_and_r2_by_hand(needle, expected):
    np.testing.assert_allclose(mass_score(most_attended(WEIGHTS, 6), needle), expected, rtol=1e-6)


@given(st.integers(0, 2**32), st.integers(0, 8), st.integers(1, 8))
def test_the_mass_is_at_most_an_nth(seed, start, size):
    weights = torch.rand(4, 16, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    score = mass_score(most_attended(weights, 16), range(start, start + size))
    everything = weights[:, start : start + size].sum(1).numpy()
    assert (score >= 0).all()
    assert (score <= everything / size + 1e-6).all()
