"""The scale of a profile's scores, and the ranks of its heads."""

from __future__ import annotations

import numpy as np

from kvsurgery.profile.methods import SCORE_METHODS

# shares of streaming heads that a profile is looked at with
SPARSITIES = (0.25, 0.5, 0.75)


def ceiling(method: str, scores: np.ndarray) -> float:
    """The end of the scale from 0: the method's bound, else the largest score, or 1 if all are 0."""
    return SCORE_METHODS[method].most or float(scores.max()) or 1.0


def shown(method: str, scores: np.ndarray) -> tuple[np.ndarray, float, str]:
    """What a heat map of ten levels shows.

    Where most scores of a method of importance lie in the lowest tenth, a map of the scores would show a few heads and
    nothing else; a value is then the share of heads that score less.

    Returns:
        Values in the shape of the scores, the end of the scale from 0, and what a value is.
    """
    scale_end = ceiling(method, scores)
    if SCORE_METHODS[method].kind == "importance" and np.median(scores) < scale_end / 10:
        return np.searchsorted(np.sort(scores, axis=None), scores) / scores.size, 1.0, "share of heads that score less"
    return scores, scale_end, "score"


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
