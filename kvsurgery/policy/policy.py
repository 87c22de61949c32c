"""`Policy`: what every KV head of a model becomes. Pure arithmetic, deterministic, ties broken by place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from blake3 import blake3

from kvsurgery.errors import PolicyError
from kvsurgery.heads.dimensions import ModelLayers
from kvsurgery.heads.kinds import BUDGETED, FULL, HeadKind, counts
from kvsurgery.heads.section import quantization_section, selection_section
from kvsurgery.policy.budgets import allocate_budgets
from kvsurgery.policy.evidence import Evidence
from kvsurgery.policy.layer_bits import with_layer_bits, with_source_bits
from kvsurgery.policy.measured import measured_cache
from kvsurgery.policy.tensor_parallel import arrange, check_blocks
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.profile.full_heads import best_heads, full_mask, kv_scores, unit_scores
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.methods import MAX_BUDGET, SCORE_METHODS
from kvsurgery.recipe import AUTO, Recipe, default
from kvsurgery.recipe_tables import SOURCE
from kvsurgery.templates.kv_layout import (
    NEAREST,
    TILE,
    KVLayout,
    LayerLayout,
    Quantization,
)
from kvsurgery.templates.kv_reform import Reform


@dataclass(frozen=True)
class Policy:
    """What every KV head becomes, and the recipe that decided it. The mask is stored, never a threshold.

    Attributes:
        layout: layers, with the order of their heads: full ones first, inside a group in the source's order.
        recipe: complete, without anything that makes no difference.
        options: the same as provenance records it, with the profile's method.
        reform: how long prompts are read; None: as usual.
        rounded: how many more heads are full than the recipe asks for, so that blocks can be alike.
    """

    layout: KVLayout
    recipe: Recipe
    options: dict[str, Any]
    reform: Reform | None = None
    rounded: int = 0

    @classmethod
    def of(
        cls, recipe: Recipe, evidence: Evidence, model: ModelLayers, source_bits: Sequence[int | str | None] = ()
    ) -> Policy:
        """Choose the full heads: N of the highest scores, then the earlier layer, then the earlier head.

        With several blocks, or units of several heads, every layer has a multiple of `Recipe.run` full heads: their
        number is rounded to such a multiple over the model, halves up, and of all choices of that many heads the one
        with the largest sum of scores is taken. Without scores every head stays full, in a cache that may be quantized.

        Args:
            recipe: what is asked for, but a demand. Sparsity S of the N KV heads in full-attention layers makes exactly
                round(S x N) of them not full, halves to the even count; blocks are ordered by `arrange`.
            evidence: of this model.
            model: its layers. Those that share a KV cache have one layer's heads, decided by the largest score of a
                head in all of them.
            source_bits: bits by layer for `cache.bits` source; None for the model's dtype.

        Raises:
            PolicyError: fields are out of range, no layer has full attention, or heads are to be chosen without scores.
            ProfileError: a profile has no scores.
        """
        _check_model(model, recipe)
        mask = asked_mask = np.ones((model.dimensions.layers, model.dimensions.kv_heads), dtype=bool)
        if evidence.scores is None:
            recipe = _completed(recipe, evidence)
        else:
            scores = kv_scores(evidence.scores, recipe.heads.group_reduce, model.sources)
            scores = unit_scores(scores, recipe.heads.head_unit)
            _check_threshold(recipe.heads.threshold, evidence.scores.method)
            recipe = _completed(recipe, evidence)
            mask = asked_mask = full_mask(scores, model.eligible, recipe.heads.chosen or {"full_heads": 0})
            if (run := recipe.run) > 1:
                mask = best_heads(scores, model.eligible, (2 * int(asked_mask.sum()) + run) // (2 * run), run)
        layers = _layers(mask, _budgets(mask, evidence.budget_scores, model, recipe), recipe)
        layout = _layout(layers, model, recipe, evidence.losses, source_bits)
        return cls(layout, recipe, _options(recipe, evidence), rounded=int(mask.sum() - asked_mask.sum()))

    @property
    def layers(self) -> tuple[LayerLayout, ...]:
        """Layers, with the order of their heads."""
        return self.layout.layers

    @property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """Per layer, the source KV head at each place; query heads follow those that they attend to."""
        return tuple(layer.order for layer in self.layout.attended)

    @property
    def moves_heads(self) -> bool:
        """Whether a head gets another place than in the source."""
        return any(order != tuple(range(len(order))) for order in self.orders)

    @cached_property
    def hash(self) -> str:
        """BLAKE3 of the policy as canonical JSON.

        It covers the layers, and how budgeted heads select, the cache is quantized and long prompts are read."""
        names = ("order", "full", "sink", "recent", "native")
        layers = [
            {
                **{name: getattr(layer, name) for name in names},
                "budgets": layer.budgets if layer.selection else None,
                **({"blocks": layer.blocks} if len(layer.blocks) > 1 else {}),
                **({"chunked": True} if layer.chunked else {}),
            }
            for layer in self.layers
        ]
        selection = self.layout.selection
        content: list[Any] = [layers, selection and selection_section(selection)]
        content += [part for part in (quantization_section(self.layout), self.reform and asdict(self.reform)) if part]
        return blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def quantization(self) -> Quantization | None:
        """How heads store all but their newest tokens, in the first layer that quantizes them; None: as they are."""
        return self.layout.quantization

    @cached_property
    def counts(self) -> dict[HeadKind, int]:
        """Number of KV heads of each kind."""
        return counts(self.layout)

    @property
    def eligible(self) -> int:
        """KV heads in full-attention layers."""
        return sum(count for kind, count in self.counts.items() if not kind.own)

    @property
    def full(self) -> int:
        """KV heads that keep every token."""
        return self.counts[FULL]


def _completed(recipe: Recipe, evidence: Evidence) -> Recipe:
    """The recipe with what the evidence means where it says nothing, and without what makes no difference.

    Raises:
        PolicyError: heads are to be chosen without scores, it does not say how many are full, where budgets follow
            another profile, or the cache was not measured so.
    """
    if evidence.losses and recipe.cache and recipe.cache.bits != AUTO:
        recipe = replace(recipe, cache=measured_cache(recipe.cache, evidence.losses, recipe.devices.tp))
    if evidence.scores is None:
        stated = recipe.stated("heads") or recipe.stated("streaming") or recipe.stated("budgeted")
        if stated or recipe.rest:
            raise PolicyError(
                f"{stated or '`rest`'} requires a profile with scores, and none is given; add one, or leave it out, "
                "and every head stays full"
            )
        return recipe
    if evidence.budgets not in (None, evidence.scores) and not recipe.heads.chosen:
        raise PolicyError(
            "with `budgeted.budgets_from`, the profile only chooses the full heads; say how many with "
            "`heads.full_heads` or `heads.sparsity`, or leave the profile out"
        )
    recipe = recipe.changed(rest=recipe.rest or evidence.rest)
    if recipe.budgeted and recipe.budgeted.beta is None:
        recipe = recipe.changed(beta=evidence.beta)
    if recipe.streaming and not recipe.heads.chosen:
        recipe = recipe.changed(sparsity=0.75 if evidence.scores.model.group == 1 else 0.5)
    if not evidence.reduces_groups:
        recipe = recipe.changed(group_reduce=default("group_reduce"))
    return recipe


def _options(recipe: Recipe, evidence: Evidence) -> dict[str, Any]:
    """What provenance records of a recipe that is complete: the contents of files, not their places."""
    options = {"method": evidence.scores and evidence.scores.method, **recipe.options}
    if not evidence.reduces_groups:
        options.pop("group_reduce", None)
    if "budgets_from" in options:
        budgets = evidence.budgets
        options["budgets_from"] = budgets and f"{budgets.method} {budgets.hash[:16]}"
    if evidence.losses is not None and recipe.measured is not None:
        options["kv_measured"] = evidence.losses.hash[:16]
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _check_model(model: ModelLayers, recipe: Recipe) -> None:
    """Raise PolicyError where no layer has full attention, or heads do not come in so many blocks."""
    if not model.eligible.any():
        raise PolicyError("no layer of this model has full attention; there is nothing to convert")
    for layer_dimensions in (model.dimensions, model.sliding or model.dimensions):
        check_blocks(recipe.devices.tp, layer_dimensions.kv_heads)
    _check_unit(recipe, model.dimensions.kv_heads)


def _check_unit(recipe: Recipe, kv_heads: int) -> None:
    """Raise PolicyError where heads do not come in such units, in each block."""
    unit, tp = recipe.heads.head_unit, recipe.devices.tp
    if kv_heads // tp % unit:
        raise PolicyError(
            f"`heads.head_unit` must divide the {kv_heads // tp} KV heads of a layer and process, got {unit}"
        )
    if unit > 1 and tp > 1 and (recipe.budgeted or recipe.devices.tp_uneven):
        raise PolicyError("`heads.head_unit` with `devices.tp` is for streaming heads without `devices.tp_uneven`")


def _layout(
    layers: Sequence[LayerLayout],
    model: ModelLayers,
    recipe: Recipe,
    losses: CacheLosses | None,
    source_bits: Sequence[int | str | None],
) -> KVLayout:
    """The layout of a model whose layers with full attention become these, with the cache that a recipe asks for."""
    all_layers = tuple(
        layer if is_converted else _unconverted_layer(place, len(layer.blocks), model)
        for place, (layer, is_converted) in enumerate(zip(layers, model.eligible, strict=True))
    )
    layout = KVLayout(all_layers, model.dimensions.head_dim)
    cache = recipe.cache
    if cache is None:
        return layout
    if cache.bits == SOURCE:
        layout = with_source_bits(layout, cache, source_bits)
        _check_quantized(layout, recipe)
        return layout
    quantization = cache.quantization
    if quantization is None:
        assert losses is not None  # as the recipe names their file
        return with_layer_bits(layout, recipe, losses)
    for head_dim in {layer.head_dim or layout.head_dim for layer in layout.layers}:
        cache.check_quantization(head_dim)
    try:
        layout = layout.quantized(quantization)
    except ValueError as error:
        raise PolicyError(f"`cache.bits`: {error}") from error
    layout = _with_measured_rounding(layout)
    _check_quantized(layout, recipe)
    return layout


def _check_quantized(layout: KVLayout, recipe: Recipe) -> None:
    """Raise PolicyError where no window is long enough to be quantized as asked for, or no head is quantized."""
    cache = recipe.cache
    assert cache is not None  # as the layout is quantized
    min_window = 2 * (cache.residual + TILE)
    windows = [layer.recent for layer in layout.layers if layer.native or recipe.streaming]
    if cache.streaming and windows and max(windows) < min_window:
        raise PolicyError(
            f"`cache.streaming` is for windows of at least {min_window} tokens, and the longest has {max(windows)}; "
            "leave it out"
        )
    head_counts = counts(layout)
    if not head_counts[FULL] + head_counts[BUDGETED] and not cache.streaming:
        raise PolicyError("`cache.bits` is for full and budgeted heads, and this policy has none; leave it out")


def _with_measured_rounding(layout: KVLayout) -> KVLayout:
    """The layout with keys rounded to the nearest code in layers with a window of their own, which are not measured."""
    layers = tuple(
        replace(layer, quantization=replace(layer.quantization, rounding=NEAREST))
        if layer.quantization and layer.native and layer.rounded_by_queries
        else layer
        for layer in layout.layers
    )
    return replace(layout, layers=layers)


def _budgets(
    full: np.ndarray, budget_profile: HeadProfile | None, model: ModelLayers, recipe: Recipe
) -> np.ndarray | None:
    """int64 [layers, kv_heads]: the budget of each head that has one; None where heads stream."""
    if recipe.budgeted is None:
        return None
    assert budget_profile is not None  # as no head has a budget without scores
    budget, beta, selection = recipe.budgeted.budget, recipe.budgeted.beta, recipe.budgeted.selection
    scores = kv_scores(budget_profile, recipe.heads.group_reduce, model.sources)
    budgets, budgeted_mask = np.zeros(scores.shape, dtype=np.int64), ~full & model.eligible[:, None]
    if budget is not None:
        budgets[budgeted_mask] = allocate_budgets(scores[budgeted_mask], budget, beta)
    elif SCORE_METHODS[budget_profile.method].kind == "budget" and beta is None:
        budgets[budgeted_mask] = scores[budgeted_mask]
    else:
        raise PolicyError(
            "`budgeted.budget` is missing: tokens of the prompt that a budgeted head keeps; or set `rest` to streaming"
        )
    min_budget, sinks = budgets[budgeted_mask].min(initial=MAX_BUDGET), selection.sinks
    if min_budget < sinks:
        raise PolicyError(
            f"`budgeted.select` {selection.select} keeps the first {sinks} tokens in every budgeted head, and the "
            f"smallest budget is {min_budget}; raise `budgeted.budget` or `budgeted.beta`"
        )
    return budgets


def _layers(full: np.ndarray, budgets: np.ndarray | None, recipe: Recipe) -> list[LayerLayout]:
    """Layers of which these heads are full, bool [layers, kv_heads], and the others stream or keep so much."""
    sizes = (recipe.streaming.sink, recipe.streaming.recent) if recipe.streaming else (0, 1)
    selection = recipe.budgeted.selection if recipe.budgeted else None
    result = []
    for layer, (order, blocks) in enumerate(arrange(full, budgets, recipe.devices.tp)):
        layer_budgets = (
            () if budgets is None else tuple(int(budgets[layer, head]) for head in order if not full[layer, head])
        )
        result.append(LayerLayout(blocks, *sizes, budgets=layer_budgets, selection=selection, order=order))
    return result


def _unconverted_layer(place: int, blocks: int, model: ModelLayers) -> LayerLayout:
    """A layer without a KV cache, with a window of its own or the KV cache of an earlier one, in this many blocks."""
    window, layer_dimensions = model.windows[place], model.sliding or model.dimensions
    if place in model.sources:
        return LayerLayout((), 0, 1, source=model.sources[place])
    if not window:
        return LayerLayout((), 0, 1)
    layer_blocks, order = ((0, layer_dimensions.kv_heads // blocks),) * blocks, tuple(range(layer_dimensions.kv_heads))
    head_dim = None if layer_dimensions.head_dim == model.dimensions.head_dim else layer_dimensions.head_dim
    return LayerLayout(layer_blocks, 0, window, native=True, order=order, head_dim=head_dim, chunked=model.chunked)


def _check_threshold(threshold: float | None, method: str) -> None:
    """Raise PolicyError where no score of a method can lie there."""
    max_score = SCORE_METHODS[method].most
    if threshold is None or 0 <= threshold <= (np.finfo(float).max if max_score is None else max_score):
        return
    allowed_range = "be a finite number of 0 or more" if max_score is None else f"lie in [0, {max_score:g}]"
    raise PolicyError(f"`heads.threshold` must {allowed_range} for {method} scores, got {threshold}")
