"""Budgeted heads: each keeps the tokens of the prompt that its end attends to most, and everything after the prompt.

HeadKV (Fu et al. 2024) gives every head a budget of its own; what a head keeps is chosen as in SnapKV (Li et al. 2024),
per KV head and per sequence. Until the prompt is complete, attention is exact. From then on a budgeted head is a full
head whose rows skip the columns that it dropped.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .kv_heads import HeadGroup, Rows, block_elements, on_device
from .kv_layout import EVERY, VALUE_NORM, LayerLayout, Selection
from .kv_tiles import head_group
from .kv_torch import Scoring


class BudgetedHeads:
    """One layer's budgeted heads: a group each, and what they need while the prompt comes in."""

    due = EVERY  # the column before which heads select again

    def __init__(self, states: torch.Tensor, layout: LayerLayout, prompt: int):
        """Empty storage for heads like `states` [batch, _, _, head_dim], after a prompt of this many columns."""
        assert layout.selection is not None  # as there are budgets
        self.budgets, self.selection, self.prompt = layout.budgets, layout.selection, prompt
        self.start = prompt - min(self.selection.window, prompt)  # the first column that all heads keep
        self.groups = [head_group(states, 1, None if layout.holds else layout.quantization) for _ in self.budgets]
        for group, budget in zip(self.groups, self.budgets, strict=True):
            group.least = self.start - min(budget, self.start)
        self.waiting = HeadGroup(states, len(self.budgets))  # the prompt, by column
        self.observed: torch.Tensor | None = None  # queries [batch, query_heads, <= window, head_dim]
        self.selected = False

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are allocated beside the groups."""
        return self.waiting.nbytes

    def take_rows(self, rows: Rows) -> None:
        """Follow a change of rows in what is stored beside the groups."""
        self.waiting.keys, self.waiting.values = rows(self.waiting.keys), rows(self.waiting.values)
        if self.observed is not None:
            self.observed = rows(self.observed)

    def watch(self, column: int, query: torch.Tensor) -> None:
        """Remember queries at columns from `column` on, which come after the prompt, if they will select."""

    def remember(self, importance: torch.Tensor, chosen: torch.Tensor) -> None:
        """Keep the importance of what was chosen, if later selections add to it: float32 [batch, heads, places], and
        places that are, with those that are no choice at the end, in the order of slots."""

    def renew(self, layer) -> None:
        """Select again, where budgets hold."""

    def oldest(self, settled: int) -> int:
        """The first column that can be taken back, once selected; `settled` columns never are."""
        return self.start

    def take_back(self, length: int, layer) -> None:
        """Forget selections that columns from `length` on have made."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def wait(self, column: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store columns of a prompt that comes in chunks."""
        if not self.waiting.slots:
            states = (part.new_zeros(*part.shape[:2], self.prompt, part.shape[3]) for part in (keys, values))
            self.waiting.keys, self.waiting.values = states
        self.waiting.write(slice(None), column, keys, values)

    @torch.no_grad()
    def observe(self, column: int, query: torch.Tensor) -> None:
        """Remember those queries, at columns from `column` on, that lie in the prompt's observation window."""
        last = query[:, :, max(self.start - column, 0) :]
        self.observed = last.clone() if self.observed is None else torch.cat([self.observed, last], 2)

    @torch.inference_mode(False)
    @torch.no_grad()
    def select(self, keys: torch.Tensor, values: torch.Tensor, pads: Sequence[int], scoring: Scoring) -> torch.Tensor:
        """Choose from the prompt's keys and values [batch, heads, prompt, head_dim], by column, and forget what has
        waited.

        The device is not waited for: how many columns a head keeps follows from the padding.

        Args:
            pads: left padding of each row; none is an empty list.

        Returns:
            The columns that each head keeps, ascending, then `EVERY` where others keep more: int64 [batch, heads, n].
        """
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


def attention_received(
    query: torch.Tensor, keys: torch.Tensor, padding: torch.Tensor, scoring: Scoring, stops: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention that columns get from queries at the last of them, mean over these and over a group's query heads.

    Scores are computed twice, in blocks of keys, and never held whole.

    Args:
        query: [batch, heads * group, window, head_dim].
        keys: [batch, heads, columns, head_dim].
        padding: int [batch, 1, 1].
        stops: int [batch, heads, 1], the columns that each head has, of which the last ones ask; by default all.

    Returns:
        float32 [batch, heads, columns]; NaN in rows of which a query is padding.
    """
    batch, heads, columns, head_dim = keys.shape
    window = query.shape[2]
    folded = query.float().reshape(batch, heads, -1, head_dim)
    column = torch.arange(columns, device=keys.device)
    asking = torch.arange(-window, 0, device=keys.device) + (columns if stops is None else stops)

    def scores(block: slice) -> torch.Tensor:
        """[batch, heads, group, window, n]"""
        part = scoring.scores(folded @ keys[:, :, block].float().mT)
        visible = (column[block] >= padding[:, None]) & (column[block] <= asking[..., None])
        return part.unflatten(2, (-1, window)).masked_fill(~visible[:, :, None], float("-inf"))

    size = max(1, block_elements(keys) // (batch * heads * max(folded.shape[2], head_dim)))
    blocks = [slice(first, first + size) for first in range(0, columns, size)]
    lse = torch.stack([scores(block).logsumexp(-1) for block in blocks]).logsumexp(0)[..., None]
    if scoring.sinks is not None:
        lse = torch.logaddexp(lse, scoring.sinks.float().view(heads, -1, 1, 1))
    return torch.cat([(scores(block) - lse).exp().mean((2, 3)) for block in blocks], -1)


def weighted(received: torch.Tensor, values: torch.Tensor, selection: Selection) -> torch.Tensor:
    """Importance of tokens that got this attention, float32 [batch, heads, n], and have these values.

    The Euclidean norm, unlike others, is that of what was rotated too (kv_tiles.py).
    """
    if selection.select != VALUE_NORM:
        return received
    return received * torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)


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
