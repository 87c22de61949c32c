"""Merge profiles of one model: by the mean or the maximum of their scores, or by the product of their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from kvsurgery.errors import ProfileError
from kvsurgery.profile.comparison import common_scores, common_windows
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.ranking import ranks
from kvsurgery.version import TOOL


def merge(
    profiles: Sequence[HeadProfile],
    how: Literal["mean", "max", "rank-product"] = "mean",
    *,
    base_model: str | None = None,
    group_reduce: Literal["mean", "max"] = "mean",
) -> HeadProfile:
    """Merge profiles, by query heads if all profiles score them, else by KV heads; their order does not matter.

    `mean` and `max` combine scores, so the profiles must have one method, which the result has too. `rank-product` is
    for any methods: the geometric mean of a head's ranks in (0, 1] (`ranks`), as in rank-product statistics (Breitling
    et al. 2004); the result has the method "rank-product". A score that is high in only one profile counts fully in
    `max`, and least in `rank-product`.

    Args:
        profiles: two or more, of models of the same dimensions.
        how: how the scores of a head are combined.
        base_model: the model that the result names; None for the model that all profiles name.
        group_reduce: how query-head scores become a KV-head score.

    Returns:
        A profile with the sink and recent sizes on which all profiles agree, and the revision on which all profiles of
        `base_model` agree.

    Raises:
        ProfileError: fewer than two profiles, different models, a profile without scores, or scores of
            different methods.
        PolicyError: `group_reduce` is neither mean nor max.
    """
    if len(profiles) < 2:
        raise ProfileError("one profile alone cannot be merged; give two or more")
    # floating-point sums depend on the order
    profiles = sorted(profiles, key=lambda profile: profile.hash)
    granularity, scores = common_scores(profiles, group_reduce)
    windows = common_windows(profiles)
    eligible = replace(profiles[0], windows=windows).eligible
    methods = {profile.method for profile in profiles}
    names = {profile.base_model for profile in profiles}
    if how != "rank-product" and len(methods) > 1:
        raise ProfileError(
            f"scores of {' and '.join(sorted(methods))} have no common scale to take the {how} on; "
            "merge ranks: `how` rank-product"
        )
    fingerprints = {profile.fingerprint for profile in profiles if profile.fingerprint is not None}
    if base_model is None and len(names) > 1:
        raise ProfileError(
            f"the profiles name different models, {' and '.join(sorted(names))}; "
            "if they are the same, name it: `base_model` NAME"
        )
    if base_model is None and len(fingerprints) > 1:
        raise ProfileError(
            f"the profiles were measured on different weights, which are all called {min(names)}; "
            "if these are of one model, name it: `base_model` NAME"
        )
    base_model = base_model or min(names)
    revisions = {profile.base_revision for profile in profiles if profile.base_model == base_model}
    patterns = {(profile.sink, profile.recent) for profile in profiles}
    sink, recent = patterns.pop() if len(patterns) == 1 else (None, None)
    return HeadProfile(
        scores=_merge_scores(np.array(scores, dtype=np.float64), eligible, how),
        method="rank-product" if how == "rank-product" else methods.pop(),
        granularity=granularity,
        base_model=base_model,
        base_revision=revisions.pop() if len(revisions) == 1 else None,
        model=profiles[0].model,
        sink=sink,
        recent=recent,
        provenance=_provenance(profiles, granularity, how, group_reduce),
        windows=windows,
        fingerprint=fingerprints.pop() if len(fingerprints) == 1 and names <= {base_model} else None,
    )


def _merge_scores(scores: np.ndarray, eligible: np.ndarray, how: str) -> np.ndarray:
    """float64 [profiles, layers, heads] -> [layers, heads]; products of ranks are 0 in layers that are not eligible."""
    if how == "max":
        return scores.max(axis=0)
    if how == "mean":
        return scores.mean(axis=0)
    with np.errstate(divide="ignore"):
        return np.exp(np.mean([np.log(ranks(profile_scores, eligible)) for profile_scores in scores], axis=0))


def _provenance(profiles: Sequence[HeadProfile], granularity: str, how: str, group_reduce: str) -> dict[str, Any]:
    names = ("hash", "method", "base_model", "base_revision", "provenance")
    is_reduced = granularity == "kv" and any(profile.granularity == "query" for profile in profiles)
    return {
        "merge": how,
        "sources": [{name: getattr(profile, name) for name in names} for profile in profiles],
        "tool": TOOL,
        **({"group_reduce": group_reduce} if is_reduced else {}),
    }
