"""Merging: laws that hold for any scores, cases by hand, and what a merged profile says of itself."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvsurgery.errors import ProfileError
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.heads.kinds import STREAMING
from kvsurgery.profile.embedding_heads import EmbeddingHead
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.merging import merge
from kvsurgery.profile.methods import SCORE_METHODS
from tests.helpers.deciding import decided

MODEL = ModelDimensions(layers=2, query_heads=4, kv_heads=2, head_dim=8)
HOWS = ("mean", "max", "rank-product")
SCORES = st.lists(
    hnp.arrays(np.float32, (2, 2), elements=st.floats(0, 1, width=32, allow_subnormal=False) | st.sampled_from([0, 1])),
    min_size=2,
    max_size=4,
)


def kv(scores, method="duo", **changes):
    fields = {"granularity": "kv", "base_model": "org/model", "model": MODEL}
    return HeadProfile(np.array(scores), method, **{**fields, **changes})


def query(scores, method="headkv-r", **changes):
    return kv(scores, method, granularity="query", **changes)


class TestLaws:
    @settings(max_examples=50)
    @given(SCORES, st.sampled_from(HOWS), st.sampled_from(["duo", "ablation"]))
    def test_the_order_does_not_matter(self, tmp_path_factory, scores, how, method):
        profiles = [kv(of, method, provenance={"seed": seed}) for seed, of in enumerate(scores)]
        merged = {merge(order, how).hash for order in permutations(profiles)}
        assert len(merged) == 1
        path = tmp_path_factory.mktemp("merged") / "p.safetensors"
        merge(profiles, how).save(path)
        assert HeadProfile.load(path).hash == merged.pop()

    @given(SCORES)
    def test_mean_and_max_of_scores(self, scores):
        profiles = [kv(of) for of in scores]
        mean, most = (merge(profiles, how).scores for how in ("mean", "max"))
        np.testing.assert_allclose(mean, np.mean(scores, axis=0, dtype=np.float64), rtol=1e-6, atol=1e-40)
        np.testing.assert_array_equal(most, np.max(scores, axis=0))

    @given(SCORES.filter(lambda scores: scores[0].max() > 0))
    def test_ranks_do_not_know_the_scale(self, scores):
        first, *others = (kv(of, "ablation") for of in scores)
        scaled = kv(scores[0] * np.float32(1024), "ablation")
        np.testing.assert_array_equal(
            merge([first, *others], "rank-product").scores, merge([scaled, *others], "rank-product").scores
        )

    @given(SCORES, st.sampled_from(HOWS), st.floats(0, 1))
    def test_every_result_can_be_decided_on(self, scores, how, sparsity):
        merged = merge([kv(of) for of in scores], how)
        policy = decided(merged, sparsity=sparsity)
        assert policy.counts[STREAMING] == round(sparsity * 4)
        assert merged.scores.max() <= SCORE_METHODS[merged.method].most


class TestByHand:
    def test_rank_product(self):
        # places 1, 2, 3, 4 and 3.5, 2, 3.5, 1 of four
        merged = merge([kv([[0.1, 0.2], [0.3, 0.4]]), kv([[9, 5], [9, 0]], "ablation")], "rank-product")
        expected = np.sqrt([[1 * 3.5, 2 * 2], [3 * 3.5, 4 * 1]]) / 4
        np.testing.assert_allclose(merged.scores, expected, rtol=1e-6)
        assert (merged.method, merged.granularity) == ("rank-product", "kv")

    def test_three_profiles(self):
        profiles = [kv([[1, 0], [0, 0]]), kv([[1, 0.5], [0, 0]]), kv([[1, 0.25], [0, 0.75]])]
        assert merge(profiles).scores.tolist() == [[1, 0.25], [0, 0.25]]
        assert merge(profiles, "max").scores.tolist() == [[1, 0.5], [0, 0.75]]

    def test_query_heads_stay_query_heads(self):
        merged = merge([query([[0, 2, 0, 0]] * 2), query([[4, 0, 0, 0]] * 2)])
        assert (merged.method, merged.granularity) == ("headkv-r", "query")
        assert merged.scores.tolist() == [[2, 1, 0, 0]] * 2

    @pytest.mark.parametrize(("how", "kept"), [("mean", [4 / 4, 3 / 4]), ("max", [3 / 4, 4 / 4])])
    def test_query_heads_beside_kv_heads(self, how, kept):
        scores = query([[2, 2, 3, 0], [0, 0, 0, 0]])
        alike = kv([[1, 1], [1, 1]])
        merged = merge([scores, alike], "rank-product", group_reduce=how)
        np.testing.assert_allclose(merged.scores[0], np.sqrt(np.array(kept) * 2.5 / 4), rtol=1e-6)
        assert merged.granularity == "kv"
        assert merged.provenance["group_reduce"] == how


class TestFacts:
    def test_provenance_names_the_sources(self):
        sources = [kv(np.eye(2), provenance={"seed": 0}), query(np.eye(2, 4), provenance={"trials": 5})]
        merged = merge(sources, "rank-product")
        assert merged.provenance["merge"] == "rank-product"
        found = {source["hash"]: source for source in merged.provenance["sources"]}
        assert {hash: (source["method"], source["provenance"]) for hash, source in found.items()} == {
            profile.hash: (profile.method, profile.provenance) for profile in sources
        }

    def test_no_word_of_a_reduction_where_there_was_none(self):
        merged = merge([query(np.eye(2, 4)), query(np.ones((2, 4)))], group_reduce="max")
        assert "group_reduce" not in merged.provenance

    @pytest.mark.parametrize(
        ("one", "other", "kept"),
        [((4, 32), (4, 32), (4, 32)), ((4, 32), (4, 64), (None, None)), ((4, 32), (None, None), (None, None))],
    )
    def test_sink_and_recent_that_all_agree_on(self, one, other, kept):
        profiles = [kv(np.eye(2), sink=sink, recent=recent) for sink, recent in (one, other)]
        merged = merge(profiles)
        assert (merged.sink, merged.recent) == kept

    def test_revision_that_all_agree_on(self):
        here, there, elsewhere = (
            kv(np.eye(2), base_model=name, base_revision=revision)
            for name, revision in (("org/model", "abc"), ("org/model", "def"), ("./model", None))
        )
        assert merge([here, here]).base_revision == "abc"
        assert merge([here, there]).base_revision is None
        assert merge([here, elsewhere], base_model="org/model").base_revision == "abc"
        assert merge([here, here], base_model="org/another").base_revision is None


class TestRefusals:
    @pytest.mark.parametrize("how", ["mean", "max"])
    def test_scores_of_two_methods(self, how):
        with pytest.raises(ProfileError) as raised:
            merge([kv(np.eye(2)), kv(np.eye(2), "ablation")], how)
        assert str(raised.value) == (
            f"scores of ablation and duo have no common scale to take the {how} on; merge ranks: `how` rank-product"
        )

    def test_two_names(self):
        with pytest.raises(ProfileError, match=r"different models, \./model and org/model; .*`base_model` NAME"):
            merge([kv(np.eye(2)), kv(np.eye(2), base_model="./model")])

    def test_weights_of_one_name(self):
        one, other = (kv(np.eye(2), base_model="model", fingerprint=weights) for weights in ("ab", "cd"))
        with pytest.raises(ProfileError, match=r"different weights, which are all called model; .*`base_model` NAME"):
            merge([one, other])
        assert merge([one, one]).fingerprint == "ab"
        assert merge([one, kv(np.eye(2), base_model="model")]).fingerprint == "ab"
        assert merge([one, other], base_model="org/model").fingerprint is None

    def test_other_dimensions(self):
        other = kv(np.eye(2), base_model="org/wide", model=ModelDimensions(2, 4, 2, 16))
        with pytest.raises(ProfileError, match=r"are different models \(head_dim (8 and 16|16 and 8)\)"):
            merge([kv(np.eye(2)), other])

    @pytest.mark.parametrize("count", [0, 1])
    def test_too_few(self, count):
        with pytest.raises(ProfileError, match="give two or more"):
            merge([kv(np.eye(2))] * count)

    def test_no_scores(self):
        reform = HeadProfile(None, "reform", None, "org/model", MODEL, embedding_heads=(EmbeddingHead(0, "q", 0),))
        with pytest.raises(ProfileError, match="the reform profile of org/model has embedding heads and no scores"):
            merge([kv(np.eye(2)), reform])
