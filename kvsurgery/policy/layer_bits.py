"""Bits of each layer's cache: of least measured divergence within a budget of bits a value, or those of the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvsurgery.errors import PolicyError
from kvsurgery.heads.kinds import full_heads
from kvsurgery.policy.measured import measured_cache
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.recipe import Cache, Recipe
from kvsurgery.templates.kv_layout import KVLayout, Quantization, Widths

# bits that a value counts as where a layer keeps the model's dtype
UNQUANTIZED = 16


def with_layer_bits(layout: KVLayout, recipe: Recipe, losses: CacheLosses) -> KVLayout:
    """The layout with a width for each layer that has full heads.

    A layer has one width, so that its attention stays one kernel launch. Losses of heads add up, and so do those of
    layers: the choice has the least sum, and its full heads have at most `kv_budget` bits a value on average.

    Raises:
        PolicyError: there are budgeted heads or no full ones, heads cannot be stored so, or the budget is smaller than
            the smallest width.
    """
    cache = recipe.cache
    assert cache is not None  # as they say how the bits are chosen
    assert cache.budget is not None
    if recipe.budgeted:
        raise PolicyError("`cache.bits` auto is for full heads: budgeted heads are not measured; give a width")
    if not any(layer.full for layer in layout.layers):
        raise PolicyError("`cache.bits` auto is for full heads, and this policy has none; leave it out")
    quantizations: dict[int | str, Quantization | None] = {UNQUANTIZED: None}
    for bits in losses.settings:
        width_cache = measured_cache(replace(cache, bits=bits, budget=None), losses, recipe.devices.tp)
        width_cache.check_quantization(layout.head_dim)
        quantizations[bits] = width_cache.quantization
    pair_bits = {bits: sum(Widths.of(bits)) for bits in quantizations}  # of a key and a value
    widths = sorted(quantizations, key=lambda bits: pair_bits[bits])
    min_bits = pair_bits[widths[0]] / 2
    if cache.budget < min_bits:
        raise PolicyError(f"`cache.budget`: heads of {layout.head_dim} have at least {min_bits:g} bits a value")
    expected_losses = [
        np.zeros((losses.model.layers, losses.model.kv_heads)) if bits == UNQUANTIZED else losses.expected(str(bits))
        for bits in widths
    ]
    full_places = [place for place, layer in enumerate(layout.layers) if layer.full]
    heads = [[*full_heads(layout.layers[place])] for place in full_places]
    layer_losses = [
        [float(width_losses[place, layer_heads].sum()) for width_losses in expected_losses]
        for place, layer_heads in zip(full_places, heads, strict=True)
    ]
    costs = [[pair_bits[bits] * len(layer_heads) for bits in widths] for layer_heads in heads]
    # budgets are decimal fractions
    total_bits = int(2 * cache.budget * sum(layer.full for layer in layout.layers) + 1e-6)
    columns = dict(zip(full_places, least_loss(layer_losses, costs, total_bits), strict=True))
    layers = tuple(
        replace(layer, quantization=quantizations[widths[columns[place]]] if place in columns else None)
        for place, layer in enumerate(layout.layers)
    )
    return replace(layout, layers=layers)


def with_source_bits(layout: KVLayout, cache: Cache, source_bits: Sequence[int | str | None]) -> KVLayout:
    """The layout with the given bits by layer, where a layer has heads that can be quantized.

    Args:
        cache: how all layers are quantized, except for the bits.
        source_bits: by layer; None for the model's dtype.

    Raises:
        PolicyError: heads cannot be stored so, or no layer with bits has heads to quantize.
    """
    layers = []
    for layer, bits in zip(layout.layers, source_bits, strict=True):
        if bits is not None:
            layer_cache = replace(cache, bits=bits)
            layer_cache.check_quantization(layer.head_dim or layout.head_dim)
            quantized_layer = replace(layer, quantization=layer_cache.quantization)
            layer = quantized_layer if quantized_layer.quantized_heads else layer
        layers.append(layer)
    layout = replace(layout, layers=tuple(layers))
    if layout.quantization is None:
        raise PolicyError("`cache.bits` source: no layer with a stored width has heads to quantize; leave it out")
    return layout


def least_loss(losses: Sequence[Sequence[float]], costs: Sequence[Sequence[int]], max_cost: int) -> list[int]:
    """The column of each row with the least sum of losses whose costs sum to at most `max_cost`; on ties, earlier ones.

    Exact, by dynamic programming over totals of costs. The first columns together cost `max_cost` at most.
    """
    least_losses, choices = np.zeros(max_cost + 1), []
    for row, amounts in zip(losses, costs, strict=True):
        totals = np.full((len(row), max_cost + 1), np.inf)
        for column, (loss, amount) in enumerate(zip(row, amounts, strict=True)):
            totals[column, amount:] = least_losses[: max(max_cost + 1 - amount, 0)] + loss
        choices.append(totals.argmin(0))
        least_losses = totals.min(0)
    columns, remaining = [], max_cost
    for choice, amounts in zip(reversed(choices), reversed(costs), strict=True):
        columns.append(int(choice[remaining]))
        remaining -= amounts[columns[-1]]
    return columns[::-1]
