"""Embedding heads: what is one, and which four a ranking picks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.errors import ProfileError
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.embedding_heads import RANKED_KINDS, RANKING_TASKS, STATES, EmbeddingHead, Ranking, columns_of

TEN = ModelDimensions(layers=10, query_heads=4, kv_heads=2, head_dim=8)


def ranks(model=TEN, fill=0.5):
    return {kind: np.full((model.layers, columns_of(kind, model)), fill) for kind in RANKED_KINDS}


def with_best(*places, model=TEN):
    """Ranks in which these (layer, state, head) are best, in this order."""
    made = ranks(model)
    for place, (layer, state, head) in enumerate(places):
        made[state][layer, head] = 0.01 * (place + 1)
    return made


class TestEmbeddingHead:
    def test_heads_are_counted_by_state(self):
        assert EmbeddingHead(9, "q", 3).within(TEN)
        assert EmbeddingHead(9, "v", 1).within(TEN)
        assert not EmbeddingHead(9, "k", 2).within(TEN)
        assert not EmbeddingHead(10, "q", 0).within(TEN)

    @pytest.mark.parametrize(
        "item", [[0, "o", 1], [-1, "q", 0], [0, "k", -1], [True, "q", 0], ["0", "q", 0], [0, "q", 1.0], [0, [], 0]]
    )
    def test_what_is_none(self, item):
        with pytest.raises(ProfileError, match="an embedding head is a layer, one of q, k and v, and a head; got"):
            EmbeddingHead.parse([item])

    @pytest.mark.parametrize("values", [{}, "q1.2", [1, "q", 2], [[1, "q"]], ["1q2"], None, 7], ids=repr)
    def test_other_lists(self, values):
        with pytest.raises(ProfileError, match=r"embedding heads are a list of \[layer, state, head\], got"):
            EmbeddingHead.parse(values)


class TestPick:
    def test_two_of_each_task(self):
        pattern = with_best((3, "q", 3), (5, "v", 1), (0, "k", 0))
        multihop = with_best((9, "v", 0), (8, "k", 1))
        assert [*map(str, Ranking({"pattern": pattern, "multihop": multihop}).pick())] == [
            "q3.3",
            "v5.1",
            "k8.1",
            "v9.0",
        ]

    def test_pattern_heads_lie_below_seventy_percent_of_depth(self):
        pattern = with_best((7, "q", 0), (6, "q", 1), (9, "v", 0), (2, "k", 0))
        multihop = with_best((7, "v", 0), (9, "q", 0))
        picked = Ranking({"pattern": pattern, "multihop": multihop}).pick()
        assert [*map(str, picked)] == ["k2.0", "q6.1", "v7.0", "q9.0"]

    def test_heads_are_distinct(self):
        both = with_best((1, "q", 0), (2, "q", 0), (3, "v", 1), (4, "k", 0), (5, "k", 0))
        assert [*map(str, Ranking({"pattern": both, "multihop": both}).pick())] == ["q1.0", "q2.0", "v3.1", "k4.0"]

    def test_one_task_gives_four(self):
        one = with_best((1, "q", 0), (2, "q", 0), (9, "v", 1), (4, "k", 0), (5, "k", 0))
        assert [*map(str, Ranking({"pattern": one}).pick())] == ["q1.0", "q2.0", "k4.0", "k5.0"]
        assert [*map(str, Ranking({"multihop": one}).pick())] == ["q1.0", "q2.0", "k4.0", "v9.1"]

    def test_what_is_compared_with_is_not_picked(self):
        made = ranks()
        made["attention"][:], made["hidden"][:] = 0, 0
        made["v"][3] = 0.25
        assert {head.state for head in Ranking({"pattern": made}).best("pattern")[:2]} == {"v"}

    def test_ties_fall_by_place(self):
        best = Ranking({"pattern": ranks()}).best("pattern")
        assert best == sorted(best)
        assert len(best) == 10 * (4 + 2 + 2)

    @given(st.integers(0, 999), st.sampled_from([2, 7, 10, 28, 40]))
    def test_always_the_best_that_may_be(self, seed, layers):
        model = ModelDimensions(layers, 4, 2, 8)
        rng = np.random.default_rng(seed)
        made = Ranking(
            {
                task: {kind: rng.integers(0, 9, own.shape) / 8 for kind, own in ranks(model).items()}
                for task in RANKING_TASKS
            }
        )
        picked = made.pick()
        assert len(picked) == len(set(picked)) == 4
        allowed = [head for head in made.best("pattern") if 10 * head.layer < 7 * layers]
        pattern = allowed[:2]
        assert set(picked) == {*pattern, *[head for head in made.best("multihop") if head not in pattern][:2]}


class TestValidation:
    def test_it_belongs_to_itself(self):
        mine = ranks()
        made = Ranking({"pattern": mine})
        mine["q"][0, 0] = 0
        assert made.mnr["pattern"]["q"][0, 0] == 0.5
        with pytest.raises(ValueError, match="read-only"):
            made.mnr["pattern"]["q"][0, 0] = 0

    def test_shape_against_a_model(self):
        made = Ranking({"multihop": ranks()})
        made.check(TEN)
        with pytest.raises(
            ProfileError, match=r"mnr.multihop.q has shape \[10, 4\], \[10, 8\] is needed for 10 layers"
        ):
            made.check(ModelDimensions(10, 8, 2, 8))

    @pytest.mark.parametrize(
        ("mnr", "message"),
        [
            ({}, "a ranking is over pattern or multihop, got nothing"),
            ({"recall": ranks()}, "a ranking is over pattern or multihop, got recall"),
            (
                {"pattern": {state: ranks()[state] for state in STATES}},
                "pattern ranking is of q, k, v, hidden, attention",
            ),
            ({"pattern": {**ranks(), "o": ranks()["q"]}}, "the pattern ranking is of .*, got .*o"),
            ({"pattern": {**ranks(), "k": ranks()["k"] + 0.6}}, r"ranks of pattern.k are not .* in \[0, 1\]"),
            ({"pattern": {**ranks(), "k": ranks()["k"] * np.nan}}, r"ranks of pattern.k are not .* in \[0, 1\]"),
            ({"pattern": {**ranks(), "k": ranks()["k"] - 0.6}}, r"ranks of pattern.k are not .* in \[0, 1\]"),
            ({"pattern": {**ranks(), "v": np.zeros(4)}}, r"ranks of pattern.v are not \[layers, heads\]"),
        ],
        ids=range(8),
    )
    def test_bad_ranks(self, mnr, message):
        with pytest.raises(ProfileError, match=message):
            Ranking(mnr)

    def test_tensors_and_back(self):
        made = Ranking({"pattern": with_best((1, "q", 0)), "multihop": ranks()})
        assert list(made.tensors()) == [f"mnr.{task}.{kind}" for task in RANKING_TASKS for kind in RANKED_KINDS]
        back = Ranking.from_tensors(made.tensors())
        for task in RANKING_TASKS:
            for kind in RANKED_KINDS:
                np.testing.assert_array_equal(back.mnr[task][kind], made.mnr[task][kind])
        with pytest.raises(ProfileError, match="unknown tensor 'scores'"):
            Ranking.from_tensors({"scores": np.zeros((2, 2))})
