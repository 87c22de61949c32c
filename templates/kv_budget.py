"""Budgeted heads: each keeps the tokens of the prompt that its end attends to most, and everything after the prompt.

HeadKV (Fu et al. 2024) gives every head a budget of its own; what a head keeps is chosen as in SnapKV (Li et al. 2024),
per KV head and per sequence. Until the prompt is complete, attention is exact. From then on a budgeted head is a full
head whose rows skip the columns that it dropped.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .kv_heads import SELECTING, HeadGroup, Rows, SelectingHeads, on_device
from .kv_layout import EVERY, VALUE_NORM, LayerLayout, Selection
from .kv_tiles import head_group
from .kv_torch import Scoring, attention_received


class BudgetedHeads(SelectingHeads):
    """One layer's budgeted heads, which select once, at the end of the prompt."""

    def __init__(self, states: torch.Tensor, layout: LayerLayout, prompt: int):
        assert layout.selection is not None  # as there are budgets
        self.budgets, self.selection, self.prompt = layout.budgets, layout.selection, prompt
        self.start = prompt - min(self.selection.window, prompt)  # the first column that all heads keep
        quantization = layout.quantization if layout.quantized_budgets else None
        self.groups = [head_group(states, 1, quantization) for _ in self.budgets]
        for group, budget in zip(self.groups, self.budgets, strict=True):
            group.least = self.start - min(budget, self.start)
        self.waiting = HeadGroup(states, len(self.budgets))
        self.observed: torch.Tensor | None = None  # queries [batch, query_heads, <= window, head_dim]

    @property
    def nbytes(self) -> int:
        return self.waiting.nbytes

    def take_rows(self, rows: Rows) -> None:
        self.waiting.keys, self.waiting.values = rows(self.waiting.keys), rows(self.waiting.values)
        if self.observed is not None:
            self.observed = rows(self.observed)

    def remember(self, importance: torch.Tensor, chosen: torch.Tensor) -> None:
        """Keep the importance of what was chosen, if later selections add to it: float32 [batch, heads, places], and
        places that are, with those that are no choice at the end, in the order of slots."""

    def oldest(self, settled: int) -> int:
        return self.start

    @torch.inference_mode(False)
    @torch.no_grad()
    def wait(self, column: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.waiting.slots:
            states = (part.new_zeros(*part.shape[:2], self.prompt, part.shape[3]) for part in (keys, values))
            self.waiting.keys, self.waiting.values = states
        self.waiting.write(slice(None), column, keys, values)

    @torch.no_grad()
    def observe(self, column: int, query: torch.Tensor) -> None:
        last = query[:, :, max(self.start - column, 0) :]
        self.observed = last.clone() if self.observed is None else torch.cat([self.observed, last], 2)

    @torch.inference_mode(False)
    @torch.no_grad()
    def select(self, keys: torch.Tensor, values: torch.Tensor, pads: Sequence[int], scoring: Scoring) -> torch.Tensor:
        assert self.observed is not None  # the prompt has been asked
        rows, device = pads or [0] * len(keys), keys.device
        counts = [[max(min(budget, self.start - pad), 0) for budget in self.budgets] for pad in rows]
        padding = on_device(rows, device)[:, None, None]
        window = torch.arange(self.start, self.prompt, device=device).expand(len(keys), len(self.budgets), -1)
        kept = window.where(window >= padding, EVERY)
        if any(map(any, counts)):
            received = attention_received(self.observed, keys, padding, scoring)
            importance = weighted(received, values, self.selection)[..., : self.start]
            chosen = most_important(importance, padding, counts, self.selection)
            self.remember(importance, chosen.sort().values)
            kept = torch.cat([chosen, kept], -1)
        for group, of_rows in zip(self.groups, zip(*counts, strict=True), strict=True):
            firsts = (max(self.start, min(pad, self.prompt)) for pad in rows)
            group.dropped = [first - count for first, count in zip(firsts, of_rows, strict=True)]
            group.align(pads)
        self.waiting = HeadGroup(keys, len(self.budgets))
        self.observed, self.selected = None, True
        return kept.sort().values


SELECTING[False] = BudgetedHeads


def weighted(received: torch.Tensor, values: torch.Tensor, selection: Selection) -> torch.Tensor:
    """Importance of tokens that got this attention, float32 [batch, heads, n], and have these values.

    The Euclidean norm, unlike others, is that of what was rotated too (kv_tiles.py).
    """
    if selection.select != VALUE_NORM:
        return received
    dtype = torch.promote_types(values.dtype, torch.float32)
    return received * torch.linalg.vector_norm(values, dim=-1, dtype=dtype).float()


def most_important(
    importance: torch.Tensor,
    padding: torch.Tensor,
    counts: Sequence[Sequence[int]],
    selection: Selection,
    stops: torch.Tensor | None = None,
) -> torch.Tensor:
    """Places of the largest pooled values of each head, the largest first; of equal ones the earlier.

    The first `selection.sinks` places come before all others.

    Args:
        importance: float32 [batch, heads, places], 0 in padding.
        padding: int [batch, 1, 1].
        stops: int [batch, heads, 1], the places to choose from; by default all.
        counts: of each row and head, at most its places that are not padding.

    Returns:
        int64 [batch, heads, the largest count]; `EVERY` beyond a head's count.
    """
    pool = F.max_pool1d if selection.pool == "max" else F.avg_pool1d
    place = torch.arange(importance.shape[2], device=importance.device)
    outside = place < padding
    if stops is not None:
        outside = outside | (place >= stops)
        importance = importance.masked_fill(outside, 0)
    pooled = pool(importance, selection.kernel_size, 1, selection.kernel_size // 2)
    if selection.sinks:
        pooled = pooled.masked_fill(place < padding + selection.sinks, float("inf"))
    order = pooled.masked_fill(outside, -1).sort(descending=True, stable=True).indices
    order = order[..., : max(map(max, counts))]
    return order.where(place[: order.shape[2]] < on_device(counts, order.device)[..., None], EVERY)
