"""`Policy`: what every KV head of a model becomes. Pure arithmetic, deterministic, ties broken by place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
from blake3 import blake3

from kvsurgery.decide.blocks import arrange, check_blocks
from kvsurgery.decide.budgets import allocate_budgets
from kvsurgery.decide.mask import best_heads, full_mask
from kvsurgery.errors import PolicyError
from kvsurgery.score.profile import HeadProfile
from kvsurgery.templates.kv_layout import TILE, Quantisation, Selection
from kvsurgery.templates.kv_reform import Reform

# far beyond any context, and sums of positions still fit 32 bits
MAX_WINDOW = 1 << 30
SNAPKV = Selection()


@dataclass(frozen=True)
class LayerPolicy:
    """One layer: its KV heads in their order after surgery, full heads first.

    Attributes:
        order: source KV head at each place; inside a group the source's order.
        full: how many of them keep every token; the others stream, or have a budget.
        sink, recent: tokens that a streaming head of this layer sees.
        native: the model's own sliding-window layer: streams with sink 0, not eligible, not counted.
        budgets: of the prompt, the tokens that each of the others keeps; None where they stream.
        blocks: for tensor parallelism, of each block how many heads are full and how many are not, block after block;
            empty where all heads are one.
    """

    order: tuple[int, ...]
    full: int
    sink: int = 0
    recent: int = 1
    native: bool = False
    budgets: tuple[int, ...] | None = None
    blocks: tuple[tuple[int, int], ...] = ()

    @property
    def full_heads(self) -> tuple[int, ...]:
        """Source heads that keep every token, by place."""
        places, blocks = iter(self.order), self.blocks or ((self.full, len(self.order) - self.full),)
        return tuple(head for full, others in blocks for head in [*islice(places, full + others)][:full])


@dataclass(frozen=True)
class Policy:
    """Layer policies and the options they came from. The mask is stored, never a threshold.

    `rounded` is how many more heads are full than the options ask for, so that blocks can be alike.
    """

    layers: tuple[LayerPolicy, ...]
    options: dict[str, Any]
    selection: Selection | None = None
    quantisation: Quantisation | None = None
    reform: Reform | None = None
    rounded: int = 0

    @cached_property
    def hash(self) -> str:
        """BLAKE3 of the canonical JSON of the layers, and of how budgeted heads select, the cache is quantised and long
        prompts are read."""
        layers = [
            {key: value for key, value in asdict(layer).items() if value or key != "blocks"} for layer in self.layers
        ]
        content = [layers, self.selection and asdict(self.selection)]
        content += [asdict(part) for part in (self.quantisation, self.reform) if part]
        return blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def eligible(self) -> int:
        """KV heads in full-attention layers."""
        return sum(len(layer.order) for layer in self.layers if not layer.native)

    @property
    def full(self) -> int:
        """KV heads in full-attention layers that keep every token."""
        return sum(layer.full for layer in self.layers if not layer.native)

    @property
    def streaming(self) -> int:
        """KV heads in full-attention layers that stream."""
        layers = (layer for layer in self.layers if not layer.native and layer.budgets is None)
        return sum(len(layer.order) - layer.full for layer in layers)

    @property
    def budgeted(self) -> int:
        """KV heads that have a budget."""
        return sum(len(layer.budgets or ()) for layer in self.layers)


def decide(
    profile: HeadProfile,
    windows: Sequence[int | None],
    *,
    sparsity: float | None = None,
    threshold: float | None = None,
    full_heads: int | None = None,
    rest: Literal["streaming", "budgeted"] | None = None,
    sink: int = 64,
    recent: int = 256,
    budget: int | None = None,
    beta: float = 1.2,
    selection: Selection = SNAPKV,
    quantisation: Quantisation | None = None,
    group_reduce: Literal["mean", "max"] = "mean",
    tp: int = 1,
    tp_uneven: bool = False,
) -> Policy:
    """Choose the full heads: exactly so many of the highest scores, then the earlier layer, then the earlier head.

    With several blocks, every layer has a multiple of `tp` full heads: their number is rounded to such a multiple over
    the model, halves up, and of all choices of so many the one with the largest sum of scores is taken.

    Args:
        profile: scores per KV or query head; query heads are reduced over their group. Without scores, all are full.
        windows: per layer, the model's own sliding window in tokens, or None for full attention.
        sparsity: share S of the N KV heads in full-attention layers that are not full; exactly round(S x N), halves to
            the even count. Default 0.5 for GQA, 0.75 for MHA (DuoAttention, Xiao et al. 2024, section 3.1); 1 where the
            rest has budgets.
        threshold: instead, full heads are those with score >= threshold.
        full_heads: instead, how many heads stay full over the model.
        rest: what the other heads are; by default budgeted after a HeadKV profile, else streaming.
        sink, recent: tokens that a streaming head sees.
        budget: tokens of the prompt that a budgeted head keeps, mean over the budgeted heads.
        beta: how the budget is spread by score, as `allocate_budgets` takes it.
        selection: how a budgeted head chooses.
        quantisation: how heads store all but their newest tokens; None: in the model's dtype.
        group_reduce: how query-head scores become a KV-head score.
        tp: blocks that a layer's heads are stored in, as `arrange` orders them, for so many processes of tensor
            parallelism or a divisor of that.
        tp_uneven: let blocks differ in how many of their heads are full, and keep exactly the heads that are asked for.

    Raises:
        PolicyError: options exclude each other, are out of range or need scores that the profile has not, or no layer
            has full attention.
    """
    given = {"sparsity": sparsity, "threshold": threshold, "full_heads": full_heads}
    chosen = {name: value for name, value in given.items() if value is not None}
    if len(chosen) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in chosen)
        raise PolicyError(f"{flags} exclude each other; give one")
    if len(windows) != profile.model.layers:
        raise PolicyError(f"the profile has {profile.model.layers} layers, the model {len(windows)}")
    eligible = np.array([window is None for window in windows])
    if (unmeasured := np.flatnonzero(eligible & ~profile.eligible)).size:
        raise PolicyError(
            f"layer {unmeasured[0]} has full attention in this model and a sliding window in the profile's, "
            f"{profile.base_model}; measure this model: kvsurgery profile compute"
        )
    if not eligible.any():
        raise PolicyError("every layer of this model has a sliding window already; there is nothing to convert")
    check_blocks(tp, profile.model.kv_heads)
    parallel = {"tp": tp, **({"tp_uneven": True} if tp_uneven else {})} if tp > 1 else {}
    if profile.scores is None:
        if chosen or rest or budget is not None:
            raise PolicyError(
                f"a {profile.method} profile has embedding heads and no scores to choose full heads by: every head "
                "stays full; give a profile with scores beside it"
            )
        layers = _layers(np.ones((len(windows), profile.model.kv_heads), bool), None, tp)
        policy = Policy(with_native(layers, windows), {"method": profile.method, **parallel})
        return policy if quantisation is None else _quantised(policy, quantisation, profile.model.head_dim)
    rest = rest or usual_rest(profile)
    if not chosen and rest == "streaming":
        chosen = {"sparsity": 0.75 if profile.model.group == 1 else 0.5}

    scores = kv_scores(profile, group_reduce)
    mask = asked = full_mask(scores, eligible, chosen or {"full_heads": 0})
    if tp > 1 and not tp_uneven:
        mask = best_heads(scores, eligible, (2 * int(asked.sum()) + tp) // (2 * tp), tp)
    rounded = int(mask.sum() - asked.sum())
    options = {**chosen, "method": profile.method, "rest": rest, **parallel}
    if profile.granularity == "query":
        options["group_reduce"] = group_reduce
    if rest == "streaming":
        _check_streaming(sink, recent, budget)
        layers = _layers(mask, None, tp, sink, recent)
        policy = Policy(with_native(layers, windows), {**options, "sink": sink, "recent": recent}, rounded=rounded)
    else:
        _check_selection(budget, selection)
        budgets = np.zeros(scores.shape, dtype=np.int64)
        others = ~mask & eligible[:, None]
        budgets[others] = allocate_budgets(scores[others], budget, beta)
        layers = _layers(mask, budgets, tp)
        options |= {"budget": budget, "beta": beta, **asdict(selection)}
        policy = Policy(with_native(layers, windows), options, selection, rounded=rounded)
    return policy if quantisation is None else _quantised(policy, quantisation, profile.model.head_dim)


def usual_rest(profile: HeadProfile) -> Literal["streaming", "budgeted"]:
    """What heads that are not full become, unless it is said."""
    return "budgeted" if profile.method.startswith("headkv") else "streaming"


def _quantised(policy: Policy, quantisation: Quantisation, head_dim: int) -> Policy:
    """The policy with a quantised cache."""
    try:
        quantisation.check(head_dim)
    except ValueError as error:
        raise PolicyError(f"--kv-bits: {error}") from error
    least = 2 * (quantisation.residual + TILE)
    windows = [layer.recent for layer in policy.layers if layer.native]
    windows += [policy.options["recent"]] if "recent" in policy.options else []
    if quantisation.streaming and windows and max(windows) < least:
        raise PolicyError(
            f"--kv-streaming is for windows of {least} tokens or more, twice what stays as it is, and the longest has "
            f"{max(windows)}; leave it out"
        )
    if not policy.full + policy.budgeted and not quantisation.streaming:
        raise PolicyError("--kv-bits is for full and budgeted heads, and this policy has none; leave it out")
    said = {name: value for name, value in asdict(quantisation).items() if value is not None and value is not False}
    options = {f"kv_{name}": value for name, value in said.items()}
    return replace(policy, options=policy.options | options, quantisation=quantisation)


def _layers(
    full: np.ndarray, budgets: np.ndarray | None, blocks: int, sink: int = 0, recent: int = 1
) -> list[LayerPolicy]:
    """Layers of which these heads are full, bool [layers, kv_heads], and the others stream or keep so much."""
    result = []
    for layer, (order, counts) in enumerate(arrange(full, budgets, blocks)):
        keep = None if budgets is None else tuple(int(budgets[layer, head]) for head in order if not full[layer, head])
        own = counts if blocks > 1 else ()
        result.append(LayerPolicy(order, int(full[layer].sum()), sink, recent, budgets=keep, blocks=own))
    return result


def with_native(layers: Sequence[LayerPolicy], windows: Sequence[int | None]) -> tuple[LayerPolicy, ...]:
    """The layers, but for those with a sliding window of the model's own, which stay as they are."""
    return tuple(
        layer if window is None else _native(len(layer.order), window, len(layer.blocks))
        for layer, window in zip(layers, windows, strict=True)
    )


def _native(heads: int, window: int, blocks: int) -> LayerPolicy:
    return LayerPolicy(
        tuple(range(heads)), 0, 0, window, native=True, blocks=((0, heads // blocks),) * blocks if blocks else ()
    )


def _check_streaming(sink: int, recent: int, budget: int | None) -> None:
    if sink < 0 or recent < 1:
        raise PolicyError(f"--sink must be >= 0 and --recent >= 1, got {sink} and {recent}")
    if sink + recent > MAX_WINDOW:
        raise PolicyError(f"--sink and --recent together are at most {MAX_WINDOW} tokens, got {sink} and {recent}")
    if budget is not None:
        raise PolicyError("--budget is for budgeted heads; add --rest budgeted, or leave it out")


def _check_selection(budget: int | None, selection: Selection) -> None:
    if budget is None:
        raise PolicyError(
            "--budget is missing: tokens that a budgeted head keeps of a prompt; or give --rest streaming"
        )
    if not 1 <= selection.window <= MAX_WINDOW:
        raise PolicyError(f"--window lies in [1, {MAX_WINDOW}], got {selection.window}")
    if not 1 <= selection.kernel_size <= MAX_WINDOW or selection.kernel_size % 2 == 0:
        raise PolicyError(f"--kernel-size must be odd and in [1, {MAX_WINDOW}], got {selection.kernel_size}")
    if selection.pool not in ("max", "avg"):
        raise PolicyError(f"--pool is max or avg, got {selection.pool!r}")


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
