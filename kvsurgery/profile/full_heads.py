"""Select the KV heads that stay full, by their scores."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

import numpy as np

from kvsurgery.errors import PolicyError
from kvsurgery.profile.head_profile import HeadProfile


def full_heads(
    profile: HeadProfile,
    sparsity: float,
    group_reduce: Literal["mean", "max"] = "mean",
    eligible: np.ndarray | None = None,
) -> np.ndarray:
    """bool [layers, kv_heads]: the heads that `decide` keeps full at a sparsity.

    Args:
        eligible: bool [layers], layers without a sliding window of the model's own; by default the profile's.
    """
    eligible = profile.eligible if eligible is None else eligible
    if not eligible.any():
        return np.zeros((profile.model.layers, profile.model.kv_heads), dtype=bool)
    return full_mask(kv_scores(profile, group_reduce), eligible, {"sparsity": sparsity})


def full_per_layer(profile: HeadProfile, sparsity: float) -> list[int | None]:
    """The number of KV heads of each layer that stay full at a sparsity; None for a layer that is not eligible."""
    counts = full_heads(profile, sparsity).sum(axis=1).tolist()
    return [count if eligible else None for count, eligible in zip(counts, profile.eligible, strict=True)]


def full_mask(scores: np.ndarray, eligible: np.ndarray, choice: dict[str, float]) -> np.ndarray:
    """Select the full heads for `sparsity`, `threshold` or `full_heads`: bool [layers, kv_heads].

    Args:
        scores: [layers, kv_heads].
        eligible: bool [layers], those with full attention.
        choice: one of `sparsity`, `threshold` and `full_heads`, as in `decide`.

    Raises:
        PolicyError: the value is out of range.
    """
    [(option, value)] = choice.items()
    heads = int(eligible.sum()) * scores.shape[1]
    if option == "threshold":
        # in the precision of the scores: a score of 0.3 reaches a threshold of 0.3
        with np.errstate(over="ignore"):
            return (scores >= np.float32(value)) & eligible[:, None]
    if option == "sparsity":
        if not 0 <= value <= 1:
            raise PolicyError(f"`sparsity` must lie in [0, 1], got {value}")
        # of the number as written: 0.575 of 100 heads is 57.5, in floats 57.49999999999999
        full_count = heads - round(Fraction(str(value)) * heads)
    else:
        full_count = int(value)
        if not 0 <= full_count <= heads:
            raise PolicyError(f"`full_heads` must lie in [0, {heads}] for this model, got {full_count}")
    return best_heads(scores, eligible, full_count)


def best_heads(scores: np.ndarray, eligible: np.ndarray, count: int, size: int = 1) -> np.ndarray:
    """bool [layers, kv_heads]: the best `count * size` heads, a multiple of `size` in every layer."""
    chosen_mask = np.zeros(scores[eligible].shape, dtype=bool)
    chosen_mask.flat[ranked_heads(scores[eligible], size)[: count * size]] = True
    mask = np.zeros(scores.shape, dtype=bool)
    mask[eligible] = chosen_mask
    return mask


def ranked_heads(scores: np.ndarray, size: int = 1) -> np.ndarray:
    """Rank heads in runs of `size` per layer, the best first, by their index in the flattened [layers, kv_heads].

    A layer's heads, the best first, are cut into runs with descending sums. Therefore the best runs of the model are
    the first ones of each layer, and no other choice of the same number of heads has a larger sum.
    """
    # stable on the negated scores: equal scores go to the earlier layer, then the earlier head
    order = np.argsort(-scores, axis=1, kind="stable")
    sums = np.take_along_axis(scores, order, 1).reshape(len(scores), -1, size).sum(2, dtype=np.float64)
    places = order + scores.shape[1] * np.arange(len(scores))[:, None]
    return places.reshape(-1, size)[np.argsort(-sums, axis=None, kind="stable")].ravel()


def unit_scores(scores: np.ndarray, unit: int) -> np.ndarray:
    """[layers, kv_heads]: in place of the scores of `unit` neighbors, their mean, so that they are chosen together."""
    means = scores.reshape(len(scores), -1, unit).mean(-1, dtype=np.float64)
    return means.astype(scores.dtype).repeat(unit, axis=1)


def kv_scores(
    profile: HeadProfile, reduce: Literal["mean", "max"] = "mean", sources: Mapping[int, int] | None = None
) -> np.ndarray:
    """float32 [layers, kv_heads]: scores per KV head; scores of query heads are reduced over their group.

    If later layers share the KV cache of a layer (`Model.sources`), its heads have the maximum of all their scores, so
    that a head keeps the tokens that any of its layers needs.

    Raises:
        PolicyError: `reduce` is neither mean nor max.
    """
    if reduce not in ("mean", "max"):
        raise PolicyError(f"`group_reduce` is mean or max, got {reduce!r}")
    if sources:
        scores = kv_scores(profile, reduce).copy()
        np.maximum.at(scores, [*sources.values()], scores[[*sources]])
        return scores
    if profile.granularity == "kv":
        return profile.head_scores
    groups = profile.head_scores.reshape(profile.model.layers, profile.model.kv_heads, profile.model.group)
    # float64 sums of a few float32 are exact in practice: equal means tie whatever the order in the group
    return groups.mean(-1, dtype=np.float64).astype(np.float32) if reduce == "mean" else groups.max(-1)
