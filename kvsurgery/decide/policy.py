"""`Policy`: what every KV head of a model becomes. Pure arithmetic, deterministic, ties broken by place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import numpy as np
from blake3 import blake3

from kvsurgery.dimensions import ModelDimensions
from kvsurgery.errors import PolicyError
from kvsurgery.score.profile import HeadProfile

# far beyond any context, and sums of positions still fit 32 bits
MAX_WINDOW = 1 << 30


@dataclass(frozen=True)
class LayerPolicy:
    """One layer: its KV heads in their order after surgery, full heads first.

    Attributes:
        order: source KV head at each place; inside a group the source's order.
        full: how many of them keep every token; the others stream.
        sink, recent: tokens that a streaming head of this layer sees.
        native: the model's own sliding-window layer: streams with sink 0, not eligible, not counted.
    """

    order: tuple[int, ...]
    full: int
    sink: int
    recent: int
    native: bool = False


@dataclass(frozen=True)
class Policy:
    """Layer policies and the options they came from. The mask is stored, never a threshold."""

    layers: tuple[LayerPolicy, ...]
    options: dict[str, Any]

    @cached_property
    def hash(self) -> str:
        """BLAKE3 of the canonical JSON of the layers."""
        layers = [asdict(layer) for layer in self.layers]
        return blake3(json.dumps(layers, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def eligible(self) -> int:
        """KV heads in full-attention layers."""
        return sum(len(layer.order) for layer in self.layers if not layer.native)

    @property
    def streaming(self) -> int:
        """KV heads in full-attention layers that stream."""
        return sum(len(layer.order) - layer.full for layer in self.layers if not layer.native)


def decide(
    profile: HeadProfile,
    windows: Sequence[int | None],
    *,
    sparsity: float | None = None,
    threshold: float | None = None,
    full_heads: int | None = None,
    sink: int = 64,
    recent: int = 256,
    group_reduce: Literal["mean", "max"] = "mean",
) -> Policy:
    """Choose the full heads: exactly so many of the highest scores, then the earlier layer, then the earlier head.

    Args:
        profile: scores per KV or query head; query heads are reduced over their group.
        windows: per layer, the model's own sliding window in tokens, or None for full attention.
        sparsity: streaming share S of the N KV heads in full-attention layers; exactly round(S x N) heads stream,
            halves to the even count. Default 0.5 for GQA, 0.75 for MHA (DuoAttention, Xiao et al. 2024, section 3.1).
        threshold: instead, full heads are those with score >= threshold.
        full_heads: instead, how many heads stay full over the model.
        sink, recent: tokens that a streaming head sees.
        group_reduce: how query-head scores become a KV-head score.

    Raises:
        PolicyError: options exclude each other or are out of range, or no layer has full attention.
    """
    given = {"sparsity": sparsity, "threshold": threshold, "full_heads": full_heads}
    chosen = {name: value for name, value in given.items() if value is not None}
    if len(chosen) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in chosen)
        raise PolicyError(f"{flags} exclude each other; give one")
    if sink < 0 or recent < 1:
        raise PolicyError(f"--sink must be >= 0 and --recent >= 1, got {sink} and {recent}")
    if sink + recent > MAX_WINDOW:
        raise PolicyError(f"--sink and --recent together are at most {MAX_WINDOW} tokens, got {sink} and {recent}")
    if len(windows) != profile.model.layers:
        raise PolicyError(f"the profile has {profile.model.layers} layers, the model {len(windows)}")
    eligible = np.array([window is None for window in windows])
    if not eligible.any():
        raise PolicyError("every layer of this model has a sliding window already; there is nothing to convert")

    scores = kv_scores(profile, group_reduce)
    heads = int(eligible.sum()) * profile.model.kv_heads
    if not chosen:
        chosen = {"sparsity": 0.75 if profile.model.group == 1 else 0.5}
    mask = _full_mask(scores, eligible, heads, chosen)
    layers = tuple(
        LayerPolicy(tuple(range(profile.model.kv_heads)), 0, 0, window, native=True)
        if window is not None
        else LayerPolicy((*np.flatnonzero(row).tolist(), *np.flatnonzero(~row).tolist()), int(row.sum()), sink, recent)
        for row, window in zip(mask, windows, strict=True)
    )
    options = {**chosen, "method": profile.method, "sink": sink, "recent": recent}
    if profile.granularity == "query":
        options["group_reduce"] = group_reduce
    return Policy(layers, options)


def keep_all(model: ModelDimensions, windows: Sequence[int | None]) -> Policy:
    """The policy that changes nothing: every eligible head full, in its place."""
    order = tuple(range(model.kv_heads))
    layers = (
        LayerPolicy(order, len(order), 0, 1) if window is None else LayerPolicy(order, 0, 0, window, native=True)
        for window in windows
    )
    return Policy(tuple(layers), {"full_heads": "all"})


def kv_scores(profile: HeadProfile, reduce: Literal["mean", "max"] = "mean") -> np.ndarray:
    """float32 [layers, kv_heads]: scores per KV head, query heads reduced over their group.

    Raises:
        PolicyError: `reduce` is neither mean nor max.
    """
    if reduce not in ("mean", "max"):
        raise PolicyError(f"--group-reduce is mean or max, got {reduce!r}")
    if profile.granularity == "kv":
        return profile.scores
    groups = profile.scores.reshape(profile.model.layers, profile.model.kv_heads, profile.model.group)
    # float64 sums of a few float32 are exact in practice: equal means tie whatever the order in the group
    return groups.mean(-1, dtype=np.float64).astype(np.float32) if reduce == "mean" else groups.max(-1)


def _full_mask(scores: np.ndarray, eligible: np.ndarray, heads: int, chosen: dict[str, float]) -> np.ndarray:
    """bool [layers, kv_heads]: the full heads."""
    [(how, value)] = chosen.items()
    if how == "threshold":
        if not np.isfinite(value):
            raise PolicyError(f"--threshold must be finite, got {value}")
        # in the precision of the scores: a score of 0.3 reaches a threshold of 0.3
        with np.errstate(over="ignore"):
            return (scores >= np.float32(value)) & eligible[:, None]
    if how == "sparsity":
        if not 0 <= value <= 1:
            raise PolicyError(f"--sparsity lies in [0, 1], got {value}")
        # of the number as written: 0.575 of 100 heads is 57.5, in floats 57.49999999999999
        full = heads - round(Fraction(str(value)) * heads)
    else:
        full = value
        if not 0 <= full <= heads:
            raise PolicyError(f"--full-heads lies in [0, {heads}] for this model, got {full}")
    ranked = np.where(eligible[:, None], scores, -np.inf)
    # stable on the negated scores: equal scores go to the earlier layer, then the earlier head
    mask = np.zeros(scores.size, dtype=bool)
    mask[np.argsort(-ranked, axis=None, kind="stable")[:full]] = True
    return mask.reshape(scores.shape)
