"""What is said of a profile in words and numbers."""

import numpy as np

from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.comparison import compare
from kvsurgery.profile.embedding_heads import EmbeddingHead, Ranking
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.summary import describe, describe_comparison, facts
from tests.helpers.deciding import decided

MODEL = ModelDimensions(layers=2, query_heads=8, kv_heads=4, head_dim=8)
DUO = HeadProfile([[0, 1, 1, 0.5], [0.25, 0.75, 1, 0]], "duo", "kv", "org/model", MODEL)
HEADS = (EmbeddingHead(0, "q", 7), EmbeddingHead(1, "k", 3))


def test_facts():
    found = facts(DUO)
    assert (found["shape"], found["score_min"], found["score_max"], found["at_max"]) == ([2, 4], 0, 1, 3)
    for sparsity, full in found["full_heads_per_layer"].items():
        assert full == [layer.full for layer in decided(DUO, sparsity=float(sparsity)).layers]
    assert found["hash"] == DUO.hash
    assert found["scores"] == DUO.scores.tolist()


def test_facts_of_embedding_heads():
    columns = {"q": 8, "k": 4, "v": 4, "hidden": 1, "attention": 8}
    mnr = {"pattern": {kind: np.full((2, heads), 0.25) for kind, heads in columns.items()}}
    ranked = HeadProfile(None, "reform", None, "org/model", MODEL, embedding_heads=HEADS, ranking=Ranking(mnr))
    found = facts(ranked)
    assert found["embedding_heads"] == [{"layer": 0, "state": "q", "head": 7}, {"layer": 1, "state": "k", "head": 3}]
    assert found["mnr"] == {"pattern": {kind: ranks.tolist() for kind, ranks in mnr["pattern"].items()}}
    unranked = HeadProfile(None, "reform", None, "org/model", MODEL, embedding_heads=HEADS)
    assert facts(unranked)["mnr"] == {}
    assert describe(unranked) == f"org/model ({MODEL})\nreform embedding heads: q0.7, k1.3"


def test_describe():
    assert describe(DUO) == (
        "org/model (2 layers, 8 query heads, 4 KV heads of 8)\n"
        "duo scores of 2 x 4 KV heads: 0 to 1, mean 0.5625, 3 of 8 at the maximum"
    )


class TestDescribeComparison:
    def test_layers_that_differ_most_come_first(self):
        other = HeadProfile([[0, 1, 1, 0.5], [0.25, 0.75, 0, 0]], "duo", "kv", "org/model", MODEL)
        # ranks of DUO / 8: 1.5 7 7 4, 3 5 7 1.5; of the other: 2 7.5 7.5 5, 4 6 2 2
        a, b = np.array([1.5, 7, 7, 4, 3, 5, 7, 1.5]), np.array([2, 7.5, 7.5, 5, 4, 6, 2, 2])
        rho = np.corrcoef(a, b)[0, 1]
        assert describe_comparison(compare(DUO, other)) == (
            f"Spearman rank correlation of 8 KV heads: {rho:.3f}\nlayers that differ most: 1 (25%)"
        )

    def test_nothing_to_say(self):
        constant = HeadProfile(np.ones((2, 4)), "duo", "kv", "org/model", MODEL)
        assert describe_comparison(compare(constant, constant)) == (
            "Spearman rank correlation of 8 KV heads: undefined, one profile scores all heads alike\n"
            "layers that differ most: none"
        )
