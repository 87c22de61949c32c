"""What measured losses decide: rotation and clipping of a recipe, and the choice of `fit`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsurgery.errors import PolicyError
from kvsurgery.heads.kinds import full_heads
from kvsurgery.policy.measured import measured_cache
from kvsurgery.policy.memory import Footprint
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Cache, Demand, Recipe
from tests.helpers.deciding import decided, fitted
from tests.helpers.losses import MODEL, WHOLE, losses

FILE = "losses.safetensors"
FOOTPRINT = Footprint(MODEL, weights=1000, itemsize=2, hidden=16, inner=24, vocabulary=10)
STREAMING = {"rest": "streaming", "sink": 4, "recent": 16}


def profile(seed: int = 0) -> HeadProfile:
    scores = np.random.default_rng(seed).random((2, 3), dtype=np.float32)
    return HeadProfile(scores, "duo", "kv", "made up", MODEL)


class TestCache:
    @pytest.mark.parametrize(
        ("stated", "decided"),
        [
            ({}, ("both", False)),
            ({"rotate": "values"}, ("values", False)),
            ({"clip": True}, ("both", True)),
            ({"rotate": "none", "clip": True}, ("none", True)),
        ],
        ids=str,
    )
    def test_what_is_not_stated_is_as_it_lost_least(self, stated: dict, decided: tuple) -> None:
        cache = measured_cache(Cache(3, measured=FILE, **stated), losses())
        assert (cache.rotate, cache.clip) == decided
        assert cache.measured is None
        assert measured_cache(cache, losses()) == cache

    @pytest.mark.parametrize(
        ("stated", "blocks", "decided"),
        [
            ({}, 1, ("both", False, "queries")),
            ({"rounding": "nearest"}, 1, ("both", False, None)),
            ({"rotate": "values", "clip": True, "rounding": "queries"}, 1, ("values", True, "queries")),
            ({"rotate": "values", "clip": True}, 1, ("values", True, None)),
            ({}, 2, ("both", False, None)),
        ],
        ids=str,
    )
    def test_keys_are_rounded_as_they_lost_least(self, stated: dict, blocks: int, decided: tuple) -> None:
        """The measurement stays named where it has the factors; heads in several blocks have none."""
        cache = measured_cache(Cache(3, measured=FILE, **stated), losses(rounded=True), blocks)
        assert (cache.rotate, cache.clip, cache.rounding if cache.rounding == "queries" else None) == decided
        assert cache.measured == (FILE if decided[2] else None)
        assert measured_cache(cache, losses(rounded=True), blocks) == cache

    def test_rounding_that_cannot_be_is_refused(self) -> None:
        asked = Cache(3, measured=FILE, rounding="queries")
        with pytest.raises(PolicyError, match="queries cannot be combined with `devices"):
            measured_cache(asked, losses(rounded=True), 2)
        with pytest.raises(PolicyError, match="rounding queries was not measured at 3 bits"):
            measured_cache(asked, losses())
        with pytest.raises(PolicyError, match="queries needs `cache"):
            Cache(3, rounding="queries")

    def test_without_bits_nothing_is_decided(self) -> None:
        assert measured_cache(Cache(measured=FILE), losses()) == Cache()

    @pytest.mark.parametrize(
        ("stated", "words"),
        [
            ({"scheme": "per-token"}, "`cache.measured` has the scheme kivi"),
            ({"group_size": 16}, "`cache.measured` has the scheme kivi"),
            ({"rotate": "none"}, "`cache.measured`: rotate none was not measured at 4 bits"),
        ],
        ids=str,
    )
    def test_refusals(self, stated: dict, words: str) -> None:
        with pytest.raises(PolicyError, match=words):
            measured_cache(Cache(4, measured=FILE, **stated), losses())


class TestFit:
    @given(st.integers(0, 99), st.integers(200, 3000), st.data())
    @settings(max_examples=20)
    def test_chooses_the_least_expected_divergence(self, seed: int, context: int, data) -> None:
        """Against all numbers of full heads and widths, each priced from the heads that `decide` makes full."""
        scored, measured = profile(seed), losses(seed=seed, measured=[*WHOLE])
        recipe = Recipe.of(**STREAMING, fit=Demand(1 << 50, context))
        every = fitted(scored, None, FOOTPRINT, losses=measured, recipe=recipe).candidates
        assert {(one.full_heads, one.bits) for one in every} == {
            (count, bits) for count in range(7) for bits in (16, *WHOLE) if count or bits == 16
        }
        for one in every:
            policy = decided(scored, recipe=one.recipe(recipe))
            full = np.array([[head in full_heads(layer) for head in range(3)] for layer in policy.layers])
            quantized = 0 if one.bits == 16 else measured.expected(str(one.bits))[full].sum()
            assert one.loss == pytest.approx(quantized + measured.expected("streaming")[~full].sum(), abs=1e-9)
        memory = data.draw(st.integers(min(one.total for one in every), max(one.total for one in every)))
        found = fitted(scored, None, FOOTPRINT, losses=measured, recipe=replace(recipe, fit=Demand(memory, context)))
        fitting = [one for one in every if one.total <= memory]
        assert found.choice.loss == min(one.loss for one in fitting)
        bits = [one.bits for one in found.alternatives]
        assert Counter([*bits, found.choice.bits]) == Counter({one.bits for one in fitting})
        for one in found.alternatives:
            assert one.loss == min(other.loss for other in fitting if other.bits == one.bits)

    def test_windows_that_hold_the_context_lose_nothing(self) -> None:
        recipe = Recipe.of(**STREAMING, fit=Demand(1 << 50, 20))
        found = fitted(profile(), None, FOOTPRINT, losses=losses(), recipe=recipe)
        assert {one.loss for one in found.candidates if one.bits == 16} == {0}

    def test_layers_with_a_window_are_not_priced(self) -> None:
        windows = [None, 32]
        measured = losses(windows=windows)
        recipe = Recipe.of(**STREAMING, fit=Demand(1 << 50, 1000))
        found = fitted(replace(profile(), windows=tuple(windows)), windows, FOOTPRINT, losses=measured, recipe=recipe)
        [none] = [one for one in found.candidates if not one.full_heads]
        assert none.loss == pytest.approx(measured.heads["streaming"][0].sum())

    def test_other_streaming_heads_than_were_measured(self) -> None:
        recipe = Recipe.of(rest="streaming", fit=Demand(1 << 50, 1000))
        with pytest.raises(PolicyError, match=r"`streaming.recent` 16, and this recipe 64 and 256; give the same"):
            fitted(profile(), None, FOOTPRINT, losses=losses(), recipe=recipe)

    def test_budgets_are_priced_by_a_guess(self) -> None:
        recipe = Recipe.of(rest="budgeted", fit=Demand(1 << 50, 1000))
        assert fitted(profile(), None, FOOTPRINT, losses=losses(), recipe=recipe).losses is None

    def test_a_guess_has_no_2_bits(self) -> None:
        found = fitted(profile(), None, FOOTPRINT, **STREAMING, fit=Demand(1 << 50, 1000))
        assert {one.bits for one in found.candidates} == {16, 8, 4, 3}
