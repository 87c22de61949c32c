"""`fit`: candidates cost what the emitted layout says, and the choice is the best of those that fit."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsurgery.checkpoint.model import Model
from kvsurgery.emit.config import converted_config
from kvsurgery.errors import PolicyError
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.heads.kinds import BUDGETED, full_heads
from kvsurgery.policy.fit import pareto
from kvsurgery.policy.memory import Footprint
from kvsurgery.profile.full_heads import kv_scores
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Demand, Recipe
from kvsurgery.templates.kv_layout import KVLayout
from tests.helpers.deciding import decided, fitted

# what quantizing is guessed to leave
FIDELITY = {None: 1, 8: 1 - 0.0004, 4: 1 - 0.0079, 3: 1 - 0.02}
PLENTY = 1 << 50


def model(scores, head_dim=8, itemsize=2):
    """A profile of KV heads and the footprint of its model, with groups of two."""
    layers, heads = np.shape(scores)
    dimensions = ModelDimensions(layers, 2 * heads, heads, head_dim)
    profile = HeadProfile(np.array(scores), "duo", "kv", "test", dimensions)
    return profile, Footprint(dimensions, weights=1000, itemsize=itemsize, hidden=16, inner=24, vocabulary=10)


def layout(profile, windows, policy):
    """What the config of a converted checkpoint says; its own sliding layers are gemma's."""
    dimensions = profile.model
    config = {
        "model_type": "gemma2",
        "num_hidden_layers": dimensions.layers,
        "num_attention_heads": dimensions.query_heads,
        "num_key_value_heads": dimensions.kv_heads,
        "head_dim": dimensions.head_dim,
        "hidden_size": 16,
        "sliding_window": max((window for window in windows if window), default=None),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
    }
    return KVLayout.from_config(converted_config(Model.of(config), policy))


@st.composite
def cases(draw):
    """(profile, windows, footprint, demand, options): small models, many ties, contexts around a tile and a window, one
    process or several that share heads or have all of them."""
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    scores = draw(st.lists(st.sampled_from([0.0, 0.25, 0.3, 1.0]), min_size=layers * heads, max_size=layers * heads))
    scores[0] = 1.0
    windows = [None, *draw(st.lists(st.sampled_from([None, 30, 400]), min_size=layers - 1, max_size=layers - 1))]
    profile, footprint = model(np.reshape(scores, (layers, heads)), draw(st.sampled_from([2, 8, 10])))
    footprint = replace(footprint, itemsize=draw(st.sampled_from([2, 4])))
    context = draw(st.integers(1, 2000))
    new_tokens = draw(st.integers(0, context - 1))
    demand = Demand(PLENTY, context, draw(st.integers(1, 3)), new_tokens, draw(st.integers(1, 2000)))
    options = {"rest": draw(st.sampled_from(["streaming", "budgeted"]))}
    if options["rest"] == "streaming":
        options |= {"sink": draw(st.integers(0, 9)), "recent": draw(st.integers(1, 600))}
    else:
        options |= {"window": draw(st.integers(1, 40)), "beta": draw(st.sampled_from([1.005, 1.2, 5.0]))}
    options["tp"] = draw(st.sampled_from([count for count in range(1, heads + 1) if heads % count == 0]))
    options["tp_uneven"] = draw(st.booleans())
    own = heads // options["tp"]
    if options["tp"] == 1 or (options["rest"] == "streaming" and not options["tp_uneven"]):
        options["head_unit"] = draw(st.sampled_from([count for count in range(1, own + 1) if own % count == 0]))
    if draw(st.booleans()):
        footprint = replace(footprint, model=replace(profile.model, query_heads=2 * own, kv_heads=own))
    quantizations = [{}, {"kv_scheme": "per-token", "kv_residual": 7}]
    if 400 in windows or options.get("recent", 0) >= 256:
        quantizations.append({"kv_residual": 0, "kv_streaming": True})
    options |= draw(st.sampled_from(quantizations))
    return profile, windows, footprint, demand, options


def share(profile, windows, policy, demand):
    """The score that a policy keeps, head by head as it was decided."""
    scores, kept, whole = kv_scores(profile), 0.0, 0.0
    fidelity = FIDELITY[policy.quantization and policy.quantization.bits]
    context, prompt = demand.context, demand.prompt
    for layer, of_heads in zip(policy.layers, scores.astype(float), strict=True):
        if layer.native:
            continue
        budgets = iter(layer.budgets or ())
        for head in layer.order:
            whole += of_heads[head]
            if head in full_heads(layer):
                part = fidelity
            elif layer.streaming:
                how = policy.quantization
                quantized = how and how.streaming and layer.recent >= 2 * (how.residual + 128)
                part = min(layer.sink + layer.recent, context) / context * (fidelity if quantized else 1)
            else:
                window = min(policy.layout.selection.window, prompt)
                tokens = min(next(budgets), prompt - window) + window + demand.new_tokens
                part = fidelity * log(1 + tokens) / log(1 + context)
            kept += of_heads[head] * part
    return kept / whole


def test_budgets_follow_another_profile() -> None:
    rng = np.random.default_rng(0)
    gates, footprint = model(rng.random((3, 2)))
    shares = replace(model(rng.random((3, 2)))[0], method="lu-kv")
    asked = Recipe.of(fit=Demand(PLENTY, 1000), budgets_from="shares")
    found = fitted(gates, None, footprint, budgets=shares, recipe=asked)
    for candidate in found.candidates[::7]:
        policy = decided(gates, budgets=shares, recipe=candidate.recipe(asked))
        size = {"batch": 1, "prompt": 1000, "new": 0, "itemsize": footprint.itemsize}
        assert candidate.kv_bytes == policy.layout.kv_bytes(**size)
    assert len({candidate.budget for candidate in found.candidates}) > 5


class TestCandidates:
    @given(cases(), st.data())
    @settings(max_examples=60)
    def test_cost_and_keep_what_the_decided_policy_does(self, case, data):
        profile, windows, footprint, demand, options = case
        found = fitted(profile, windows, footprint, fit=demand, **options)
        for _ in range(5):
            candidate = data.draw(st.sampled_from(found.candidates))
            policy = decided(profile, windows, candidate.recipe(Recipe.of(fit=demand, **options)))
            parts = layout(profile, windows, policy).parts(profile.model.kv_heads // footprint.model.kv_heads)
            size = {"batch": demand.batch, "prompt": demand.prompt, "new": demand.new_tokens}
            size["itemsize"] = footprint.itemsize
            assert candidate.kv_bytes == max(part.kv_bytes(**size) for part in parts)

            tiles = candidate.quantization is not None and candidate.chunk < demand.prompt
            activations = footprint.activation_bytes(demand.batch, demand.context, candidate.chunk, tiles)
            peak = max(part.prefill_peak_bytes(**size, chunk=candidate.chunk) for part in parts)
            over = candidate.total - (footprint.weights + activations + peak)
            # where processes differ, most of the cache and most of what waits may be in two of them
            head = demand.batch * demand.prompt * 2 * profile.model.head_dim * footprint.itemsize
            assert 0 <= over <= (head if policy.counts[BUDGETED] and options["tp_uneven"] else 0)
            assert policy.rounded == 0
            assert 1 - candidate.loss == pytest.approx(share(profile, windows, policy, demand), abs=1e-9)

    @given(cases())
    @settings(max_examples=40)
    def test_every_number_of_full_heads_and_every_width(self, case):
        profile, windows, footprint, demand, options = case
        recipe = Recipe.of(fit=demand, **options).changed(rest="streaming")
        found = fitted(profile, windows, footprint, recipe=recipe)
        heads = windows.count(None) * profile.model.kv_heads
        step = options.get("head_unit", 1) * (1 if options["tp_uneven"] else options["tp"])
        widths = [bits for bits in (8, 4, 3) if profile.model.head_dim * bits % 16 == 0]
        least = 0 if options.get("kv_streaming") else step  # what has a width
        expected = {(count, bits) for bits in widths for count in range(least, heads + 1, step)}
        expected |= {(count, None) for count in range(0, heads + 1, step)}
        listed = [(one.full_heads, one.quantization and one.quantization.bits) for one in found.candidates]
        assert len(listed) == len(expected)
        assert set(listed) == expected

    def test_budgets_double_in_four_steps(self):
        profile, footprint = model([[1, 0.5]])
        found = fitted(profile, None, footprint, fit=Demand(PLENTY, 150), rest="budgeted")
        budgets = {one.budget for one in found.candidates} - {None}
        assert budgets == {16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128}
        assert {one.full_heads for one in found.candidates if one.budget} == {0, 1}
        short = fitted(profile, None, footprint, fit=Demand(PLENTY, 9), rest="budgeted")
        assert {one.budget for one in short.candidates} == {None, 9}

    def test_a_thousand_heads_are_counted_in_steps(self):
        profile, footprint = model(np.random.default_rng(0).random((32, 32)))
        found = fitted(profile, None, footprint, fit=Demand(PLENTY, 64), rest="budgeted")
        assert {one.full_heads for one in found.candidates} == {*range(0, 1025, 4)}

    def test_no_head_has_fewer_tokens_than_those_that_always_stay(self):
        profile, footprint = model([[1, 0.001], [0.5, 0.2]])
        options = {"fit": Demand(PLENTY, 100), "rest": "budgeted", "beta": 1.2}
        found = fitted(profile, None, footprint, select="value-norm", **options)
        assert 0 < len(found.candidates) < len(fitted(profile, None, footprint, **options).candidates)
        for candidate in found.candidates:
            decided(profile, None, candidate.recipe(Recipe.of(select="value-norm", **options)))

    def test_without_a_score_there_is_no_budget(self):
        """A pool cannot follow scores that are all 0."""
        profile, footprint = model([[1, 0.5, 0, 0]])
        found = fitted(profile, None, footprint, fit=Demand(PLENTY, 64), rest="budgeted")
        assert {one.full_heads for one in found.candidates} == {0, 1, 4}


class TestByHand:
    # one layer, two heads of 8: 32 bytes a token in 16 bit
    PROFILE, FOOTPRINT = model([[0.25, 0.75]])

    def find(self, *kept, **options):
        """The candidate with this many full heads, a budget and bits."""
        found = fitted(self.PROFILE, None, self.FOOTPRINT, fit=Demand(PLENTY, 1000), **options)
        [one] = [
            one
            for one in found.candidates
            if (one.full_heads, one.budget, one.quantization and one.quantization.bits) == kept
        ]
        return one

    def test_streaming(self):
        one = self.find(1, None, None, sink=10, recent=90)
        assert one.kv_bytes == (1000 + 100) * 32
        assert Fraction(1 - one.loss).limit_denominator(10**6) == Fraction(3, 4) + Fraction(1, 4) * Fraction(1, 10)

    def test_quantized(self):
        # 867 tokens between sinks and residual: 6 tiles of 128, 260 slots for the rest, each with scales of kivi
        tile = 2 * (128 * 8 * 4 // 8) + 2 * 8 * 2 + 2 * 128 * 2
        one = self.find(2, None, 4)
        assert one.kv_bytes == 2 * (6 * tile + 260 * 32)
        assert 1 - one.loss == pytest.approx(0.9921)

    def test_budgeted(self):
        # a mean of 112 spreads as 112 / 6 each and 112 / 1.2 x 2 by 0.25 and 0.75; 8 of the window are kept on top
        one = self.find(0, 112, None, rest="budgeted")
        budgets = decided(self.PROFILE, rest="budgeted", budget=112).layers[0].budgets
        assert budgets == (65, 159)
        assert one.kv_bytes == (65 + 159 + 16) * 32
        assert 1 - one.loss == pytest.approx((0.25 * log(1 + 73) + 0.75 * log(1 + 167)) / log(1001))

    def test_a_prompt_at_once_where_waiting_takes_more(self):
        profile, footprint = model(np.ones((8, 2)))
        found = fitted(profile, None, footprint, fit=Demand(PLENTY, 1000, chunk=100), rest="budgeted")
        logits = 10 * (2 + 4)
        for one in found.candidates:
            if one.quantization is None and one.budget:
                # a token is 2 x 32 bytes on its way in, and (3 x 16 + 2 x 8 + 5 x 32) x 2 of activations
                chunks = 100 * (64 + 448) + (16 - one.full_heads) * 1000 * 32
                assert one.total - one.kv_bytes - 1000 - logits == min(chunks, 1000 * (64 + 448))
                assert one.chunk == (100 if one.full_heads > 1 else 1000)


class TestChoice:
    @given(cases(), st.data())
    @settings(max_examples=60)
    def test_is_the_best_that_fits(self, case, data):
        profile, windows, footprint, demand, options = case
        totals = sorted({one.total for one in fitted(profile, windows, footprint, fit=demand, **options).candidates})
        memory = data.draw(st.integers(totals[0], totals[-1] + 10))
        found = fitted(profile, windows, footprint, fit=replace(demand, memory=memory), **options)
        assert found.choice.total <= memory
        assert all(one.loss >= found.choice.loss for one in found.candidates if one.total <= memory)
        equal = [one for one in found.candidates if one.total <= memory and one.loss == found.choice.loss]
        bits = [one.quantization.bits if one.quantization else 16 for one in (found.choice, *equal)]
        assert bits[0] == max(bits)
        alike = [one for one, width in zip(equal, bits[1:], strict=True) if width == bits[0]]
        assert found.choice.full_heads == max(one.full_heads for one in alike)

        more = fitted(
            profile, windows, footprint, fit=replace(demand, memory=memory + data.draw(st.integers(0, 9999))), **options
        )
        assert more.choice.loss <= found.choice.loss
        assert more.candidates == found.candidates

    @given(cases())
    @settings(max_examples=40)
    def test_everything_in_16_bit_wins_where_it_fits(self, case):
        profile, windows, footprint, demand, options = case
        choice = fitted(profile, windows, footprint, fit=demand, **options).choice
        heads = windows.count(None) * profile.model.kv_heads
        assert (choice.full_heads, choice.quantization, choice.loss) == (heads, None, 0)

    @given(cases())
    @settings(max_examples=40)
    def test_impossible_says_by_how_much(self, case):
        profile, windows, footprint, demand, options = case
        least = min(one.total for one in fitted(profile, windows, footprint, fit=demand, **options).candidates)
        with pytest.raises(PolicyError, match=r"nothing fits in .*: the smallest policy takes .*, 1 B too much"):
            fitted(profile, windows, footprint, fit=replace(demand, memory=least - 1), **options)
        assert fitted(profile, windows, footprint, fit=replace(demand, memory=least), **options).choice.total == least

    def test_weights_that_leave_no_room(self):
        profile, footprint = model([[1, 0.5]])
        recipe = Recipe.of(fit=Demand((3 << 20) - 1, 1000))
        with pytest.raises(PolicyError, match=r"the weights alone take 3\.00 MiB; raise `fit.memory` or `devices.tp`"):
            fitted(profile, None, replace(footprint, weights=3 << 20), recipe=recipe)

    def test_impossible_names_the_parts_and_the_way_out(self):
        profile, footprint = model([[1, 0.5]])
        with pytest.raises(PolicyError) as error:
            fitted(profile, None, replace(footprint, weights=3 << 20), fit=Demand((3 << 20) + 1, 1000), rest="budgeted")
        assert "nothing fits in 3.00 MiB: " in str(error.value)
        assert "weights 3.00 MiB, KV cache " in str(error.value)
        assert "set `rest` to streaming" in str(error.value)

    @given(cases())
    @settings(max_examples=40)
    def test_pareto(self, case):
        profile, windows, footprint, demand, options = case
        found = fitted(profile, windows, footprint, fit=demand, **options)
        best = found.pareto
        assert best == pareto(reversed(found.candidates))
        assert all(one.total < other.total and one.loss > other.loss for one, other in pairwise(best))
        for one in found.candidates:
            assert any(other.total <= one.total and other.loss <= one.loss for other in best)


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"context": 0}, r"`fit.context` must lie in \[1, "),
            ({"context": (1 << 30) + 1}, r"`fit.context` must lie in \[1, "),
            ({"batch": 0}, r"`fit.batch` must lie in \[1, "),
            (
                {"new_tokens": 100},
                "`fit.new_tokens` must be less than `fit.context`, to leave a prompt; got 100 of 100",
            ),
            ({"new_tokens": -1}, "`fit.new_tokens`"),
            ({"chunk": 0}, "`fit.chunk` must be at least 1 token, got 0"),
        ],
        ids=str,
    )
    def test_demand(self, changes, message):
        with pytest.raises(PolicyError, match=message):
            Demand(**{"memory": 1, "context": 100, **changes})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"sink": -1}, "`streaming.sink` must be >= 0"),
            ({"group_reduce": "median"}, "`heads.group_reduce` is mean or max"),
            ({"rest": "budgeted", "beta": 1}, "`budgeted.beta` must be > 1"),
            ({"rest": "budgeted", "window": 0}, "`budgeted.window` must lie in"),
            ({"kv_group_size": 3}, "`cache.group_size`: the group size 3"),
            ({"kv_residual": -1}, "`cache.residual`: the residual"),
            ({"sink": 9, "recent": 30, "kv_streaming": True}, "`cache.streaming` is for windows of at least"),
        ],
        ids=str,
    )
    def test_options(self, options, message):
        profile, footprint = model([[1, 0.5]])
        with pytest.raises(PolicyError, match=message):
            fitted(profile, None, footprint, fit=Demand(PLENTY, 100), **options)

    @pytest.mark.parametrize("rest", ["streaming", "budgeted"])
    def test_scores_that_are_all_zero(self, rest):
        profile, footprint = model([[0, 0]])
        with pytest.raises(PolicyError, match=r"score.* 0.*; use another profile"):
            fitted(profile, None, footprint, fit=Demand(PLENTY, 100), rest=rest)

    def test_a_residual_beyond_all_contexts(self):
        profile, footprint = model([[1, 0.5]])
        found = fitted(profile, None, footprint, fit=Demand(PLENTY, 1000), kv_residual=10**30)
        assert len({one.kv_bytes for one in found.candidates if one.full_heads == 2}) == 1
