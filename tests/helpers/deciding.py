"""Policies that are decided without a checkpoint: of a profile, the windows of its model and a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsurgery.heads.dimensions import ModelLayers
from kvsurgery.policy.evidence import Evidence
from kvsurgery.policy.fit import Fit, fit
from kvsurgery.policy.memory import Footprint
from kvsurgery.policy.policy import Policy
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe


def decided(
    profile: HeadProfile,
    windows: Sequence[int | None] | ModelLayers | None = None,
    recipe: Recipe = Recipe(),
    budgets: HeadProfile | None = None,
    losses: CacheLosses | None = None,
    **options: Any,
) -> Policy:
    """What the heads of a model become.

    Args:
        windows: of its layers, or all that these are; by default they have full attention.
        options: fields of the recipe in place of its own, by flat name.
    """
    return Policy.of(recipe.changed(**options), Evidence(profile, budgets, None, losses), _layers(profile, windows))


def fitted(
    profile: HeadProfile,
    windows: Sequence[int | None] | ModelLayers | None,
    footprint: Footprint,
    budgets: HeadProfile | None = None,
    losses: CacheLosses | None = None,
    recipe: Recipe = Recipe(),
    **options: Any,
) -> Fit:
    """What fits a memory, with arguments as `decided` has them."""
    evidence = Evidence(profile, budgets, None, losses)
    return fit(recipe.changed(**options), evidence, _layers(profile, windows), footprint)


def _layers(profile: HeadProfile, windows: Sequence[int | None] | ModelLayers | None) -> ModelLayers:
    if isinstance(windows, ModelLayers):
        return windows
    return ModelLayers(profile.model, windows or [None] * profile.model.layers)
