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
from kvsurgery.heads.dimensions import ModelDimensions, ModelLayers, attention_name
from kvsurgery.heads.kinds import BUDGETED, FULL, HeadKind, Rest, counts
from kvsurgery.heads.section import quantization_section, selection_section
from kvsurgery.policy.budgets import BETA, allocate_budgets
from kvsurgery.policy.layer_bits import with_layer_bits
from kvsurgery.policy.tensor_parallel import arrange, check_blocks
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.profile.full_heads import best_heads, full_mask, kv_scores
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.methods import MAX_BUDGET, SCORE_METHODS
from kvsurgery.recipe import AUTO, Recipe
from kvsurgery.templates.kv_layout import (
    TILE,
    KVLayout,
    LayerLayout,
    Quantization,
    Selection,
)
from kvsurgery.templates.kv_reform import Reform

# far beyond any context, and sums of positions still fit 32 bits
MAX_WINDOW = 1 << 30


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
        """BLAKE3 of the canonical JSON of the layers, and of how budgeted heads select, the cache is quantized and long
        prompts are read."""
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


def decide(
    profile: HeadProfile,
    model: ModelLayers,
    recipe: Recipe = Recipe(),
    budgets: HeadProfile | None = None,
    losses: CacheLosses | None = None,
) -> Policy:
    """Choose the full heads: exactly this many of the highest scores, then the earlier layer, then the earlier head.

    With several blocks, every layer has a multiple of `tp` full heads: their number is rounded to such a multiple over
    the model, halves up, and of all choices of that many heads the one with the largest sum of scores is taken.

    Args:
        profile: scores per KV or query head; query heads are reduced over their group.
        model: its layers. Those that share a KV cache have one layer's heads, decided by the largest score of a head in
            all of them.
        recipe: what is asked for. Sparsity S of the N KV heads in full-attention layers makes exactly round(S x N) of
            them not full, halves to the even count; blocks are ordered by `arrange`.
        budgets: scores that budgets follow, in place of those that choose the full heads.
        losses: by which `kv_bits` "auto" chooses.

    Raises:
        PolicyError: fields are out of range, or no layer has full attention.
        ProfileError: the profile or `budgets` has no scores.
    """
    if len(model.windows) != profile.model.layers:
        raise PolicyError(f"the profile has {profile.model.layers} layers, the model {len(model.windows)}")
    eligible, budget_profile = model.eligible, budgets or profile
    for measured_profile in (profile, budget_profile):
        if (unmeasured_layers := np.flatnonzero(eligible & ~measured_profile.eligible)).size:
            measured = attention_name((measured_profile.windows or ())[unmeasured_layers[0]])
            raise PolicyError(
                f"layer {unmeasured_layers[0]} has full attention in this model and {measured} in the profile's, "
                f"{measured_profile.base_model}; measure this model: kvsurgery profile compute"
            )
    _check_model(model, profile.model, recipe)
    scores = kv_scores(profile, recipe.group_reduce, model.sources)
    _check_threshold(recipe.threshold, profile.method)
    recipe = completed(recipe, profile, budgets)
    mask = asked_mask = full_mask(scores, eligible, recipe.chosen or {"full_heads": 0})
    if recipe.tp > 1 and not recipe.tp_uneven:
        mask = best_heads(scores, eligible, (2 * int(asked_mask.sum()) + recipe.tp) // (2 * recipe.tp), recipe.tp)
    layers = _layers(mask, _budgets(mask, budget_profile, model, recipe), recipe)
    layout = _layout(layers, model, profile.model, recipe, losses)
    options = {"method": profile.method, **_options(recipe, losses)}
    if "query" not in (profile.granularity, budget_profile.granularity):
        options.pop("group_reduce", None)
    if budgets is None:
        options.pop("budgets_from", None)
    elif "budgets_from" in options:  # the file's content, not its place
        options["budgets_from"] = f"{budgets.method} {budgets.hash[:16]}"
    return Policy(layout, recipe, options, rounded=int(mask.sum() - asked_mask.sum()))


def keep_all(
    dimensions: ModelDimensions, model: ModelLayers, recipe: Recipe, losses: CacheLosses | None = None
) -> Policy:
    """The policy without scores to choose heads by: every head stays full, in a cache that may be quantized.

    Raises:
        PolicyError: the recipe asks for other heads, fields are out of range, or no layer has full attention.
    """
    _check_model(model, dimensions, recipe)
    score_fields = ("rest", "budget", "budgets_from", "hold")
    stated_fields = [*recipe.chosen, *(name for name in score_fields if getattr(recipe, name) is not None)]
    if stated_fields:
        raise PolicyError(
            f"`{stated_fields[0]}` chooses heads by scores, and no profile with scores is given; add one, or leave it "
            "out, and every head stays full"
        )
    recipe = recipe.trimmed()
    layers = _layers(np.ones((dimensions.layers, dimensions.kv_heads), dtype=bool), None, recipe)
    return Policy(_layout(layers, model, dimensions, recipe, losses), recipe, _options(recipe, losses))


def completed(recipe: Recipe, profile: HeadProfile, budgets: HeadProfile | None = None) -> Recipe:
    """The recipe with what profiles mean where it says nothing, and without what makes no difference.

    Raises:
        PolicyError: it does not say how many heads are full, where budgets follow another profile.
    """
    if budgets not in (None, profile) and not recipe.chosen:
        raise PolicyError(
            "with `budgets_from`, the profile only chooses the full heads; say how many with `full_heads` or "
            "`sparsity`, or leave the profile out"
        )
    rest, budget_profile = recipe.rest or usual_rest(profile, budgets), budgets or profile
    values: dict[str, Any] = {"rest": rest}
    if rest == "budgeted":
        values["beta"] = usual_beta(budget_profile) if recipe.beta is None else recipe.beta
    if rest == "streaming" and not recipe.chosen:
        values["sparsity"] = 0.75 if profile.model.group == 1 else 0.5
    if profile.granularity == budget_profile.granularity == "kv":
        values["group_reduce"] = Recipe.group_reduce
    return replace(recipe, **values).trimmed()


def usual_rest(profile: HeadProfile, budgets: HeadProfile | None = None) -> Rest:
    """What heads that are not full become, where a recipe does not say."""
    return "budgeted" if budgets else SCORE_METHODS[profile.method].rest


def usual_beta(budget_profile: HeadProfile) -> float | None:
    """How budgets follow the scores of a profile, where a recipe does not say: shares and budgets as they are."""
    method = SCORE_METHODS.get(budget_profile.method)
    return None if method and method.divides else BETA


def _options(recipe: Recipe, losses: CacheLosses | None) -> dict[str, Any]:
    """What provenance records of a recipe that is complete."""
    options = {name: getattr(recipe, name) for name in recipe.in_use}
    if "kv_measured" in options and losses is not None:
        options["kv_measured"] = losses.hash[:16]
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _check_model(model: ModelLayers, dimensions: ModelDimensions, recipe: Recipe) -> None:
    """Raise PolicyError where no layer has full attention, or heads do not come in so many blocks."""
    if not model.eligible.any():
        raise PolicyError("no layer of this model has full attention; there is nothing to convert")
    for layer_dimensions in (dimensions, model.sliding or dimensions):
        check_blocks(recipe.tp, layer_dimensions.kv_heads)


def _layout(
    layers: Sequence[LayerLayout],
    model: ModelLayers,
    dimensions: ModelDimensions,
    recipe: Recipe,
    losses: CacheLosses | None,
) -> KVLayout:
    """The layout of a model whose layers with full attention become these, with the cache that a recipe asks for."""
    all_layers = tuple(
        layer if is_converted else _unconverted_layer(place, len(layer.blocks), model, dimensions)
        for place, (layer, is_converted) in enumerate(zip(layers, model.eligible, strict=True))
    )
    layout = KVLayout(all_layers, dimensions.head_dim)
    if recipe.kv_bits == AUTO:
        assert losses is not None  # as the recipe names their file
        return with_layer_bits(layout, recipe, losses)
    quantization = recipe.quantization
    if quantization is None:
        return layout
    for head_dim in {layer.head_dim or layout.head_dim for layer in layout.layers}:
        recipe.check_quantization(head_dim)
    try:
        layout = layout.quantized(quantization)
    except ValueError as error:
        raise PolicyError(f"`kv_bits`: {error}") from error
    min_window = 2 * (quantization.residual + TILE)
    windows = [layer.recent for layer in layout.layers if layer.native or recipe.rest == "streaming"]
    if quantization.streaming and windows and max(windows) < min_window:
        raise PolicyError(
            f"`kv_streaming` is for windows of at least {min_window} tokens, and the longest has {max(windows)}; leave "
            "it out"
        )
    head_counts = counts(layout)
    if not head_counts[FULL] + head_counts[BUDGETED] and not quantization.streaming:
        raise PolicyError("`kv_bits` is for full and budgeted heads, and this policy has none; leave it out")
    return layout


def _budgets(full: np.ndarray, budget_profile: HeadProfile, model: ModelLayers, recipe: Recipe) -> np.ndarray | None:
    """int64 [layers, kv_heads]: the budget of each head that has one; None where heads stream."""
    if recipe.rest != "budgeted":
        return None
    _check_selection(recipe.selection)
    scores = kv_scores(budget_profile, recipe.group_reduce, model.sources)
    budgets, budgeted_mask = np.zeros(scores.shape, dtype=np.int64), ~full & model.eligible[:, None]
    if recipe.budget is not None:
        budgets[budgeted_mask] = allocate_budgets(scores[budgeted_mask], recipe.budget, recipe.beta)
    elif SCORE_METHODS[budget_profile.method].kind == "budget" and recipe.beta is None:
        budgets[budgeted_mask] = scores[budgeted_mask]
    else:
        raise PolicyError(
            "`budget` is missing: tokens of the prompt that a budgeted head keeps; or set `rest` to streaming"
        )
    min_budget, sinks = budgets[budgeted_mask].min(initial=MAX_BUDGET), recipe.selection.sinks
    if min_budget < sinks:
        raise PolicyError(
            f"`select` {recipe.select} keeps the first {sinks} tokens in every budgeted head, and the smallest budget "
            f"is {min_budget}; raise `budget` or `beta`"
        )
    return budgets


def _layers(full: np.ndarray, budgets: np.ndarray | None, recipe: Recipe) -> list[LayerLayout]:
    """Layers of which these heads are full, bool [layers, kv_heads], and the others stream or keep so much."""
    sizes, selection = (0, 1), None
    if recipe.rest == "streaming":
        _check_streaming(recipe.sink, recipe.recent)
        sizes = recipe.sink, recipe.recent
    elif recipe.rest == "budgeted":
        selection = recipe.selection
    result = []
    for layer, (order, blocks) in enumerate(arrange(full, budgets, recipe.tp)):
        layer_budgets = (
            () if budgets is None else tuple(int(budgets[layer, head]) for head in order if not full[layer, head])
        )
        result.append(LayerLayout(blocks, *sizes, budgets=layer_budgets, selection=selection, order=order))
    return result


def _unconverted_layer(place: int, blocks: int, model: ModelLayers, dimensions: ModelDimensions) -> LayerLayout:
    """A layer with linear attention, a window of its own or the KV cache of an earlier one, in this many blocks."""
    window, layer_dimensions = model.windows[place], model.sliding or dimensions
    if place in model.sources:
        return LayerLayout((), 0, 1, source=model.sources[place])
    if not window:
        return LayerLayout((), 0, 1)
    layer_blocks, order = ((0, layer_dimensions.kv_heads // blocks),) * blocks, tuple(range(layer_dimensions.kv_heads))
    head_dim = None if layer_dimensions.head_dim == dimensions.head_dim else layer_dimensions.head_dim
    return LayerLayout(layer_blocks, 0, window, native=True, order=order, head_dim=head_dim, chunked=model.chunked)


def _check_threshold(threshold: float | None, method: str) -> None:
    """Raise PolicyError where no score of a method can lie there."""
    max_score = SCORE_METHODS[method].most
    if threshold is None or 0 <= threshold <= (np.finfo(float).max if max_score is None else max_score):
        return
    allowed_range = "be a finite number of 0 or more" if max_score is None else f"lie in [0, {max_score:g}]"
    raise PolicyError(f"`threshold` must {allowed_range} for {method} scores, got {threshold}")


def _check_streaming(sink: int, recent: int) -> None:
    if sink < 0 or recent < 1:
        raise PolicyError(f"`sink` must be >= 0 and `recent` >= 1, got {sink} and {recent}")
    if sink + recent > MAX_WINDOW:
        raise PolicyError(f"`sink` and `recent` together must be at most {MAX_WINDOW} tokens, got {sink} and {recent}")


def _check_selection(selection: Selection) -> None:
    if not 1 <= selection.window <= MAX_WINDOW:
        raise PolicyError(f"`window` must lie in [1, {MAX_WINDOW}], got {selection.window}")
    if not 1 <= selection.kernel_size <= MAX_WINDOW or selection.kernel_size % 2 == 0:
        raise PolicyError(f"`kernel_size` must be odd and in [1, {MAX_WINDOW}], got {selection.kernel_size}")
    if selection.hold is not None and not selection.window <= selection.hold <= MAX_WINDOW:
        raise PolicyError(
            f"`hold` must lie in [{selection.window}, {MAX_WINDOW}] tokens: the observation window, `window`, must fit "
            f"into the block of recent tokens; got {selection.hold}"
        )
