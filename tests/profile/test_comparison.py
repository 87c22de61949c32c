"""How far two profiles agree, against counting by hand and the textbook's formula."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvsurgery.errors import PolicyError, ProfileError
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.comparison import compare
from kvsurgery.profile.embedding_heads import EmbeddingHead
from kvsurgery.profile.head_profile import HeadProfile
from tests.helpers.deciding import decided

MODEL = ModelDimensions(layers=2, query_heads=4, kv_heads=2, head_dim=8)
SCORES = hnp.arrays(np.float32, (3, 4), elements=st.integers(0, 5))


def kv(scores, method="duo", **changes):
    fields = {"granularity": "kv", "base_model": "org/model", "model": MODEL}
    return HeadProfile(np.array(scores), method, **{**fields, **changes})


def query(scores, method="headkv-r"):
    return kv(scores, method, granularity="query")


def ablation(scores):
    layers, heads = scores.shape
    return kv(scores, "ablation", model=ModelDimensions(layers, heads, heads, 8))


def row(*scores):
    """A profile of one layer."""
    return ablation(np.float32([scores]))


class TestSpearman:
    def test_without_ties(self):
        # 1 - 6 sum d^2 / (n (n^2 - 1)), with d = 0, 1, -1, 0
        assert compare(row(1, 2, 3, 4), row(0.1, 0.3, 0.2, 5)).spearman == pytest.approx(1 - 6 * 2 / (4 * 15))

    def test_ties_are_averaged(self):
        # ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: covariance 4.5, squares 4.5 and 5
        assert compare(row(1, 2, 2, 3), row(1, 2, 3, 4)).spearman == pytest.approx(4.5 / np.sqrt(4.5 * 5))

    @given(SCORES, SCORES)
    def test_symmetric_and_bounded(self, a, b):
        rho = compare(ablation(a), ablation(b)).spearman
        assert rho == compare(ablation(b), ablation(a)).spearman
        assert rho is None or -1 - 1e-12 <= rho <= 1 + 1e-12

    @given(SCORES.filter(lambda scores: scores.min() < scores.max()))
    def test_of_the_same_order_and_of_its_opposite(self, scores):
        assert compare(ablation(scores), ablation(np.exp(scores))).spearman == pytest.approx(1)
        assert compare(ablation(scores), ablation(scores.max() - scores)).spearman == pytest.approx(-1)

    @given(SCORES)
    def test_undefined_where_all_heads_are_alike(self, scores):
        assert compare(ablation(np.zeros_like(scores)), ablation(scores)).spearman is None


class TestOverlap:
    def test_by_hand(self):
        # at 0.25, 0.5, 0.75 the first has heads 0-5, 0-3, 0-1; the other 2-7, 2-5, 2-3
        found = compare(row(9, 9, 8, 8, 7, 7, 0, 0), row(0, 0, 9, 9, 8, 8, 7, 7)).overlaps
        assert [(overlap.full, overlap.shared) for overlap in found] == [(6, 4), (4, 2), (2, 0)]
        assert [overlap.share for overlap in found] == [4 / 6, 1 / 2, 0]
        assert [overlap.chance for overlap in found] == [0.75, 0.5, 0.25]
        assert [overlap.jaccard for overlap in found] == [4 / 8, 2 / 6, 0]

    @given(SCORES, SCORES)
    def test_sets_are_those_of_the_policies(self, a, b):
        for overlap in compare(ablation(a), ablation(b)).overlaps:
            full = []
            for scores in (a, b):
                policy = decided(ablation(scores), sparsity=overlap.sparsity)
                full.append({(n, head) for n, layer in enumerate(policy.layers) for head in layer.order[: layer.full]})
            assert len(full[0]) == len(full[1]) == overlap.full
            assert len(full[0] & full[1]) == overlap.shared
            assert overlap.jaccard == len(full[0] & full[1]) / len(full[0] | full[1])

    def test_no_head_is_full(self):
        last = compare(row(1), row(1)).overlaps[-1]
        assert (last.full, last.share, last.chance, last.jaccard) == (0, 1, 0, 1)


class TestValues:
    def test_scores_of_one_method(self):
        found = compare(kv([[0, 1], [0.5, 0.5]]), kv([[0, 0.5], [0.5, 1]]))
        assert (found.unit, found.granularity, found.group_reduce, found.ceiling) == ("score", "kv", None, 1)
        assert found.difference.tolist() == [[0, -0.5], [0, 0.5]]
        assert found.layer_differences.tolist() == [0.25, 0.25]

    def test_ranks_of_two_methods(self):
        found = compare(kv([[0, 1], [0.5, 0.5]]), kv([[3, 30], [300, 3000]], "ablation"))
        assert found.unit == "rank"
        assert found.values.tolist() == [[[1 / 4, 1], [2.5 / 4, 2.5 / 4]], [[1 / 4, 2 / 4], [3 / 4, 1]]]

    def test_query_heads_stay_query_heads(self):
        scores = [[0, 1, 2, 3], [4, 5, 6, 7]]
        found = compare(query(scores), query(scores))
        assert (found.granularity, found.group_reduce, found.values.shape) == ("query", "mean", (2, 2, 4))
        assert found.ceiling == 7

    @pytest.mark.parametrize(("how", "rho"), [("mean", 1), ("max", -1)])
    def test_query_heads_against_kv_heads(self, how, rho):
        # of each pair the mean is 3, 3.5, 4, 4.5 and the largest 6, 5.75, 5.5, 5.25
        scores = [[6, 0, 5.75, 1.25], [5.5, 2.5, 5.25, 3.75]]
        found = compare(kv([[2, 3], [4, 5]], "ablation"), query(scores), how)
        assert (found.granularity, found.group_reduce, found.values.shape) == ("kv", how, (2, 2, 2))
        assert found.spearman == pytest.approx(rho)


def test_json():
    found = compare(kv([[0, 1], [0.5, 0.5]], sink=4, recent=8), query([[0, 1, 2, 3], [4, 5, 6, 7]]))
    read = json.loads(json.dumps(found.to_json()))
    assert (read["a"]["method"], read["a"]["sink"], read["b"]["granularity"]) == ("duo", 4, "query")
    assert (read["granularity"], read["group_reduce"], read["unit"]) == ("kv", "mean", "rank")
    assert read["spearman"] == found.spearman
    assert read["difference"] == found.difference.tolist()
    assert read["layer_differences"] == found.layer_differences.tolist()
    assert [(entry["full"], entry["shared"]) for entry in read["overlap"]] == [
        (overlap.full, overlap.shared) for overlap in found.overlaps
    ]


class TestRefusals:
    def test_models_of_other_dimensions(self):
        small = kv(np.zeros((3, 2)), base_model="org/small", model=ModelDimensions(3, 4, 2, 16))
        with pytest.raises(ProfileError) as raised:
            compare(kv(np.zeros((2, 2))), small)
        assert str(raised.value) == (
            "org/model and org/small are different models (layers 2 and 3, head_dim 8 and 16); "
            "give profiles of one model"
        )

    def test_no_scores(self):
        reform = HeadProfile(None, "reform", None, "org/model", MODEL, embedding_heads=(EmbeddingHead(0, "q", 0),))
        with pytest.raises(ProfileError, match="the reform profile of org/model has embedding heads and no scores"):
            compare(kv(np.zeros((2, 2))), reform)

    def test_unknown_reduction(self):
        with pytest.raises(PolicyError, match="mean or max, got 'sum'"):
            compare(kv(np.zeros((2, 2))), query(np.zeros((2, 4))), "sum")
