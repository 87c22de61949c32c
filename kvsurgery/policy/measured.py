"""What a measurement of a model's caches decides of how they are quantized."""

from __future__ import annotations

from dataclasses import replace

from kvsurgery.errors import PolicyError, ProfileError
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.recipe import Cache
from kvsurgery.templates.kv_layout import NEAREST, QUERIES


def measured_cache(cache: Cache, losses: CacheLosses, blocks: int = 1) -> Cache:
    """The cache with the rotation, clipping and rounding that lost least at its width; what it states stays.

    Unless keys are rounded by the queries, the result no longer names the measurement, and decides the same without it.
    Heads in several blocks are not rounded by the queries; nor are they unasked, where rotation and clipping are
    stated.

    Raises:
        PolicyError: the cache is quantized in other groups than were measured, or states what was not measured or is
            not for several blocks.
    """
    if cache.rounding == QUERIES and blocks > 1:
        raise PolicyError("`cache.rounding` queries cannot be combined with `devices.tp`; leave one of them out")
    quantization, measured_quantization = cache.quantization, losses.quantization
    is_decided = cache.rotate is not None and cache.clip is not None and cache.rounding != QUERIES
    if quantization is None or is_decided:
        return replace(cache, measured=None)
    if (quantization.scheme, quantization.group_size) != (
        measured_quantization.scheme,
        measured_quantization.group_size,
    ):
        raise PolicyError(
            f"`cache.measured` has the scheme {measured_quantization.scheme} without `cache.group_size`, and this "
            "recipe another; give the same, or state `cache.rotate` and `cache.clip` in place of `cache.measured`"
        )
    try:
        rounding = NEAREST if blocks > 1 else cache.rounding
        best_setting = losses.best(quantization.bits, cache.rotate, cache.clip, rounding)
    except ProfileError as error:
        raise PolicyError(f"`cache.measured`: {error}") from error
    choice = {"rotate": best_setting.rotate, "clip": best_setting.clip}
    if best_setting.rounding == QUERIES:  # by factors of the measurement
        return replace(cache, **choice, rounding=QUERIES)
    return replace(cache, **choice, measured=None)
