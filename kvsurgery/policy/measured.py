"""What a measurement of a model's caches decides of a recipe."""

from __future__ import annotations

from dataclasses import replace

from kvsurgery.errors import PolicyError, ProfileError
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.recipe import Recipe


def measured_recipe(recipe: Recipe, losses: CacheLosses) -> Recipe:
    """The recipe with the rotation and clipping that lost least at its width; what the recipe states stays.

    The result no longer names the measurement, and decides the same without it.

    Raises:
        PolicyError: the recipe quantizes in other groups than were measured, or states what was not measured.
    """
    how, measured = recipe.quantization, losses.quantization
    settled = replace(recipe, kv_measured=None)
    if how is None or (recipe.kv_rotate is not None and recipe.kv_clip is not None):
        return settled
    if (how.scheme, how.group_size) != (measured.scheme, measured.group_size):
        raise PolicyError(
            f"`kv_measured` has the scheme {measured.scheme} without `kv_group_size`, and this recipe another; give "
            "the same, or state `kv_rotate` and `kv_clip` in place of `kv_measured`"
        )
    try:
        best = losses.best(how.bits, recipe.kv_rotate, recipe.kv_clip)
    except ProfileError as error:
        raise PolicyError(f"`kv_measured`: {error}") from error
    return replace(settled, kv_rotate=best.rotate, kv_clip=best.clip)
