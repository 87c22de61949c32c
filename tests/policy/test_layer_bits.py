"""A width for each layer: the choice is the best that the budget allows, and says what it cannot do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.errors import PolicyError
from kvsurgery.heads.kinds import full_heads
from kvsurgery.heads.section import layout_section
from kvsurgery.policy.layer_bits import least_loss
from kvsurgery.policy.policy import Policy
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from kvsurgery.templates.kv_layout import KVLayout, Quantization
from tests.helpers.deciding import decided
from tests.helpers.losses import MODEL, losses

LAYERS = 5
WIDTHS, PAIRED = (8, 4, 3, 2), (8, 4, 3, "k3v2", 2)
AUTO = Recipe.of(kv_bits="auto", kv_budget=3.0, kv_measured="losses.safetensors", sparsity=0.4)


def chosen(recipe: Recipe = AUTO, seed: int = 0, **options) -> Policy:
    """A policy of five layers of three heads, with random scores and losses."""
    model = replace(MODEL, layers=LAYERS)
    scores = np.random.default_rng(seed).random((LAYERS, model.kv_heads), dtype=np.float32)
    windows = options.pop("windows", [None] * LAYERS)
    measured = losses(model, windows=windows, seed=seed, measured=options.pop("measured", WIDTHS))
    profile = HeadProfile(scores, "duo", "kv", "made up", model)
    return decided(profile, windows, recipe, losses=measured, **options)


@given(st.data())
def test_no_other_choice_is_better(data) -> None:
    rows, columns = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4))
    amounts = st.lists(st.integers(0, 9), min_size=columns, max_size=columns)
    harms, costs = ([data.draw(amounts) for _ in range(rows)] for _ in range(2))
    most = sum(row[0] for row in costs) + data.draw(st.integers(0, 20))
    chosen = least_loss(harms, costs, most)

    def total(table, choice) -> int:
        return sum(row[column] for row, column in zip(table, choice, strict=True))

    every = product(range(columns), repeat=rows)
    assert total(costs, chosen) <= most
    assert total(harms, chosen) == min(total(harms, one) for one in every if total(costs, one) <= most)


@given(
    st.integers(0, 50), st.sampled_from([2, 2.5, 3.0, 3.7, 4.0, 5.5, 8.0, 12.0, 16]), st.sampled_from([WIDTHS, PAIRED])
)
def test_the_best_choice_of_layers(seed: int, budget: float, measured_widths: tuple) -> None:
    """Beside every other choice of widths, counted head by head."""
    policy = chosen(seed=seed, kv_budget=budget, measured=measured_widths)
    measured = losses(replace(MODEL, layers=LAYERS), seed=seed, measured=measured_widths)
    harm = {bits: measured.expected(str(bits)) for bits in measured_widths} | {16: np.zeros((LAYERS, 3))}
    mean_bits = {"k3v2": 2.5}
    full = {place: [*full_heads(layer)] for place, layer in enumerate(policy.layers) if layer.full}
    bits = {place: (policy.layers[place].quantization or Quantization(16, clip=False)).bits for place in full}

    def price(widths) -> tuple[float, float]:
        heads = [
            (place, head, width) for (place, some), width in zip(full.items(), widths, strict=True) for head in some
        ]
        return sum(harm[width][place, head] for place, head, width in heads), sum(
            mean_bits.get(width, width) for *_, width in heads
        )

    loss, cost = price(bits.values())
    assert cost <= budget * policy.full
    possible = (price(widths) for widths in product((16, *measured_widths), repeat=len(full)))
    assert loss == pytest.approx(min(other for other, total in possible if total <= budget * policy.full), abs=1e-12)


def test_each_width_is_rotated_and_clipped_as_measured() -> None:
    policy = chosen(sparsity=0.0, kv_budget=3.4)
    hows = {layer.quantization for layer in policy.layers}
    assert len(hows) > 1
    assert hows <= {Quantization(bits, rotate="both", clip=False) for bits in (8, 4, 3, 2)}
    assert policy.options["kv_bits"] == "auto"
    assert policy.options["kv_measured"] == losses(replace(MODEL, layers=LAYERS)).hash[:16]
    assert policy.hash != chosen(sparsity=0.0, kv_budget=4.4).hash


def test_layers_without_full_heads_have_no_width() -> None:
    policy = chosen(sparsity=0.8, windows=[None, 32, None, None, None])
    for layer in policy.layers:
        assert bool(layer.full) == (layer.quantization is not None)
    section = layout_section(policy.layout)
    config = {"kv_surgery": section, "num_hidden_layers": LAYERS, "num_key_value_heads": 3}
    stored = tuple(replace(layer, order=()) for layer in policy.layers)
    assert KVLayout.from_config(config).layers == stored
    assert section["quantization"]["bits"].count(None) == sum(layer.full == 0 for layer in policy.layers)


def test_a_budget_for_one_width_gives_it() -> None:
    assert {layer.quantization for layer in chosen(kv_budget=2.0, sparsity=0.0).layers} == {
        Quantization(2, rotate="both", clip=False)
    }
    between = {layer.quantization for layer in chosen(kv_budget=2.5, sparsity=0.0, measured=("k3v2",)).layers}
    assert between == {Quantization("k3v2", rotate="both", clip=False)}
    everything = chosen(kv_budget=16.0)
    assert everything.quantization is None
    assert "quantization" not in layout_section(everything.layout)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rest": "budgeted", "budget": 8}, "budgeted heads are not measured"),
        ({"sparsity": 1.0}, "this policy has none"),
        ({"kv_scheme": "per-token"}, "`cache.measured` has the scheme kivi"),
        ({"kv_residual": -1}, "residual"),
    ],
)
def test_refusals(options: dict, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        chosen(**options)


def test_heads_that_have_no_small_width() -> None:
    model = replace(MODEL, head_dim=12)
    measured = losses(model)
    profile = HeadProfile(np.ones((2, 3), np.float32), "duo", "kv", "made up", model)
    with pytest.raises(PolicyError, match="heads of 12 have at least 4 bits a value"):
        decided(profile, losses=measured, recipe=AUTO)
    assert decided(profile, losses=measured, recipe=AUTO.changed(kv_budget=4.0)).quantization.bits == 4
