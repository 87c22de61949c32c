"""`decide`: counts are exact, ties fall by place, and nothing but whole KV heads of eligible layers takes part."""

from dataclasses import replace
from decimal import ROUND_HALF_EVEN, Decimal
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvsurgery.errors import PolicyError, ProfileError
from kvsurgery.heads.dimensions import ModelDimensions, ModelLayers
from kvsurgery.heads.kinds import BUDGETED, STREAMING, head_list
from kvsurgery.policy.evidence import Evidence
from kvsurgery.policy.policy import Policy
from kvsurgery.profile.embedding_heads import EmbeddingHead
from kvsurgery.profile.full_heads import kv_scores
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from tests.helpers.deciding import decided


def profile(scores, query_heads=None):
    """KV-head scores; of a GQA model with groups of two unless told otherwise."""
    layers, heads = np.shape(scores)
    model = ModelDimensions(layers, query_heads or 2 * heads, heads, 8)
    return HeadProfile(np.array(scores), "ablation", "kv", "test", model)


def query_profile(scores, kv_heads):
    layers, heads = np.shape(scores)
    return HeadProfile(np.array(scores), "headkv-r", "query", "test", ModelDimensions(layers, heads, kv_heads, 8))


def full(policy):
    """{(layer, source head)} that stay full in eligible layers."""
    return {(n, head) for n, layer in enumerate(policy.layers) for head in layer.order[: layer.full]}


def full_windows(made):
    return [None] * made.model.layers


@st.composite
def cases(draw):
    """A profile with many ties, and windows of which one at least is None."""
    layers, heads = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    scores = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=layers * heads, max_size=layers * heads))
    windows = draw(st.lists(st.sampled_from([None, 16]), min_size=layers, max_size=layers).filter(lambda w: None in w))
    return profile(np.reshape(scores, (layers, heads))), windows


def ranking(made, windows):
    """Eligible (layer, head), best first, ties to the earlier place: said a second way, as a sort of tuples."""
    places = ((n, head) for n in range(made.model.layers) for head in range(made.model.kv_heads) if windows[n] is None)
    return sorted(places, key=lambda place: (-made.scores[place], *place))


class TestSelection:
    @given(cases(), st.decimals(0, 1, places=3))
    def test_sparsity_is_exact(self, case, sparsity):
        made, windows = case
        policy = decided(made, windows, sparsity=float(sparsity))
        eligible = windows.count(None) * made.model.kv_heads
        streaming = int((sparsity * eligible).quantize(Decimal(1), ROUND_HALF_EVEN))
        assert policy.counts[STREAMING] == streaming
        assert policy.eligible == eligible
        assert full(policy) == set(ranking(made, windows)[: eligible - streaming])

    @given(cases(), st.data())
    def test_full_heads_is_exact(self, case, data):
        made, windows = case
        ranked = ranking(made, windows)
        count = data.draw(st.integers(0, len(ranked)))
        assert full(decided(made, windows, full_heads=count)) == set(ranked[:count])

    @given(cases(), st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 1.1]))
    def test_threshold(self, case, threshold):
        made, windows = case
        expected = {place for place in ranking(made, windows) if made.scores[place] >= threshold}
        assert full(decided(made, windows, threshold=threshold)) == expected

    @given(cases(), st.floats(0, 1))
    def test_layers_are_permutations_in_source_order(self, case, sparsity):
        made, windows = case
        for layer, window in zip(
            decided(made, windows, sparsity=sparsity, sink=3, recent=5).layers,
            windows,
            strict=True,
        ):
            assert sorted(layer.order) == list(range(made.model.kv_heads))
            for group in (layer.order[: layer.full], layer.order[layer.full :]):
                assert list(group) == sorted(group)
            assert (layer.sink, layer.recent) == ((3, 5) if window is None else (0, window))
            assert layer.native is (window is not None)
            if layer.native:
                assert layer.order == tuple(range(made.model.kv_heads))
                assert layer.full == 0

    def test_without_scores_every_head_stays_full(self):
        model = ModelDimensions(2, 4, 2, 8)
        policy = Policy.of(Recipe(), Evidence(), ModelLayers(model, [None, 9]))
        assert [(layer.order, layer.full, layer.native) for layer in policy.layers] == [
            ((0, 1), 2, False),
            ((0, 1), 0, True),
        ]
        assert policy.options == {}
        for option in ({"sparsity": 0.5}, {"rest": "budgeted"}, {"budget": 9}, {"hold": 32}, {"sink": 9}):
            with pytest.raises(PolicyError, match=rf"{next(iter(option))}` requires a profile with scores"):
                Policy.of(Recipe.of(**option), Evidence(), ModelLayers(model, [None] * 2))
        with pytest.raises(PolicyError, match="no layer of this model has full attention"):
            Policy.of(Recipe(), Evidence(), ModelLayers(model, [9, 9]))
        reform = HeadProfile(None, "reform", None, "test", model, embedding_heads=(EmbeddingHead(0, "q", 1),))
        with pytest.raises(ProfileError, match="has embedding heads and no scores"):
            decided(reform)

    @given(cases(), st.floats(0, 1), st.floats(0, 1))
    def test_more_sparsity_never_makes_a_head_full(self, case, one, other):
        made, windows = case
        low, high = (full(decided(made, windows, sparsity=sparsity)) for sparsity in sorted((one, other)))
        assert high <= low

    @pytest.mark.parametrize(
        ("sparsity", "heads", "streaming"),
        [
            (0.3, 10, 3),
            (0.07, 100, 7),  # 7.000000000000001 in floats
            (0.29, 100, 29),  # 28.999999999999996
            (0.575, 100, 58),  # 57.49999999999999, but 57.5 as written
            (0.5, 5, 2),
            (0.5, 7, 4),
            (0.25, 2, 0),
            (0.75, 2, 2),
            (1, 7, 7),
            (0, 7, 0),
        ],
    )
    def test_counts_by_hand(self, sparsity, heads, streaming):
        made = profile(np.linspace(0, 1, heads)[None])
        policy = decided(made, sparsity=sparsity)
        assert policy.counts[STREAMING] == streaming
        assert policy.layers[0].order[: policy.layers[0].full] == tuple(range(streaming, heads))

    def test_ties_fall_to_the_earlier_layer_then_head(self):
        made = profile([[0, 1, 1], [1, 0.5, 1], [1, 1, 1]])
        assert full(decided(made, full_heads=3)) == {(0, 1), (0, 2), (1, 0)}
        assert full(decided(made, full_heads=5)) == {
            (0, 1),
            (0, 2),
            (1, 0),
            (1, 2),
            (2, 0),
        }

    def test_order_by_hand(self):
        made = profile([[0.1, 0.9, 0.2, 0.8], [1, 1, 1, 1], [0, 0, 0, 0]])
        first, all_full, all_streaming = decided(made, sparsity=0.5).layers
        assert (first.order, first.full) == ((1, 3, 0, 2), 2)
        assert (all_full.order, all_full.full) == ((0, 1, 2, 3), 4)
        assert (all_streaming.order, all_streaming.full) == ((0, 1, 2, 3), 0)

    def test_native_layers_win_nothing_by_high_scores(self):
        made = profile([[1, 1], [0.1, 0.2], [1, 1], [0.4, 0.3]])
        policy = decided(made, [8, None, 8, None], sparsity=0.5)
        assert full(policy) == {(3, 0), (3, 1)}
        assert policy.eligible == 4
        assert full(decided(made, [8, None, 8, None], threshold=0.2)) == {(1, 1), (3, 0), (3, 1)}

    def test_threshold_in_the_scores_own_precision(self):
        # 0.3 in float32 is below and 0.1 above the float64 of the same spelling
        made = profile([[0.1, 0.3]])
        assert full(decided(made, threshold=0.3)) == {(0, 1)}
        assert full(decided(made, threshold=0.1)) == {(0, 0), (0, 1)}

    def test_threshold_beyond_float32(self):
        made = profile([[0.1, 0.3]])
        assert decided(made, threshold=1e39).counts[STREAMING] == 2

    def test_defaults_are_the_paper_s(self):
        gqa, mha = profile(np.eye(2, 4)), profile(np.eye(2, 4), query_heads=4)
        assert decided(gqa).counts[STREAMING] == 4
        assert decided(mha).counts[STREAMING] == 6
        assert {(layer.sink, layer.recent) for layer in decided(gqa).layers} == {(64, 256)}


class TestGroupReduce:
    def test_by_hand(self):
        # groups (0, 0.6), (0.4, 0.4): the mean prefers the second, the maximum the first
        made = query_profile([[0, 0.6, 0.4, 0.4]], kv_heads=2)
        np.testing.assert_allclose(kv_scores(made, "mean"), [[0.3, 0.4]])
        np.testing.assert_allclose(kv_scores(made, "max"), [[0.6, 0.4]])
        assert full(decided(made, full_heads=1, rest="streaming", group_reduce="mean")) == {(0, 1)}
        assert full(decided(made, full_heads=1, rest="streaming", group_reduce="max")) == {(0, 0)}
        assert full(decided(made, full_heads=1, rest="streaming")) == {(0, 1)}

    def test_groups_are_neighbors(self):
        made = query_profile(np.arange(12).reshape(2, 6), kv_heads=3)
        assert kv_scores(made, "max").tolist() == [[1, 3, 5], [7, 9, 11]]

    @given(st.permutations(range(8)), st.lists(st.floats(2**-16, 1, width=32), min_size=8, max_size=8))
    @example([1, 2, 0, 3, 4, 5, 6, 7], [0.1, 0.2, 0.3, 0, 0, 0, 0, 0])
    def test_equal_groups_tie_whatever_their_order(self, order, group):
        shuffled = [group[place] for place in order]
        made = query_profile([[*shuffled, *group]], kv_heads=2)
        assert kv_scores(made)[0, 0] == kv_scores(made)[0, 1]
        assert full(decided(made, full_heads=1, rest="streaming")) == {(0, 0)}

    def test_kv_scores_are_left_alone(self):
        made = profile([[0.1, 0.3]])
        assert kv_scores(made, "max") is made.scores

    def test_recorded_where_it_matters(self):
        made = query_profile([[0, 0.6, 0.4, 0.4]], kv_heads=2)
        assert decided(made, rest="streaming", group_reduce="max").options["group_reduce"] == "max"
        assert "group_reduce" not in decided(profile([[0.1, 0.3]])).options

    def test_unknown(self):
        for made in (profile([[0.1, 0.3]]), query_profile([[0, 1]], kv_heads=1)):
            with pytest.raises(PolicyError, match=r"`heads.group_reduce` is mean or max, got 'median'"):
                decided(made, group_reduce="median")


class TestRecord:
    def test_options(self):
        options = decided(profile([[0.1, 0.3]]), full_heads=1, sink=2, recent=3).options
        assert options == {"full_heads": 1, "method": "ablation", "rest": "streaming", "sink": 2, "recent": 3}

    def test_default_sparsity_is_recorded(self):
        assert decided(profile([[0.1, 0.3]])).options["sparsity"] == 0.5

    def test_hash_is_of_the_layers_not_of_the_way_there(self):
        made = profile([[0.1, 0.3], [0.2, 0.9]])
        windows = full_windows(made)
        same = [decided(made, windows, **how) for how in ({"sparsity": 0.5}, {"full_heads": 2}, {"threshold": 0.3})]
        assert len({policy.hash for policy in same}) == 1
        others = [
            decided(made, windows, full_heads=1),
            decided(made, windows, full_heads=2, sink=1),
            decided(made, windows, full_heads=2, recent=1),
            decided(made, [None, 256], full_heads=1),
            decided(made, windows, sparsity=0.0),
        ]
        assert len({policy.hash for policy in [same[0], *others]}) == 6


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"sparsity": 0.5, "threshold": 0.5}, "`heads.sparsity` and `heads.threshold` exclude each other"),
            ({"sparsity": 0.0, "full_heads": 0}, "`heads.sparsity` and `heads.full_heads` exclude each other"),
            ({"threshold": 0.5, "full_heads": 1}, "`heads.threshold` and `heads.full_heads` exclude each other"),
            (
                {"sparsity": 0.5, "threshold": 0.5, "full_heads": 1},
                "`heads.sparsity` and `heads.threshold` and `heads.full_heads`",
            ),
            ({"sparsity": -0.01}, r"`sparsity` must lie in \[0, 1\], got -0.01"),
            ({"sparsity": 1.01}, r"`sparsity` must lie in \[0, 1\], got 1.01"),
            ({"sparsity": 50}, r"`sparsity` must lie in \[0, 1\], got 50"),
            ({"sparsity": float("nan")}, r"`sparsity` must lie in \[0, 1\], got nan"),
            (
                {"threshold": float("nan")},
                "`heads.threshold` must be a finite number of 0 or more for ablation scores, got nan",
            ),
            (
                {"threshold": float("inf")},
                "`heads.threshold` must be a finite number of 0 or more for ablation scores, got inf",
            ),
            (
                {"threshold": -0.1},
                "`heads.threshold` must be a finite number of 0 or more for ablation scores, got -0.1",
            ),
            ({"full_heads": -1}, r"`full_heads` must lie in \[0, 4\] for this model, got -1"),
            ({"full_heads": 5}, r"`full_heads` must lie in \[0, 4\] for this model, got 5"),
            ({"sink": -1}, "`streaming.sink` must be >= 0"),
            ({"recent": 0}, "`streaming.recent` >= 1"),
        ],
        ids=str,
    )
    def test_options(self, options, message):
        with pytest.raises(PolicyError, match=message):
            decided(profile(np.eye(2)), **options)

    @pytest.mark.parametrize("threshold", [-0.01, 1.01, 50, float("nan")])
    def test_a_threshold_beyond_the_scores_of_a_method(self, threshold):
        gates = replace(profile(np.eye(2)), method="duo")
        with pytest.raises(
            PolicyError, match=rf"`heads.threshold` must lie in \[0, 1\] for duo scores, got {threshold}"
        ):
            decided(gates, threshold=threshold)

    def test_full_heads_counts_eligible_layers_only(self):
        with pytest.raises(PolicyError, match=r"`full_heads` must lie in \[0, 2\] for this model, got 3"):
            decided(profile(np.eye(2)), [None, 8], full_heads=3)

    def test_nothing_eligible(self):
        with pytest.raises(PolicyError, match="no layer of this model has full attention"):
            decided(profile(np.eye(2)), [8, 8])

    def test_another_model_s_layers(self):
        with pytest.raises(ProfileError, match=r"the head profile is of test .2 layers.* but here has 3 layers"):
            Evidence(profile(np.eye(2))).check(ModelLayers(ModelDimensions(3, 4, 2, 8), [None] * 3), "here")


class TestBudgets:
    def test_headkv_profiles_give_budgets(self):
        made = query_profile([[4, 4, 2, 2], [1, 1, 1, 1]], kv_heads=2)
        policy = decided(made, budget=100, beta=2)
        # share 50, pool 50 x 4 by 4 2 1 1 of 8
        assert [layer.budgets for layer in policy.layers] == [(150, 100), (75, 75)]
        assert (policy.full, policy.counts[STREAMING], policy.counts[BUDGETED]) == (0, 0, 4)
        assert policy.options["rest"] == "budgeted"
        assert policy.options["window"] == policy.layout.selection.window == 8

    def test_full_heads_come_first_and_the_rest_shares_the_total(self):
        made = profile([[0.1, 0.9], [0.4, 0.4]])
        policy = decided(made, rest="budgeted", budget=10, beta=1.5, full_heads=2)
        assert [layer.order for layer in policy.layers] == [(1, 0), (0, 1)]
        assert [layer.full for layer in policy.layers] == [1, 1]
        assert sum(sum(layer.budgets) for layer in policy.layers) == 2 * 10
        assert policy.layers[1].budgets[0] > policy.layers[0].budgets[0]

    def test_shares_keep_their_proportions(self):
        made = replace(profile([[0.1, 0.3], [0.4, 0.0]]), method="lu-kv")
        policy = decided(made, budget=100)
        assert [layer.budgets for layer in policy.layers] == [(50, 150), (200, 0)]
        assert "beta" not in policy.options
        more_even = decided(made, budget=100, beta=2)
        assert [layer.budgets for layer in more_even.layers] == [(75, 125), (150, 50)]

    @given(hnp.arrays(np.int64, (2, 3), elements=st.integers(0, 1 << 24)), st.integers(0, 5))
    def test_budgets_are_given_as_they_are(self, tokens, full_heads):
        policy = decided(replace(profile(tokens), method="budgets"), full_heads=full_heads)
        kept = sorted(tokens.ravel())[: 6 - full_heads]
        assert sorted(budget for layer in policy.layers for budget in layer.budgets) == kept
        assert Recipe.from_toml(policy.recipe.to_toml()) == policy.recipe

    @given(
        hnp.arrays(np.float32, (2, 3), elements=st.floats(0, 1, width=32)),
        hnp.arrays(np.float32, (2, 3), elements=st.floats(2**-10, 1, width=32)),
        st.integers(0, 5),
        st.integers(1, 1 << 20),
    )
    def test_another_profile_s_shares(self, gates, shares, full_heads, budget):
        gates, shares = profile(gates), replace(profile(shares), method="wg-kv")
        recipe = Recipe.of(full_heads=full_heads, budget=budget, budgets_from="shares")
        policy = decided(gates, budgets=shares, recipe=recipe)
        assert full(policy) == full(decided(gates, full_heads=full_heads))
        found = {
            (n, head): tokens
            for n, layer in enumerate(policy.layers)
            for head, tokens in zip(layer.order[layer.full :], layer.budgets, strict=True)
        }
        assert sum(found.values()) == budget * (6 - full_heads)
        ranked = sorted(found, key=lambda place: shares.scores[place])
        assert all(found[low] <= found[high] + 1 for low, high in pairwise(ranked))
        assert policy.options["budgets_from"] == f"wg-kv {shares.hash[:16]}"

    def test_a_profile_beside_shares_says_how_many_full_heads(self):
        gates, shares = profile([[0.1, 0.9]]), replace(profile([[0.5, 0.5]]), method="wg-kv")
        with pytest.raises(
            PolicyError, match=r"say how many with `heads.full_heads` or `heads.sparsity`, or leave the profile out"
        ):
            decided(gates, budgets=shares, budget=9)
        with pytest.raises(PolicyError, match=r"`budgeted.budget` is missing"):
            decided(gates, budgets=shares, full_heads=1)
        with pytest.raises(PolicyError, match=r"`budgeted.budgets_from` exclude each other"):
            Recipe.of(rest="streaming", budgets_from="shares")

    def test_embedding_heads_have_no_budgets(self):
        heads = HeadProfile(
            None, "reform", None, "test", ModelDimensions(1, 4, 2, 8), embedding_heads=(EmbeddingHead(0, "q", 1),)
        )
        with pytest.raises(ProfileError, match="has embedding heads and no scores"):
            decided(profile([[0.1, 0.9]]), budgets=heads, full_heads=1, budget=9)

    def test_native_layers_have_none(self):
        policy = decided(profile([[0.1, 0.9], [0.4, 0.4]]), [5, None], rest="budgeted", budget=10)
        assert head_list(policy.layers[0]) == ("window", "window")
        assert policy.layers[0].native
        assert sum(policy.layers[1].budgets) == 20
        assert (policy.eligible, policy.counts[BUDGETED]) == (2, 2)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "`budgeted.budget` is missing"),
            ({"budget": 0}, "`budgeted.budget`"),
            ({"budget": 9, "beta": 1}, "`budgeted.beta`"),
            ({"budget": 9, "window": 0}, "`budgeted.window`"),
            ({"budget": 9, "kernel_size": 4}, "`budgeted.kernel_size` must be odd"),
            ({"budget": 9, "pool": "sum"}, "`budgeted.pool`"),
            ({"budget": 9, "rest": "streaming"}, "`rest` streaming and `budgeted.budget` exclude each other"),
        ],
    )
    def test_impossible(self, options, message):
        with pytest.raises(PolicyError, match=message):
            decided(query_profile([[1, 2]], kv_heads=1), **options)

    def test_hash_covers_the_selection(self):
        made = query_profile([[1, 2]], kv_heads=1)
        hashes = {decided(made, budget=9, window=w).hash for w in (4, 8)}
        assert len(hashes) == 2
