"""The scale of a profile's scores, and the ranks of its heads."""

from __future__ import annotations

import numpy as np

from kvsurgery.profile.methods import SCORE_METHODS

# shares of streaming heads that a profile is looked at with
SPARSITIES = (0.25, 0.5, 0.75)


def ceiling(method: str, scores: np.ndarray) -> float:
    """The upper end of the scale: the method's bound, else the largest score, or 1 if all scores are 0."""
    return SCORE_METHODS[method].most or float(scores.max()) or 1.0


def shown(method: str, scores: np.ndarray) -> tuple[np.ndarray, float, str]:
    """The values for a heat map of ten levels: scores, or ranks if most scores are small.

    If most importance scores are in the lowest tenth, a map of the scores would show only a few heads. Each value is
    then the share of heads with a lower score.

    Returns:
        Values in the shape of the scores, the upper end of their scale, and the meaning of a value.
    """
    scale_end = ceiling(method, scores)
    if SCORE_METHODS[method].kind == "importance" and np.median(scores) < scale_end / 10:
        return np.searchsorted(np.sort(scores, axis=None), scores) / scores.size, 1.0, "share of heads that score less"
    return scores, scale_end, "score"


def places(scores: np.ndarray) -> np.ndarray:
    """float64, the shape of `scores`: the rank of each score, 1 = the lowest; ties have their mean rank."""
    _, level, counts = np.unique(scores, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[level].reshape(scores.shape)


def ranks(scores: np.ndarray, eligible: np.ndarray) -> np.ndarray:
    """float64, the shape of `scores`: ranks of the heads of eligible layers divided by their number; other heads are 0.

    Args:
        scores: [layers, heads].
        eligible: bool [layers].
    """
    result = np.zeros(scores.shape)
    result[eligible] = places(scores[eligible]) / scores[eligible].size
    return result
