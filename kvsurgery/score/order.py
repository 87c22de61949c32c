"""The heads of a profile in order: the scale of their scores, their ranks, and which of them stay full."""

from __future__ import annotations

from typing import Literal

import numpy as np

from kvsurgery.decide.policy import decide
from kvsurgery.score.profile import METHODS, HeadProfile

# shares of streaming heads that a profile is looked at with
SPARSITIES = (0.25, 0.5, 0.75)


def ceiling(method: str, scores: np.ndarray) -> float:
    """The end of the scale from 0: the method's bound, else the largest score, or 1 if all are 0."""
    return METHODS[method] or float(scores.max()) or 1.0


def places(scores: np.ndarray) -> np.ndarray:
    """float64, the shape of `scores`: the place of each among all, 1 = the lowest; equal scores have their mean."""
    _, level, counts = np.unique(scores, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[level].reshape(scores.shape)


def ranks(scores: np.ndarray) -> np.ndarray:
    """float64, the shape of `scores`, in (0, 1]: places as a share of their number."""
    return places(scores) / scores.size


def full_heads(profile: HeadProfile, sparsity: float, group_reduce: Literal["mean", "max"] = "mean") -> np.ndarray:
    """bool [layers, kv_heads]: what stays full at a sparsity, if no layer has a sliding window of its own."""
    windows = [None] * profile.model.layers
    policy = decide(profile, windows, sparsity=sparsity, rest="streaming", group_reduce=group_reduce)
    mask = np.zeros((profile.model.layers, profile.model.kv_heads), dtype=bool)
    for row, layer in zip(mask, policy.layers, strict=True):
        row[list(layer.full_heads)] = True
    return mask
