"""Ranks and full heads, against counting and sorting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.full_heads import full_heads
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.ranking import SPARSITIES, ranks

# few levels, so that many scores are equal
SCORES = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=st.integers(0, 4))


def ranks_of_all(scores):
    return ranks(scores, np.ones(len(scores), dtype=bool))


class TestRanks:
    def test_by_hand(self):
        assert ranks_of_all(np.float32([[0, 7], [0.5, 0]])).tolist() == [[1.5 / 4, 1], [3 / 4, 1.5 / 4]]

    @given(SCORES)
    def test_of_each_score_those_below_and_half_of_its_equals(self, scores):
        expected = [[((scores < s).sum() + ((scores == s).sum() + 1) / 2) / scores.size for s in row] for row in scores]
        np.testing.assert_allclose(ranks_of_all(scores), expected, rtol=1e-15)
        assert ranks_of_all(scores).max() <= 1
        assert ranks_of_all(scores).mean() == pytest.approx((1 + 1 / scores.size) / 2)

    @given(SCORES)
    def test_only_the_order_counts(self, scores):
        np.testing.assert_array_equal(ranks_of_all(scores), ranks_of_all(np.exp(scores) / 1000))


@given(SCORES, st.sampled_from(SPARSITIES))
def test_full_heads_are_the_highest_then_the_first(scores, sparsity):
    layers, heads = scores.shape
    profile = HeadProfile(scores, "ablation", "kv", "org/model", ModelDimensions(layers, heads, heads, 8))
    places = sorted(np.ndindex(layers, heads), key=lambda place: (-scores[place], place))
    full = places[: scores.size - round(sparsity * scores.size)]
    assert sorted(map(tuple, np.argwhere(full_heads(profile, sparsity)))) == sorted(full)


def test_query_heads_are_reduced():
    model = ModelDimensions(layers=1, query_heads=4, kv_heads=2, head_dim=8)
    profile = HeadProfile([[0, 1, 0.6, 0.6]], "headkv-r", "query", "org/model", model)
    assert full_heads(profile, 0.5).tolist() == [[False, True]]
    assert full_heads(profile, 0.5, "max").tolist() == [[True, False]]


def test_sliding_layers_have_no_full_heads_and_no_ranks():
    model = ModelDimensions(layers=3, query_heads=2, kv_heads=2, head_dim=8)
    profile = HeadProfile([[9, 8], [1, 2], [3, 4]], "ablation", "kv", "org/model", model, windows=(512, None, None))
    assert full_heads(profile, 0.5).tolist() == [[False, False], [False, False], [True, True]]
    assert ranks(profile.scores, profile.eligible).tolist() == [[0, 0], [0.25, 0.5], [0.75, 1]]


def test_no_head_is_full_where_every_layer_slides():
    model = ModelDimensions(layers=1, query_heads=2, kv_heads=2, head_dim=8)
    profile = HeadProfile([[1, 2]], "ablation", "kv", "org/model", model, windows=(512,))
    assert not full_heads(profile, 0).any()
    assert ranks(profile.scores, profile.eligible).tolist() == [[0, 0]]
