"""Storage of the heads of one kind in one layer, by position."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch

from .kv_columns import on_device
from .kv_layout import EVERY, LayerLayout
from .kv_softmax import AttentionPath, Read, Scoring, Skipped, attend, over_columns

# elements of keys that are quantized or dequantized together: what stays in a CPU's cache, and enough work for a GPU
BLOCK, CUDA_BLOCK = 2**20, 2**24
KEYS, VALUES = 0, 1  # kinds of states


def block_elements(states: torch.Tensor) -> int:
    """Elements that are worked on together where `states` are."""
    return CUDA_BLOCK if states.is_cuda else BLOCK


class HeadGroup:
    """Keys and values of one layer's heads of one kind: [batch, heads, slots, head_dim] each.

    A token's position is its column less the columns that its row skips: left padding, and what a budgeted head has
    dropped. Full heads store position p in slot p. Streaming heads do so while p < sink, and from there on go round a
    ring: slot sink + (p - sink) % ring.
    """

    tiled = False  # whether older tokens are in tiles
    tiles: Any = ()  # keys and values that are quantized
    count = 0  # tiles of a head that storage is allocated for
    tiles_end = 0  # the first column that no row has in a tile, nor a later one

    def __init__(self, states: torch.Tensor, heads: int, sink: int | None = None, recent: int = 0):
        """Empty storage for `heads` heads like `states` [batch, _, _, head_dim]; without a sink they are full heads."""
        self.sink, self.recent, self.margin = sink, recent, 0
        self.keys = self.values = states.new_zeros(states.shape[0], heads, 0, states.shape[-1])
        self.in_buffers = False  # whether keys and values are views of the layer's buffers
        self.min_skipped = 0  # columns that every row skips
        self.max_tokens = EVERY  # tokens that a row ever has here
        self.dropped = [0] * states.shape[0]  # of each row, the columns before those that a budgeted head has kept
        self.skips = self.dropped  # the columns that each row skips
        self.skipped: Skipped = 0  # the same, a number where rows agree
        self.packed = [0] * states.shape[0]  # of each row, tokens that are in tiles and not here
        self.settled = 0  # columns that tiles may take

    def __copy__(self) -> "HeadGroup":
        clone = type(self).__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone

    def __getstate__(self) -> dict:
        """Without views of the layer's buffers, as pickle would write a whole buffer for each; the layer makes them."""
        if not self.in_buffers:
            return self.__dict__
        empty_states = self.keys.new_zeros(*self.keys.shape[:2], 0, self.keys.shape[3])
        return {**self.__dict__, "keys": empty_states, "values": empty_states}

    @property
    def heads(self) -> int:
        """KV heads of the group."""
        return self.keys.shape[1]

    @property
    def slots(self) -> int:
        """Tokens per row that storage is allocated for."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are allocated."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def ring(self) -> int:
        """Slots that the newest tokens of a streaming head go round in: its window and what may be taken back."""
        return self.recent + self.margin

    @property
    def wraps(self) -> bool:
        """Whether tokens may take the place of others, so that slots differ from positions."""
        return self.sink is not None and self.slots >= self.sink + self.ring

    def align(self, pads: Sequence[int]) -> None:
        """Learn the left padding of each row; none is an empty list."""
        skips = [max(pair) for pair in zip(pads or [0] * len(self.dropped), self.dropped, strict=True)]
        rows_agree = len(set(skips)) <= 1
        self.skips, self.skipped = skips, skips[0] if rows_agree else on_device(skips, self.keys.device)

    def spans(self) -> Iterator[tuple[slice, int]]:
        """Rows that skip the same number of columns, and that number."""
        if isinstance(self.skipped, int):
            yield slice(None), self.skipped
        else:
            yield from ((slice(row, row + 1), skip) for row, skip in enumerate(self.skips))

    def lengths(self, columns: int) -> torch.Tensor:
        """Tokens of each row among this many columns, less than 1 for padding: int64 [1 or batch, 1]."""
        if isinstance(self.skipped, int):
            return torch.full((1, 1), columns - self.skipped, device=self.keys.device)
        return columns - self.skipped[:, None]

    @overload
    def slot(self, position: int) -> int: ...
    @overload
    def slot(self, position: torch.Tensor) -> torch.Tensor: ...
    def slot(self, position: int | torch.Tensor) -> int | torch.Tensor:
        """The slot of a position: an integer, or a tensor of them."""
        if self.sink is None:
            return position
        ring_slot = self.sink + (position - self.sink) % self.ring
        if isinstance(position, int):
            return position if position < self.sink else ring_slot
        return torch.where(position < self.sink, position, ring_slot)

    def positions(self, lengths: torch.Tensor, slots: int, ring: int) -> torch.Tensor:
        """The position that each of `slots` slots holds in rows of `lengths` tokens; -1 or >= length: it is empty.

        [rows, 1] -> int64 [rows, slots]
        """
        slot = torch.arange(slots, device=lengths.device)
        if self.sink is None:
            return slot.expand(lengths.shape[0], -1)
        newest_positions = lengths - 1 - (lengths - 1 - slot) % ring
        return torch.where(slot < self.sink, slot, torch.where(newest_positions < self.sink, -1, newest_positions))

    def wanted(self, capacity: int) -> int:
        """Slots that hold what a head keeps of this many columns; never fewer than there are."""
        tokens = min(capacity - self.min_skipped, self.max_tokens)
        return max(self.slots, tokens if self.sink is None else min(tokens, self.sink + self.ring))

    def widen(self, margin: int, seen: int, capacity: int) -> None:
        """Let the ring hold `margin` tokens beyond the window; `seen` columns have come, of `capacity`."""
        if self.sink is None:  # all tokens are kept
            return
        if seen - self.min_skipped > self.sink + self.ring:
            ring = self.recent + margin
            slots = min(capacity - self.min_skipped, self.max_tokens, self.sink + ring)
            positions = self.positions(self.lengths(seen), slots, ring)
            # positions that the old ring has dropped yield other tokens, outside of every window that can come
            self.keys, self.values = self.take(self.slot(positions.clamp(min=0)))
        self.margin = margin

    def take(self, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of some slots: int64 [1 or batch, n] -> keys and values [batch, heads, n, head_dim]."""
        batch, heads, _, head_dim = self.keys.shape
        index = slot[:, None, :, None].expand(batch, heads, -1, head_dim)
        return self.keys.gather(2, index), self.values.gather(2, index)

    def window(self, seen: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the last `tokens` columns of `seen`, oldest first; what is padding there is arbitrary."""
        return self.at(self.lengths(seen) + torch.arange(-tokens, 0, device=self.keys.device))

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [batch, heads, n, head_dim] at positions, int64 [1 or batch, n]; of others arbitrary ones."""
        return self.take(self.slot(positions.clamp(min=0)))

    def store(self, column: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the columns from `column` on: [batch, heads, tokens, head_dim]. Padding is not stored."""
        if torch.is_grad_enabled():  # to enter `no_grad` takes as long as to store one token
            with torch.no_grad():
                self.store(column, keys, values)
            return
        tokens = keys.shape[2]
        if isinstance(self.skipped, int) and column >= self.skipped:
            self.write(slice(None), column - self.skipped, keys, values)
            return
        if tokens == 1 and torch.is_tensor(self.skipped):
            self.write_one(column - self.skipped, keys, values)
            return
        for rows, skip in self.spans():
            begin = max(skip - column, 0)
            if begin < tokens:
                self.write(rows, column + begin - skip, keys[rows, :, begin:], values[rows, :, begin:])

    def write(self, rows: slice, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store positions start, start + 1, ... of some rows: [rows, heads, tokens, head_dim]. Older ones may go."""
        tokens = keys.shape[2]
        if tokens == 1:
            slot = self.slot(start)
            self.keys[rows, :, slot : slot + 1], self.values[rows, :, slot : slot + 1] = keys, values
            return
        stop = start + tokens
        if self.sink is None or stop <= self.sink:
            spans = [(start, stop)]
        else:
            ring_start = max(start, self.sink, stop - self.ring)  # of the ring, only what survives is written
            wrap = min(stop, ring_start + self.ring - (ring_start - self.sink) % self.ring)
            spans = [(start, min(stop, self.sink)), (ring_start, wrap), (wrap, stop)]
        for begin, end in spans:
            if begin < end:
                slot, size = self.slot(begin), end - begin
                for storage, states in ((self.keys, keys), (self.values, values)):
                    part = states if size == tokens else states[:, :, begin - start : end - start]
                    storage[rows, :, slot : slot + size] = part

    def write_one(self, position: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one token per row at `position` [batch]; padding, at a negative one, is overwritten by position 0."""
        rows = torch.arange(keys.shape[0], device=keys.device)
        slot = self.slot(position.clamp(min=0))
        self.keys[rows, :, slot], self.values[rows, :, slot] = keys[:, :, 0], values[:, :, 0]

    def packable(self, row: int, tokens: int) -> int:
        """Tokens of a row that tiles take, of its first `tokens`."""
        return 0

    def newest(self, query: torch.Tensor, seen: int, layout: LayerLayout, scoring: Scoring) -> torch.Tensor:
        """Attention of one query per row, of column seen - 1, to all that is stored, its own token too."""
        slots, allowed = self.used(seen), None
        if torch.is_tensor(self.skipped) or self.margin or layout.chunked:
            lengths = self.lengths(seen).clamp(min=1)  # padding sees itself: no empty softmax
            position, newest = self.positions(lengths, slots, self.ring), lengths - 1
            allowed = ((position >= 0) & (position <= newest) & self.in_window(newest, position, layout))[:, None]
        return attend(query, self.keys.narrow(2, 0, slots), self.values.narrow(2, 0, slots), allowed, scoring)

    def used(self, seen: int) -> int:
        """Slots that may hold a token of this many columns."""
        return max(1, min(seen - min(self.skips), self.slots))

    def in_window(self, newest: torch.Tensor, position: torch.Tensor, layout: LayerLayout) -> torch.Tensor | bool:
        """Which of the stored positions [rows, slots] the newest [rows, 1] sees."""
        return self.sink is None or (position < self.sink) | layout.in_window(newest, position)

    def over_past(
        self, keys: torch.Tensor, values: torch.Tensor, past: int, path: AttentionPath, snapshot: bool
    ) -> Read:
        """Queries of full heads at columns from `past` on over all columns, before theirs are stored."""
        return over_columns(*self.by_column(keys, values, past), path)

    def by_column(
        self, keys: torch.Tensor, values: torch.Tensor, past: int
    ) -> tuple[torch.Tensor, torch.Tensor, Skipped]:
        """What is not in tiles, by column, the arriving tokens last; and the columns that rows skip of it.

        `keys` and `values` [batch, kv_heads, tokens, head_dim] are of the columns from `past` on. Sinks come right
        before the tokens after the tiles.
        """
        first_columns = [skip + packed for skip, packed in zip(self.skips, self.packed, strict=True)]
        past_columns = max(past - min(first_columns), 0)
        column = torch.arange(past - past_columns, past, device=keys.device)
        place = column - on_device(first_columns, keys.device)[:, None]
        after_tiles = place + on_device(self.packed, keys.device)[:, None]
        slot = self.slot(torch.where(place < (self.sink or 0), place, after_tiles).clamp(min=0))
        stored_keys, stored_values = self.take(slot)
        skips = [first_column - (past - past_columns) for first_column in first_columns]
        skipped = skips[0] if len(set(skips)) == 1 else on_device(skips, keys.device)
        return torch.cat([stored_keys, keys], 2), torch.cat([stored_values, values], 2), skipped

    def descriptor(self) -> tuple[int, ...]:
        """Sink, ring and window of each head, as `HeadTable` has them."""
        return EVERY if self.sink is None else self.sink, max(self.ring, 1), max(self.recent, 1)

    def take_rows(self, reorder: Callable[[list], list]) -> None:
        """Follow a change of rows in what is known of them; storage is its owner's to change."""
        self.dropped = reorder(self.dropped)
        self.skips = reorder(self.skips)
        self.packed = reorder(self.packed)


def take_positions(states: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """States at positions: [batch, heads, n, head_dim], int64 [batch, heads, m] -> [batch, heads, m, head_dim]."""
    return states.gather(2, position[..., None].expand(-1, -1, -1, states.shape[3]))
