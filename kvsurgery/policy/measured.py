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
    quantization, measured_quantization = recipe.quantization, losses.quantization
    unmeasured_recipe = replace(recipe, kv_measured=None)
    if quantization is None or (recipe.kv_rotate is not None and recipe.kv_clip is not None):
        return unmeasured_recipe
    if (quantization.scheme, quantization.group_size) != (
        measured_quantization.scheme,
        measured_quantization.group_size,
    ):
        raise PolicyError(
            f"`kv_measured` has the scheme {measured_quantization.scheme} without `kv_group_size`, and this "
            "recipe another; give the same, or state `kv_rotate` and `kv_clip` in place of `kv_measured`"
        )
    try:
        best_setting = losses.best(quantization.bits, recipe.kv_rotate, recipe.kv_clip)
    except ProfileError as error:
        raise PolicyError(f"`kv_measured`: {error}") from error
    return replace(unmeasured_recipe, kv_rotate=best_setting.rotate, kv_clip=best_setting.clip)
