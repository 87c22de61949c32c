"""REFORM on top of a policy: embedding heads by their places after surgery, sizes that fit the model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.errors import PolicyError
from kvsurgery.heads.dimensions import ModelDimensions, ModelLayers
from kvsurgery.policy.evidence import Evidence
from kvsurgery.policy.policy import Policy
from kvsurgery.policy.reform import with_reform
from kvsurgery.profile.embedding_heads import EmbeddingHead
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe, ReformSizes
from tests.helpers.deciding import decided

MODEL = ModelDimensions(layers=2, query_heads=8, kv_heads=4, head_dim=16)
HEADS = (EmbeddingHead(0, "q", 5), EmbeddingHead(0, "k", 2), EmbeddingHead(1, "v", 0), EmbeddingHead(1, "q", 0))
REFORM = HeadProfile(None, "reform", None, "org/base", MODEL, embedding_heads=HEADS)
SCORES = HeadProfile([[0.1, 0.2, 0.9, 0.3], [0.1, 0.8, 0.2, 0.9]], "duo", "kv", "org/base", MODEL)


def all_full(sizes):
    return Policy.of(Recipe(reform=sizes), Evidence(), ModelLayers(MODEL, [None] * 2))


def test_heads_are_named_by_their_places_after_surgery():
    policy = decided(SCORES, full_heads=3)
    assert [layer.order for layer in policy.layers] == [(2, 0, 1, 3), (1, 3, 0, 2)]
    reform = with_reform(policy, REFORM, None, marker=[7, 8]).reform
    # query heads 4 and 5 belong to KV head 2, which comes first
    assert reform.heads == ((0, "k", 0), (0, "q", 1), (1, "q", 4), (1, "v", 2))
    assert reform.query_marker == (7, 8)


def test_the_hash_tells_policies_apart():
    policy = decided(SCORES)
    other_policy = decided(SCORES, reform=ReformSizes(keep=9))
    made = [policy, with_reform(policy, REFORM, None), with_reform(other_policy, REFORM, None)]
    assert len({each.hash for each in made}) == 3
    assert made[2].options["reform"]["keep"] == 9
    assert made[2].options["reform"]["profile"] == REFORM.hash


@given(st.integers(2048, 200_000), st.none() | st.integers(600, 1024), st.none() | st.integers(600, 1024))
def test_sizes_fit_the_model(positions, chunk, encode_budget):
    reform = with_reform(all_full(ReformSizes(chunk, encode_budget)), REFORM, positions).reform
    assert reform.chunk + reform.encode_budget <= positions
    assert reform.recompute_budget <= positions
    assert reform.chunk == (chunk or reform.chunk)
    assert reform.encode_budget == (encode_budget or reform.encode_budget)


@pytest.mark.parametrize(
    ("positions", "sizes", "words"),
    [
        (4096, {"chunk": 4096}, "`reform.chunk` 4096 leaves no room in the 4096 positions"),
        (4096, {"chunk": 3000, "encode_budget": 2000}, "together exceed the 4096 positions"),
        (4096, {"recompute_budget": 5000}, "`reform.recompute_budget` 5000 exceeds the 4096 positions"),
        (4096, {"recompute_budget": 300}, "recompute_budget 300 is less than the first and last 256 tokens"),
        (None, {"pool": 4}, "pool is an odd number"),
        (None, {"window": 0}, "window is a number of tokens"),
    ],
)
def test_sizes_that_contradict_are_refused(positions, sizes, words):
    with pytest.raises(PolicyError, match=words):
        with_reform(all_full(ReformSizes(**sizes)), REFORM, positions)


def test_a_profile_of_scores_has_no_embedding_heads():
    with pytest.raises(PolicyError, match="the duo profile has no embedding heads"):
        with_reform(decided(SCORES), SCORES, None)
