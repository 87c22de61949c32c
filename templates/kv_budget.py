"""Budgeted heads: each keeps the tokens of the prompt that its end attends to most, and everything after the prompt.

HeadKV (Fu et al. 2024) gives every head a budget of its own; what a head keeps is chosen as in SnapKV (Li et al. 2024),
per KV head and per sequence. Until the prompt is complete, attention is exact.
"""

import torch
import torch.nn.functional as F

from .kv_heads import HeadGroup
from .kv_layout import LayerLayout


class BudgetedGroup:
    """Keys and values of one layer's budgeted heads.

    While the prompt comes in, everything waits, by column. Then `select` keeps a prefix: [batch, sum of capacities,
    head_dim], head after head, each by position; a head's capacity is its budget, or what there is to choose from. The
    tail holds the columns from `start` on: the observation window and all that follows.
    """

    def __init__(self, states: torch.Tensor, layout: LayerLayout):
        """Empty storage for heads like `states` [batch, _, _, head_dim]."""
        self.budgets, self.selection = layout.budgets, layout.selection
        heads = len(layout.budgets)
        self.waiting = HeadGroup(states, heads)
        self.tail = HeadGroup(states, heads)
        self.keys = self.values = states.new_zeros(states.shape[0], 0, states.shape[-1])
        self.observed: torch.Tensor | None = None  # queries [batch, query_heads, <= window, head_dim]
        self.start: int | None = None
        self.capacities: list[int] = []
        # tokens kept by each row's heads, [batch, heads]
        self.lengths = torch.zeros(states.shape[0], heads, dtype=torch.long, device=states.device)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are allocated."""
        return self.keys.nbytes + self.values.nbytes + self.waiting.nbytes + self.tail.nbytes

    def map_rows(self, change) -> None:
        """Change the rows of everything that has them."""
        for group in (self.waiting, self.tail):
            group.map_rows(change)
        self.keys, self.values, self.lengths = change(self.keys), change(self.values), change(self.lengths)
        if self.observed is not None:
            self.observed = change(self.observed)

    @torch.inference_mode(False)
    @torch.no_grad()
    def wait(self, column: int, keys: torch.Tensor, values: torch.Tensor, prompt: int) -> None:
        """Store columns of a prompt that comes in chunks."""
        self.waiting.reserve(prompt)
        self.waiting.write(slice(None), column, keys, values)

    @torch.no_grad()
    def observe(self, column: int, query: torch.Tensor, prompt: int) -> None:
        """Remember those queries, at columns from `column` on, that lie in the prompt's observation window."""
        first = max(prompt - self.selection.window - column, 0)
        last = query[:, :, first:]
        self.observed = last.clone() if self.observed is None else torch.cat([self.observed, last], 2)

    @torch.no_grad()
    def select(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        capacity: int,
        padding: torch.Tensor | None,
        scaling: float,
        softcap: float | None,
    ) -> None:
        """Choose from the prompt's keys and values [batch, heads, prompt, head_dim], by column; the rest is forgotten.

        `capacity` is that of the whole cache. Waits for the device where rows are padded.
        """
        batch, heads, prompt, head_dim = keys.shape
        self.start = prompt - min(self.selection.window, prompt)
        self.capacities = [min(budget, self.start) for budget in self.budgets]
        self.keys, self.values = (keys.new_zeros(batch, sum(self.capacities), head_dim) for _ in range(2))
        for row, pad in enumerate([0] * batch if padding is None else padding.tolist()):
            offset = 0
            for head, count in enumerate(self.capacities):
                importance = self._importance(row, head, keys, pad, scaling, softcap)
                kept = most_important(importance, count, self.selection) + pad
                self.keys[row, offset : offset + len(kept)] = keys[row, head, kept]
                self.values[row, offset : offset + len(kept)] = values[row, head, kept]
                self.lengths[row, head] = len(kept)
                offset += count
        self.append(self.start, keys[:, :, self.start :], values[:, :, self.start :], capacity)
        self.waiting = HeadGroup(keys, heads)
        self.observed = None

    def _importance(
        self, row: int, head: int, keys: torch.Tensor, pad: int, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Attention that one row's columns before the window get from it, mean over the group: float32 [candidates]."""
        group = self.observed.shape[1] // len(self.budgets)
        query = self.observed[row, head * group : (head + 1) * group]
        scores = query.float() @ keys[row, head].float().T * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        columns = torch.arange(keys.shape[2], device=keys.device)
        observers = columns[self.start :, None]
        visible = (columns <= observers) & (columns >= pad)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        # of a row shorter than the window, only its own tokens observe
        real = max(pad - self.start, 0)
        return weights[:, real:, pad : self.start].mean((0, 1))

    @torch.inference_mode(False)
    @torch.no_grad()
    def append(self, column: int, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> None:
        """Store columns after the prompt; `capacity` is that of the whole cache."""
        self.tail.reserve(capacity - self.start)
        self.tail.write(slice(None), column - self.start, keys, values)

    def attend(
        self,
        query: torch.Tensor,
        column: int,
        padding: torch.Tensor | None,
        scaling: float,
        softcap: float | None,
        dropout: float,
    ) -> torch.Tensor:
        """Attend to prefix and tail: query [batch, query_heads, tokens, head_dim] at columns from `column` on.

        One softmax spans both; neither is copied.
        """
        batch, query_heads, tokens, head_dim = query.shape
        group = query_heads // len(self.budgets)
        stop = column + tokens - self.start
        masked = tokens > 1 or padding is not None
        if masked:
            slots = torch.arange(stop, device=query.device)
            in_tail = slots <= torch.arange(column - self.start, stop, device=query.device)[:, None]
            if padding is not None:
                in_tail = in_tail & (slots >= (padding - self.start)[:, None, None])
            in_tail = in_tail.expand(batch, tokens, stop).repeat(1, group, 1)
        outputs, offset = [], 0
        for head, capacity in enumerate(self.capacities):
            folded = query[:, head * group : (head + 1) * group].reshape(batch, group * tokens, head_dim)
            kept = slice(offset, offset + capacity)
            keys, values = self.tail.keys[:, head, :stop], self.tail.values[:, head, :stop]
            scores = torch.cat([folded @ self.keys[:, kept].mT, folded @ keys.mT], 2).float() * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if masked:
                in_prefix = torch.arange(capacity, device=query.device) < self.lengths[:, head, None]
                allowed = torch.cat([in_prefix[:, None].expand(-1, group * tokens, -1), in_tail], 2)
                scores = scores.masked_fill(~allowed, float("-inf"))
            weights = F.dropout(scores.softmax(-1), dropout).to(values.dtype)
            output = weights[:, :, :capacity] @ self.values[:, kept] + weights[:, :, capacity:] @ values
            outputs.append(output.view(batch, group, tokens, head_dim))
            offset += capacity
        return torch.cat(outputs, 1)


def most_important(importance: torch.Tensor, count: int, selection) -> torch.Tensor:
    """Places of the `count` largest pooled values of float32 [candidates], in ascending order; ties: earlier first."""
    if not len(importance):
        return torch.zeros(0, dtype=torch.long, device=importance.device)
    pool = F.max_pool1d if selection.pool == "max" else F.avg_pool1d
    pooled = pool(importance[None], selection.kernel_size, 1, selection.kernel_size // 2)[0]
    return pooled.sort(descending=True, stable=True).indices[:count].sort().values
