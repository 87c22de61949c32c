"""Budgeted heads: each keeps the tokens of the prompt that its end attends to most, and everything after the prompt.

HeadKV (Fu et al. 2024) gives every head a budget of its own; what a head keeps is chosen as in SnapKV (Li et al. 2024),
per KV head and per sequence. Until the prompt is complete, attention is exact. From then on a budgeted head is a full
head whose rows skip the columns that it dropped.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .kv_heads import HeadGroup, QuantisedGroup
from .kv_layout import LayerLayout, Selection


class BudgetedHeads:
    """One layer's budgeted heads: a group each, and what they need while the prompt comes in."""

    def __init__(self, states: torch.Tensor, layout: LayerLayout, prompt: int):
        """Empty storage for heads like `states` [batch, _, _, head_dim], after a prompt of so many columns."""
        self.budgets, self.selection, self.prompt = layout.budgets, layout.selection, prompt
        self.start = prompt - min(self.selection.window, prompt)  # the first column that all heads keep
        if layout.quantisation:
            self.groups = [QuantisedGroup(states, 1, layout.quantisation) for _ in self.budgets]
        else:
            self.groups = [HeadGroup(states, 1) for _ in self.budgets]
        for group, budget in zip(self.groups, self.budgets, strict=True):
            group.least = self.start - min(budget, self.start)
        self.waiting = HeadGroup(states, len(self.budgets))  # the prompt, by column
        self.observed: torch.Tensor | None = None  # queries [batch, query_heads, <= window, head_dim]
        self.selected = False

    def map_rows(self, change) -> None:
        """Change the rows of what waits for the end of the prompt."""
        self.waiting.keys, self.waiting.values = change(self.waiting.keys), change(self.waiting.values)
        if self.observed is not None:
            self.observed = change(self.observed)

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
    def select(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        pads: Sequence[int],
        scaling: float,
        softcap: float | None,
    ) -> None:
        """Choose from the prompt's keys and values [batch, heads, prompt, head_dim], by column; the rest is forgotten.

        Args:
            pads: left padding of each row; none is an empty list.
        """
        rows = [
            self._kept(keys[row], self.observed[row], pad, scaling, softcap)
            for row, pad in enumerate(pads or [0] * len(keys))
        ]
        for head, group in enumerate(self.groups):
            columns = [kept[head] for kept in rows]
            group.dropped = [self.prompt - len(kept) for kept in columns]
            group.align(pads)
            # all rows at once where they skip alike, and thus keep as many
            for span, _ in group.spans():
                index = torch.stack(columns[span])[:, None, :, None].expand(-1, -1, -1, keys.shape[-1])
                own = (states[span, head : head + 1].gather(2, index) for states in (keys, values))
                group.write(span, 0, *own)
        self.waiting = HeadGroup(keys, len(self.budgets))
        self.observed, self.selected = None, True

    def _kept(
        self, keys: torch.Tensor, query: torch.Tensor, pad: int, scaling: float, softcap: float | None
    ) -> list[torch.Tensor]:
        """The columns that each head keeps of one row, ascending: keys [heads, prompt, head_dim], padding included."""
        heads, prompt, _ = keys.shape
        columns = torch.arange(prompt, device=keys.device)
        always = columns[max(self.start, pad) :]
        if pad >= self.start:
            return [always] * heads
        # attention that the columns before the window get from it, mean over a group's query heads
        grouped = query.float().reshape(heads, -1, query.shape[-1])
        scores = torch.stack([own @ of_head.float().mT for own, of_head in zip(grouped, keys[:, pad:], strict=True)])
        scores *= scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.view(heads, -1, prompt - self.start, prompt - pad)
        visible = columns[pad:] <= columns[self.start :, None]
        importance = scores.masked_fill(~visible, float("-inf")).softmax(-1)[..., : self.start - pad].mean((1, 2))
        kept = most_important(importance, self.budgets, self.selection)
        return [torch.cat([chosen + pad, always]) for chosen in kept]


def most_important(importance: torch.Tensor, counts: Sequence[int], selection: Selection) -> list[torch.Tensor]:
    """Places of each head's so many largest pooled values, ascending; ties: earlier first. float32 [heads, places]."""
    pool = F.max_pool1d if selection.pool == "max" else F.avg_pool1d
    pooled = pool(importance[:, None], selection.kernel_size, 1, selection.kernel_size // 2)[:, 0]
    order = pooled.sort(dim=-1, descending=True, stable=True).indices
    return [places[:count].sort().values for places, count in zip(order, counts, strict=True)]
