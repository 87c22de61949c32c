"""`Comparison`: the agreement of two profiles of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from kvsurgery.errors import ProfileError
from kvsurgery.heads.dimensions import attention_name
from kvsurgery.profile.full_heads import full_heads, kv_scores
from kvsurgery.profile.head_profile import Granularity, HeadProfile
from kvsurgery.profile.ranking import SPARSITIES, ceiling, places, ranks


@dataclass(frozen=True)
class Overlap:
    """The KV heads that two profiles keep full at one sparsity.

    Attributes:
        sparsity: share of the KV heads that stream.
        heads: KV heads in the model's full-attention layers.
        full: how many of them each profile keeps full.
        shared: how many of those are the same.
    """

    sparsity: float
    heads: int
    full: int
    shared: int

    @property
    def share(self) -> float:
        """The share of one profile's full heads that the other keeps full too; for a random choice, `chance`."""
        return self.shared / self.full if self.full else 1.0

    @property
    def chance(self) -> float:
        """The mean of `share` if one of the profiles is random."""
        return self.full / self.heads if self.heads else 1.0

    @property
    def jaccard(self) -> float:
        """The Jaccard index: shared heads over all heads that either profile keeps full."""
        return self.shared / (2 * self.full - self.shared) if self.full else 1.0


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two profiles of one model, head by head.

    Attributes:
        profiles: A and B.
        granularity: the heads of `values`: query heads if both profiles score them, else KV heads.
        group_reduce: how scores of a group's query heads became the score of their KV head; None if there were none.
        unit: the unit of `values`: scores for one method; ranks for two methods, whose scores have no common scale.
        values: float64 [2, layers, heads].
        spearman: rank correlation of the scores of heads in full-attention layers, ties averaged; None where a profile
            scores all of them alike.
        overlaps: of the full heads, by sparsity.
        eligible: bool [layers], the layers with full attention, as far as the profiles say; only their heads count.
    """

    profiles: tuple[HeadProfile, HeadProfile]
    granularity: Granularity
    group_reduce: Literal["mean", "max"] | None
    unit: Literal["score", "rank"]
    values: np.ndarray
    spearman: float | None
    overlaps: tuple[Overlap, ...]
    eligible: np.ndarray

    @property
    def ceiling(self) -> float:
        """The upper end of the scale for the values of both profiles, which starts at 0."""
        return ceiling(self.profiles[0].method, self.values) if self.unit == "score" else 1.0

    @property
    def difference(self) -> np.ndarray:
        """float64 [layers, heads]: B - A."""
        return self.values[1] - self.values[0]

    @property
    def layer_differences(self) -> np.ndarray:
        """float64 [layers]: mean absolute difference over the heads of a layer."""
        return np.abs(self.difference).mean(axis=1)

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain JSON values."""
        names = ("base_model", "base_revision", "method", "granularity", "sink", "recent", "hash")
        return {
            **{
                label: {name: getattr(profile, name) for name in names}
                for label, profile in zip("ab", self.profiles, strict=True)
            },
            "model": asdict(self.profiles[0].model),
            "granularity": self.granularity,
            "group_reduce": self.group_reduce,
            "spearman": self.spearman,
            "overlap": [
                {**asdict(overlap), "share": overlap.share, "chance": overlap.chance, "jaccard": overlap.jaccard}
                for overlap in self.overlaps
            ],
            "unit": self.unit,
            "layer_differences": self.layer_differences.tolist(),
            "difference": self.difference.tolist(),
        }


def compare(a: HeadProfile, b: HeadProfile, group_reduce: Literal["mean", "max"] = "mean") -> Comparison:
    """Compare two profiles, by KV heads if only one of them scores query heads.

    Args:
        a, b: profiles of models of the same dimensions.
        group_reduce: how query-head scores become a KV-head score; full heads are always KV heads.

    Raises:
        ProfileError: the models differ, or a profile has no scores.
        PolicyError: `group_reduce` is neither mean nor max.
    """
    granularity, scores = common_scores((a, b), group_reduce)
    eligible = replace(a, windows=common_windows((a, b))).eligible
    unit = "score" if a.method == b.method else "rank"
    queries = "query" in (a.granularity, b.granularity)
    return Comparison(
        profiles=(a, b),
        granularity=granularity,
        group_reduce=group_reduce if queries else None,
        unit=unit,
        values=np.array(
            scores if unit == "score" else [ranks(profile_scores, eligible) for profile_scores in scores],
            dtype=np.float64,
        ),
        spearman=_spearman(*(profile_scores[eligible] for profile_scores in scores)),
        overlaps=tuple(_overlap(a, b, sparsity, group_reduce, eligible) for sparsity in SPARSITIES),
        eligible=eligible,
    )


def common_scores(
    profiles: Sequence[HeadProfile], group_reduce: Literal["mean", "max"] = "mean"
) -> tuple[Granularity, list[np.ndarray]]:
    """The scores of each profile, float32 [layers, heads], of query heads if all have them, else of KV heads.

    Raises:
        ProfileError: the profiles are of models of different dimensions, or one has no scores.
        PolicyError: `group_reduce` is neither mean nor max.
    """
    for profile in profiles:
        if profile.scores is None:
            raise ProfileError(
                f"the {profile.method} profile of {profile.base_model} has embedding heads and no scores to compare or "
                "merge; leave it out"
            )
    first_profile = profiles[0]
    for profile in profiles[1:]:
        if profile.model != first_profile.model:
            first_dimensions = asdict(first_profile.model)
            dimensions = asdict(profile.model)
            differences = ", ".join(
                f"{name} {first_dimensions[name]} and {dimensions[name]}"
                for name in first_dimensions
                if first_dimensions[name] != dimensions[name]
            )
            raise ProfileError(
                f"{first_profile.base_model} and {profile.base_model} are different models ({differences}); "
                "give profiles of one model"
            )
    if all(profile.granularity == "query" for profile in profiles):
        return "query", [profile.head_scores for profile in profiles]
    return "kv", [kv_scores(profile, group_reduce) for profile in profiles]


def common_windows(profiles: Sequence[HeadProfile]) -> tuple[int | None, ...] | None:
    """The sliding windows of the model's layers, from the profiles that record them; None if no profile does.

    Raises:
        ProfileError: the profiles contradict each other.
    """
    models_by_windows = {profile.windows: profile.base_model for profile in profiles if profile.windows is not None}
    if len(models_by_windows) > 1:
        [(first_windows, first_model), (second_windows, second_model), *_] = models_by_windows.items()
        layer = next(
            layer for layer, pair in enumerate(zip(first_windows, second_windows, strict=True)) if pair[0] != pair[1]
        )
        raise ProfileError(
            f"{first_model} and {second_model} are different models: layer {layer} has "
            f"{attention_name(first_windows[layer])} in one and {attention_name(second_windows[layer])} in the other; "
            "give profiles of one model"
        )
    return next(iter(models_by_windows), None)


def _spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Spearman's rank correlation of scores; None if all scores of a profile are equal."""
    mean_place = (a.size + 1) / 2
    x = places(a).ravel() - mean_place
    y = places(b).ravel() - mean_place
    spread = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / spread) if spread else None


def _overlap(
    a: HeadProfile, b: HeadProfile, sparsity: float, group_reduce: Literal["mean", "max"], eligible: np.ndarray
) -> Overlap:
    full_a = full_heads(a, sparsity, group_reduce, eligible)
    full_b = full_heads(b, sparsity, group_reduce, eligible)
    return Overlap(sparsity, int(eligible.sum()) * a.model.kv_heads, int(full_a.sum()), int((full_a & full_b).sum()))
