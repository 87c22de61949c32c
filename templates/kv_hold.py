"""Rolling budgets (`hold`): budgeted heads that select again after every block of tokens.

A head has its budget of selected tokens, the observation window, and a block of recent tokens. When the block is full,
the last `window` queries choose among all tokens before them, as the end of the prompt did (kv_budget.py); these
queries have seen the same tokens, so that their attention is what it was when they were asked. Tokens keep their order.

Heads select before the next column is stored, at columns that follow from the prompt alone: chunks of any size, single
steps and rows of a batch give the same result. A selection before a column that may be taken back (assisted decoding)
keeps a copy of what the heads had until the column is confirmed, so that a rejected token leaves no trace.

In quantized heads every token has scales of its own, so that a selection moves codes from tile to tile as they are: no
token is quantized twice while it stays in tiles. Filling a tile between selections is undone in the same way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .kv_budget import BudgetedHeads, most_important, weighted
from .kv_columns import Columns, Rows, on_device
from .kv_heads import KEYS, VALUES, HeadGroup, take_positions
from .kv_layout import VALUE_NORM, LayerLayout
from .kv_received import attention_received
from .kv_softmax import Scoring
from .kv_storage import Storage


class Renewal(NamedTuple):
    """What heads had before a selection, or before they filled a tile, which can be taken back."""

    column: int  # before which this happened
    oldest: int  # the first column that could be taken back then
    start: int
    next: int
    dropped: list[list[int]]  # of each group
    packed: list[list[int]]
    stored: list[list[torch.Tensor]]  # of each group: keys, values and tiles


class HeldHeads(BudgetedHeads):
    """One layer's budgeted heads, which never keep more than budget, observation window and a block."""

    plain = False
    margin = 0  # columns that can be taken back

    def __init__(self, states: torch.Tensor, layout: LayerLayout, columns: Columns, storage: Storage):
        super().__init__(states, layout, columns, storage)
        assert self.selection.hold is not None
        self.hold, self.next = self.selection.hold, self.prompt + self.selection.hold  # before which heads select again
        self.budget_tensor = on_device(self.budgets, states.device, torch.int32)  # as the kernels take them
        self.quantized = [group for group in storage.tiled if group in self.groups]
        for group, budget in zip(self.groups, self.budgets, strict=True):
            group.max_tokens = budget + self.selection.window + self.hold
        self.query_ring: torch.Tensor | None = None  # queries [batch, query_heads, n, head_dim], column c at c % n
        self.scoring: Scoring | None = None
        self.renewals: list[Renewal] = []

    @staticmethod
    def count(layout: LayerLayout) -> int:
        return len(layout.budgets) if layout.holds else 0

    def settle(self, column: int) -> None:
        for group in self.groups:
            group.settled = column

    def check_tiles(self, length: int, seen: int) -> None:
        """Nothing is refused: a tile that was filled since `oldest` is undone."""

    def take_rows(self, rows: Rows) -> None:
        super().take_rows(rows)
        if self.query_ring is not None:
            self.query_ring = rows(self.query_ring)
        self.renewals = [
            renewal._replace(
                dropped=[*map(rows.of, renewal.dropped)],
                packed=[*map(rows.of, renewal.packed)],
                stored=[[*map(rows, group_states)] for group_states in renewal.stored],
            )
            for renewal in self.renewals
        ]

    @torch.inference_mode(False)
    @torch.no_grad()
    def widen(self, margin: int, seen: int, capacity: int) -> None:
        old_ring, self.margin = self.query_ring, margin
        if old_ring is not None:
            self.query_ring = old_ring.new_zeros(*old_ring.shape[:2], self.selection.window + margin, old_ring.shape[3])
            column = torch.arange(max(seen - old_ring.shape[2], 0), seen, device=old_ring.device)
            self.query_ring[:, :, column % self.query_ring.shape[2]] = old_ring[:, :, column % old_ring.shape[2]]

    def select(self, keys: torch.Tensor, values: torch.Tensor, pads: Sequence[int], scoring: Scoring) -> torch.Tensor:
        self.scoring = scoring if scoring.sinks is None else scoring._replace(sinks=scoring.sinks.detach())
        self.settle(self.prompt - 1)
        return super().select(keys, values, pads, scoring)

    def _query_ring(self, query: torch.Tensor) -> torch.Tensor:
        """Where queries like these are remembered."""
        if self.query_ring is None:
            with torch.inference_mode(False):  # it is written again later, maybe outside of an inference mode
                self.query_ring = query.new_zeros(*query.shape[:2], self.selection.window + self.margin, query.shape[3])
        return self.query_ring

    def watch(self, column: int, query: torch.Tensor) -> None:
        first_query = max(self.next - self.selection.window - column, 0)
        if first_query < query.shape[2]:
            ring = self._query_ring(query)  # to detach takes less long than to enter `no_grad`
            for place, states in enumerate(query.detach()[:, :, first_query:].unbind(2), column + first_query):
                ring.select(2, place % ring.shape[2]).copy_(states)

    @torch.inference_mode(False)
    @torch.no_grad()
    def watch_step(self, columns: torch.Tensor, query: torch.Tensor) -> None:
        query = query[:, -len(self.groups) * query.shape[1] // self.layout.heads :, None]
        ring = self._query_ring(query)
        ring[:, :, (columns[0] - 1) % ring.shape[2]] = query

    @property
    def due(self) -> int:
        return min([self.next, *(group.next_tile for group in self.quantized)])

    @torch.inference_mode(False)
    @torch.no_grad()
    def renew(self, column: int, kernels: bool = False) -> None:
        self.settle(column)
        if column < self.next:
            self._pack(column, kernels)
            return
        window = self.selection.window
        lengths = [[max(column - skip, 0) for skip in skips] for skips in self._by_row("skips")]
        counts = [
            [max(min(budget, length - window), 0) for budget, length in zip(self.budgets, row_lengths, strict=True)]
            for row_lengths in lengths
        ]
        kept_counts = [
            [count + min(length, window) for count, length in zip(*pair, strict=True)]
            for pair in zip(counts, lengths, strict=True)
        ]
        if kept_counts == lengths:  # nothing to drop
            self._pack(column, kernels)
            self.next = column + self.hold
            return
        self._back_up(column)
        kept_by_head = [*zip(*kept_counts, strict=True)]
        dropped = [[column - tokens for tokens in head_tokens] for head_tokens in kept_by_head]
        self.start, self.next = column - window, column + self.hold
        if kernels:
            self._renew_by_kernels(column, max(map(max, lengths)), kept_by_head)
            self._align(dropped)
            return
        head_lengths = [max(head_tokens) for head_tokens in zip(*lengths, strict=True)]
        codes = self._codes()
        keys = self._stored(KEYS, head_lengths, codes)
        needs_values = not codes or self.selection.select == VALUE_NORM  # the values that codes stand for, seldom
        values = self._stored(VALUES, head_lengths, codes) if needs_values else keys[:, :, :0]
        stops, kept_tensor, chosen_counts = on_device([lengths, kept_counts, counts], keys.device)[..., None]
        importance = self._importance(keys, values, column, stops)
        no_padding = torch.zeros(1, 1, 1, dtype=torch.long, device=keys.device)
        top_places = most_important(importance, no_padding, counts, self.selection, stops - window).sort().values
        place = torch.arange(max(map(max, kept_counts)), device=keys.device)
        newest_places = (stops - kept_tensor + place).clamp(max=keys.shape[2] - 1)
        order = F.pad(top_places, (0, len(place) - top_places.shape[2])).where(place < chosen_counts, newest_places)
        if codes:
            codes.keep(keys, order, kept_tensor, kept_by_head, [*zip(*lengths, strict=True)])
        else:
            self._write([*map(max, kept_by_head)], take_positions(keys, order), take_positions(values, order))
        self._drop(dropped)

    def _codes(self) -> Any:
        """The tokens of quantized heads, as they are now; None where heads are not quantized."""
        if not self.quantized:
            return None
        from . import kv_token_codes  # which only checkpoints with quantized caches carry

        return kv_token_codes.TokenCodes(self.quantized, self.storage)

    def _renew_by_kernels(self, column: int, max_length: int, kept_by_head: list[tuple[int, ...]]) -> None:
        """Select tokens and move them in two launches.

        Args:
            max_length: of the stored tokens of any head.
            kept_by_head: how many of them it keeps in each row.
        """
        from . import kv_move, kv_reselect

        assert self.query_ring is not None
        assert self.scoring is not None
        table = self.storage.table().last(len(self.groups))
        kept_positions = kv_reselect.select(
            table, self.budget_tensor, self.query_ring, column, max_length, self.selection, self.scoring
        )
        kv_move.move(table, kept_positions, column)
        # either all are quantized or none is
        for group, row_counts in zip(self.quantized, kept_by_head, strict=False):
            group.refill(row_counts)

    def _importance(self, keys: torch.Tensor, values: torch.Tensor, column: int, stops: torch.Tensor) -> torch.Tensor:
        """What stored tokens are worth to the queries before a column: float32 [batch, heads, slots].

        Heads have so many tokens: int64 [batch, heads, 1]. Values are given where heads select by them too.
        """
        assert self.query_ring is not None
        assert self.scoring is not None
        window, device = self.selection.window, keys.device
        query_places = torch.arange(column - window, column, device=device) % self.query_ring.shape[2]
        no_padding = torch.zeros(1, 1, 1, dtype=torch.long, device=device)
        attention = attention_received(self.query_ring[:, :, query_places], keys, no_padding, self.scoring, stops)
        return weighted(attention, values, self.selection)

    def _pack(self, column: int, kernels: bool) -> None:
        """Fill the tiles that are due before a column between selections."""
        due_groups = [group for group in self.quantized if group.due()]
        if not due_groups:
            return
        self._back_up(column)
        if kernels:
            from . import kv_pack

            kv_pack.flush_due(self.quantized, self.storage.table().last(len(self.groups)), column)
            return
        for group in due_groups:
            group.pack()
        self._drop([group.dropped for group in self.groups])

    def _back_up(self, column: int) -> None:
        """Copy what the heads have, if the column before which they change may be taken back."""
        self._confirm()
        if column > self.columns.settled:
            dropped = [group.dropped for group in self.groups]
            packed = [[*group.packed] for group in self.groups]
            stored = [[part.clone() for part in _stored_parts(group)] for group in self.groups]
            columns = column, self._oldest(column), self.start, self.next
            self.renewals.append(Renewal(*columns, dropped, packed, stored))

    def _confirm(self) -> None:
        """Forget the copies that no confirmed column needs."""
        self.renewals = [renewal for renewal in self.renewals if renewal.column > self.columns.settled]

    @property
    def oldest(self) -> int:
        return self._oldest(self.columns.settled)

    def _oldest(self, settled: int) -> int:
        """The first column that could be taken back where `settled` columns never are."""
        current_oldest = max(self.start, *(group.tiles_end for group in self.quantized), 0)
        return next((renewal.oldest for renewal in self.renewals if renewal.column > settled), current_oldest)

    @torch.inference_mode(False)
    @torch.no_grad()
    def take_back(self, length: int) -> None:
        self._confirm()
        while self.renewals and self.renewals[-1].column > length:
            self._restore(self.renewals.pop())
        self.renewals = []  # what is left is confirmed

    def _restore(self, renewal: Renewal) -> None:
        """Let heads have what they had."""
        for group, packed, saved_parts in zip(self.groups, renewal.packed, renewal.stored, strict=True):
            group.packed = packed
            for part, saved in zip(_stored_parts(group), saved_parts, strict=True):
                part[:, :, : saved.shape[2]] = saved  # there may be more room by now
        self.start, self.next = renewal.start, renewal.next
        self._drop(renewal.dropped)

    def _by_row(self, name: str) -> list[tuple[int, ...]]:
        """What groups know of their rows, row by row."""
        return list(zip(*(getattr(group, name) for group in self.groups), strict=True))

    def _stored(self, kind: int, counts: list[int], codes: Any) -> torch.Tensor:
        """Keys or values of the first tokens of each head, so many of it, as [batch, heads, n, head_dim]."""
        if codes:
            place = torch.arange(max(counts), device=self.groups[0].keys.device)[None, None]
            return codes.states(kind, place)
        group_counts = zip(self.groups, counts, strict=True)
        parts = [(group.keys, group.values)[kind][:, :, :count] for group, count in group_counts]
        return torch.cat([F.pad(part, (0, 0, 0, max(counts) - part.shape[2])) for part in parts], 1)

    def _write(self, counts: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the first tokens of each head, so many of it."""
        for head, (group, count) in enumerate(zip(self.groups, counts, strict=True)):
            group.write(slice(None), 0, keys[:, head, None, :count], values[:, head, None, :count])

    def _align(self, dropped: list[list[int]]) -> None:
        """Let groups know how many columns each row has dropped."""
        for group, group_dropped in zip(self.groups, dropped, strict=True):
            group.dropped = group_dropped
            group.align(self.columns.pads)

    def _drop(self, dropped: list[list[int]]) -> None:
        """Let groups and kernels know how many columns each row has dropped."""
        self._align(dropped)
        self.storage.note_rows()


def _stored_parts(group: HeadGroup) -> list[torch.Tensor]:
    """Keys, values and tiles of a group, with slots or tiles in the third dimension."""
    return [group.keys, group.values, *group.tiles]
