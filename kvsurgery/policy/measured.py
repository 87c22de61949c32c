"""What a measurement of a model's caches decides of how they are quantized."""

from __future__ import annotations

from dataclasses import replace

from kvsurgery.errors import PolicyError, ProfileError
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.recipe import Cache


def measured_cache(cache: Cache, losses: CacheLosses) -> Cache:
    """The cache with the rotation and clipping that lost least at its width; what it states stays.

    The result no longer names the measurement, and decides the same without it.

    Raises:
        PolicyError: the cache is quantized in other groups than were measured, or states what was not measured.
    """
    quantization, measured_quantization = cache.quantization, losses.quantization
    unmeasured_cache = replace(cache, measured=None)
    if quantization is None or (cache.rotate is not None and cache.clip is not None):
        return unmeasured_cache
    if (quantization.scheme, quantization.group_size) != (
        measured_quantization.scheme,
        measured_quantization.group_size,
    ):
        raise PolicyError(
            f"`cache.measured` has the scheme {measured_quantization.scheme} without `cache.group_size`, and this "
            "recipe another; give the same, or state `cache.rotate` and `cache.clip` in place of `cache.measured`"
        )
    try:
        best_setting = losses.best(quantization.bits, cache.rotate, cache.clip)
    except ProfileError as error:
        raise PolicyError(f"`cache.measured`: {error}") from error
    return replace(unmeasured_cache, rotate=best_setting.rotate, clip=best_setting.clip)
