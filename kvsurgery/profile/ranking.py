"""The heads of a profile in order: the scale of their scores, their ranks, and which of them stay full."""

from __future__ import annotations

from typing import Literal

import numpy as np

from kvsurgery.profile.full_heads import full_mask, kv_scores
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.methods import SCORE_METHODS

# shares of streaming heads that a profile is looked at with
SPARSITIES = (0.25, 0.5, 0.75)


def ceiling(method: str, scores: np.ndarray) -> float:
    """The end of the scale from 0: the method's bound, else the largest score, or 1 if all are 0."""
    return SCORE_METHODS[method].most or float(scores.max()) or 1.0


def places(scores: np.ndarray) -> np.ndarray:
    """float64, the shape of `scores`: the place of each among all, 1 = the lowest; equal scores have their mean."""
    _, level, counts = np.unique(scores, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[level].reshape(scores.shape)


def ranks(scores: np.ndarray, eligible: np.ndarray) -> np.ndarray:
    """float64, the shape of `scores`: places of the heads of eligible layers as a share of their number; others 0.

    Args:
        scores: [layers, heads].
        eligible: bool [layers].
    """
    result = np.zeros(scores.shape)
    result[eligible] = places(scores[eligible]) / scores[eligible].size
    return result


def full_heads(
    profile: HeadProfile,
    sparsity: float,
    group_reduce: Literal["mean", "max"] = "mean",
    eligible: np.ndarray | None = None,
) -> np.ndarray:
    """bool [layers, kv_heads]: the heads that `decide` keeps full at a sparsity.

    Args:
        eligible: bool [layers], those without a sliding window of the model's own; by default as the profile says.
    """
    eligible = profile.eligible if eligible is None else eligible
    if not eligible.any():
        return np.zeros((profile.model.layers, profile.model.kv_heads), dtype=bool)
    return full_mask(kv_scores(profile, group_reduce), eligible, {"sparsity": sparsity})


def full_per_layer(profile: HeadProfile, sparsity: float) -> list[int | None]:
    """How many KV heads of each layer stay full at a sparsity; None for a layer that is not eligible."""
    counts = full_heads(profile, sparsity).sum(axis=1).tolist()
    return [count if eligible else None for count, eligible in zip(counts, profile.eligible, strict=True)]
