"""Budgeted heads: each keeps the prompt tokens that the end of the prompt attends to most, and all later tokens.

HeadKV (Fu et al. 2024) gives every head a budget of its own; what a head keeps is chosen as in SnapKV (Li et al. 2024),
per KV head and per sequence. Until the prompt is complete, attention is exact. From then on a budgeted head is a full
head whose rows skip the columns that it dropped.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .kv_columns import Columns, Rows, on_device
from .kv_full import stored
from .kv_heads import HeadGroup
from .kv_kind import Forward, Heads, by_heads, split_heads
from .kv_layout import EVERY, VALUE_NORM, LayerLayout, Selection
from .kv_received import attention_received
from .kv_softmax import Read, Scoring, over_columns
from .kv_storage import Storage


class BudgetedHeads(Heads):
    """One layer's budgeted heads, a group each, which select once, at the end of the prompt."""

    ready = False  # whether the prompt is complete

    def __init__(self, states: torch.Tensor, layout: LayerLayout, columns: Columns, storage: Storage):
        super().__init__(states, layout, columns, storage)
        assert layout.selection is not None  # as there are budgets
        self.budgets, self.selection, self.prompt = layout.budgets, layout.selection, columns.prompt
        self.start = self.prompt - min(self.selection.window, self.prompt)  # the first column that all heads keep
        self.groups = [storage.add(states, 1, layout.quantized_budgets) for _ in self.budgets]
        for group, budget in zip(self.groups, self.budgets, strict=True):
            group.min_skipped = self.start - min(budget, self.start)
        self.prompt_group = HeadGroup(states, len(self.budgets))  # the prompt, by column
        self.window_queries: torch.Tensor | None = None  # queries [batch, query_heads, <= window, head_dim]

    @staticmethod
    def count(layout: LayerLayout) -> int:
        return 0 if layout.holds else len(layout.budgets)

    @property
    def extra_bytes(self) -> int:
        return self.prompt_group.nbytes

    def align(self, pads: Sequence[int]) -> None:
        super().align(pads)
        self.prompt_group.align(pads)

    def take_rows(self, rows: Rows) -> None:
        self.prompt_group.keys = rows(self.prompt_group.keys)
        self.prompt_group.values = rows(self.prompt_group.values)
        self.prompt_group.take_rows(rows.of)
        if self.window_queries is not None:
            self.window_queries = rows(self.window_queries)

    @property
    def oldest(self) -> int:
        """The first column that can be taken back, once selected."""
        return self.start

    def check_crop(self, length: int, seen: int) -> None:
        if length < (max(self.oldest, 1) if self.ready else seen + 1):
            raise ValueError(
                f"cannot take the cache back to {length} tokens: that is inside the prompt, or before the "
                "observation window of the last selection, and budgeted heads have dropped or quantized some of it"
            )
        self.check_tiles(length, seen)

    def check_tiles(self, length: int, seen: int) -> None:
        """Raise ValueError where tiles hold a column from `length` on."""
        super().check_crop(length, seen)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        forward: Forward,
        scoring: Scoring,
    ) -> tuple[torch.Tensor, Read]:
        """Store the layer's new tokens and attend from them.

        They see the whole prompt while it comes in, then what was selected. One forward may hold the prompt and tokens
        after it (assisted decoding); the latter see the selection only. Where budgets hold, the forward is cut where
        heads select again or fill a tile, so that chunks of any size give the same result.

        Args:
            query, key, value: of the budgeted heads alone, [batch, heads, tokens, head_dim].

        Returns:
            [batch, query_heads, tokens, head_dim], and how queries of later layers attend to the same.
        """
        past, path, tokens = forward.past, forward.path, query.shape[2]
        cut = 0 if self.ready else min(self.prompt - past, tokens)
        outputs, reads = [], []
        if cut:
            prompt_query, prompt_states = query[:, :, :cut], (key[:, :, :cut], value[:, :, :cut])
            if past or cut < self.prompt:
                self.wait(past, *prompt_states)
            if past:
                prompt_states = tuple(
                    states[:, :, : past + cut] for states in (self.prompt_group.keys, self.prompt_group.values)
                )
            read = over_columns(*prompt_states, self.prompt_group.skipped, path)
            outputs.append(read(prompt_query, scoring))
            reads += [(cut, read)] * forward.shared
            self.observe(past, prompt_query)
            if past + cut == self.prompt:
                kept_columns = self.select(*prompt_states, self.columns.pads, scoring)
                self.storage.note_rows()
                self.compact(*prompt_states, kept_columns, path.KERNELS)
        head_counts = [1] * len(self.groups)
        while cut < tokens:
            due_column = self.due
            if due_column == past + cut:
                self.renew(past + cut, path.KERNELS)
                due_column = self.due
            stop = min(due_column - past, tokens)
            self.settle(past + stop - 1)
            states = [part[:, :, cut:stop] for part in (query, key, value)]
            self.watch(past + cut, states[0])
            # heads select again before later layers attend
            snapshot = forward.snapshot or (forward.shared and stop < tokens)
            part_forward = forward._replace(past=past + cut, snapshot=snapshot)
            read = by_heads(
                [
                    (1, stored(group, *head_states, self.layout, part_forward))
                    for group, (_, *head_states) in zip(self.groups, split_heads(*states, head_counts), strict=True)
                ]
            )
            outputs.append(read(states[0], scoring))
            reads += [(stop - cut, read)] * forward.shared
            cut = stop
        return torch.cat(outputs, 2), _by_columns(reads)

    def settle(self, column: int) -> None:
        for group in self.groups:
            group.settled = min(self.columns.settled, column)

    @torch.inference_mode(False)
    @torch.no_grad()
    def wait(self, column: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store columns of a prompt that comes in chunks."""
        if not self.prompt_group.slots:
            states = (part.new_zeros(*part.shape[:2], self.prompt, part.shape[3]) for part in (keys, values))
            self.prompt_group.keys, self.prompt_group.values = states
        self.prompt_group.write(slice(None), column, keys, values)

    @torch.no_grad()
    def observe(self, column: int, query: torch.Tensor) -> None:
        """Remember those queries, at columns from `column` on, that lie in the prompt's observation window."""
        window_query = query[:, :, max(self.start - column, 0) :]
        self.window_queries = (
            window_query.clone() if self.window_queries is None else torch.cat([self.window_queries, window_query], 2)
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def select(self, keys: torch.Tensor, values: torch.Tensor, pads: Sequence[int], scoring: Scoring) -> torch.Tensor:
        """Choose from the prompt's keys and values, [batch, heads, prompt, head_dim] by column.

        What has waited is forgotten. The device is not waited for: how many columns a head keeps follows from the
        padding.

        Args:
            pads: left padding of each row; none is an empty list.

        Returns:
            The columns that each head keeps, ascending, then `EVERY` where others keep more: int64 [batch, heads, n].
        """
        assert self.window_queries is not None  # the prompt has been asked
        row_pads, device = pads or [0] * len(keys), keys.device
        counts = [[max(min(budget, self.start - pad), 0) for budget in self.budgets] for pad in row_pads]
        padding = on_device(row_pads, device)[:, None, None]
        window = torch.arange(self.start, self.prompt, device=device).expand(len(keys), len(self.budgets), -1)
        kept_columns = window.where(window >= padding, EVERY)
        if any(map(any, counts)):
            attention = attention_received(self.window_queries, keys, padding, scoring)
            importance = weighted(attention, values, self.selection)[..., : self.start]
            chosen_columns = most_important(importance, padding, counts, self.selection)
            kept_columns = torch.cat([chosen_columns, kept_columns], -1)
        for group, row_counts in zip(self.groups, zip(*counts, strict=True), strict=True):
            window_starts = (max(self.start, min(pad, self.prompt)) for pad in row_pads)
            group.dropped = [start - count for start, count in zip(window_starts, row_counts, strict=True)]
            group.align(pads)
        self.prompt_group = HeadGroup(keys, len(self.budgets))
        self.window_queries, self.ready = None, True
        return kept_columns.sort().values

    @torch.inference_mode(False)
    @torch.no_grad()
    def compact(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept_columns: torch.Tensor,
        kernels: bool = False,
    ) -> None:
        """Store the columns of a prompt that `select` has chosen, by a kernel where there is one."""
        if kernels and self.layout.round_keys is None:
            from . import kv_compact

            for group in self.groups:
                group.packed = [group.packable(row, self.prompt - skip) for row, skip in enumerate(group.skips)]
            kv_compact.compact(self.storage.table().last(len(self.groups)), keys, values, kept_columns)
            return
        for head, group in enumerate(self.groups):
            for rows, skip in group.spans():  # all rows at once where they keep as many
                index = kept_columns[rows, head, : max(self.prompt - skip, 0), None].expand(-1, -1, keys.shape[3])
                group.write(rows, 0, *(states[rows, head].gather(1, index)[:, None] for states in (keys, values)))


def weighted(attention: torch.Tensor, values: torch.Tensor, selection: Selection) -> torch.Tensor:
    """Importance of tokens that got this attention, float32 [batch, heads, n], and have these values.

    The Euclidean norm, unlike others, is that of what was rotated too (kv_codes.py).
    """
    if selection.select != VALUE_NORM:
        return attention
    dtype = torch.promote_types(values.dtype, torch.float32)
    return attention * torch.linalg.vector_norm(values, dim=-1, dtype=dtype).float()


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


def _by_columns(reads: list[tuple[int, Read]]) -> Read:
    """Attention of several runs of columns, each of this many."""

    def read(query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        outputs, stop = [], query.shape[2]
        for columns, columns_read in reversed(reads):
            if stop > 0:
                outputs.insert(0, columns_read(query[:, :, max(stop - columns, 0) : stop], scoring))
            stop -= columns
        return torch.cat(outputs, 2)

    return read
