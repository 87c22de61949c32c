"""Heads whose older tokens lie in quantized tiles, each written once."""

from collections.abc import Iterator, Sequence

import torch

from .kv_codes import Tiles, dequantize, empty_tiles, quantize
from .kv_columns import on_device
from .kv_heads import HeadGroup, block_elements
from .kv_layout import EVERY, TILE, Quantization


class QuantizedGroup(HeadGroup):
    """Heads whose older tokens are quantized: whole tiles packed, sinks and the newest tokens kept as they are.

    A tile is packed once, when `residual + TILE` tokens that will not be taken back are in the ring and another one
    comes. Positions from `sink` to `sink + packed` are in tiles; of a streaming head those of its `span`, in tiles that
    go round a ring as well.
    """

    sink: int

    def __init__(self, states: torch.Tensor, heads: int, quantization: Quantization, sink: int, span: int):
        """Empty storage for `heads` heads like `states` [batch, _, _, head_dim] that see `sink` and `span` tokens."""
        super().__init__(states, heads, sink, quantization.residual + TILE)
        self.quantization, self.span = quantization, span
        self.tiles = empty_tiles(self.keys, 0, quantization).map(lambda part: part.unflatten(1, (heads, 0)))

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "tiles": self.tiles.map(lambda part: part[:, :, :0].clone())}

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.tiles.nbytes

    @property
    def count(self) -> int:
        """Tiles of a head that storage is allocated for."""
        return self.tiles.key_codes.shape[2]

    def wanted_tiles(self, capacity: int) -> int:
        """Tiles that a head fills in this many columns; never fewer than there are."""
        filled_tiles = self.quantization.tiles(min(capacity - self.min_skipped, self.max_tokens) - self.sink)
        return max(self.count, min(filled_tiles, self.quantization.window_tiles(self.span)))

    def due(self) -> bool:
        """Whether the next token makes some row pack a tile."""
        return any(self._target(skip) > packed for skip, packed in zip(self.skips, self.packed, strict=True))

    def _target(self, skip: int) -> int:
        return TILE * self.quantization.tiles(self.settled + 1 - skip - self.sink)

    def packable(self, row: int, tokens: int) -> int:
        """Tokens of a row that tiles take, of its first `tokens`."""
        return max(min(self._target(self.skips[row]), tokens - self.sink), 0) // TILE * TILE

    @property
    def tiles_end(self) -> int:
        """The first column that no row has in a tile, nor a later one; 0 where nothing is packed."""
        rows = zip(self.skips, self.packed, strict=True)
        return max(skip + self.sink + packed if packed else 0 for skip, packed in rows)

    def note_packed(self) -> None:
        """Count one more tile as packed of every row that has one due."""
        rows = zip(self.skips, self.packed, strict=True)
        self.packed = [packed + TILE * (self._target(skip) > packed) for skip, packed in rows]

    def write(self, rows: slice, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._pack(rows, self.packable(rows.start or 0, start + keys.shape[2]), start, keys, values)
        super().write(rows, start, keys, values)

    def write_one(self, position: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.pack()
        super().write_one(position, keys, values)

    def pack(self) -> None:
        """Pack the tiles that are due, of tokens that are stored."""
        for row, skip in enumerate(self.skips):
            if self._target(skip) > self.packed[row]:
                rows, no_states = slice(row, row + 1), self.keys[row : row + 1, :, :0]
                self._pack(rows, self._target(skip), self.settled + 1 - skip, no_states, no_states)

    def _pack(self, rows: slice, stop: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Quantize `stop` tokens after the sinks of some rows: from the ring, and from arriving ones, of `start` on."""
        chunk_tokens, start = TILE * max(1, min(self.tiles_at_once(keys.shape[0]), self.count)), start - self.sink
        oldest = max(self.packed[rows.start or 0], stop - TILE * self.count)  # tiles that have left the span by now
        for first in range(oldest, stop, chunk_tokens):
            last = min(first + chunk_tokens, stop)
            parts = []
            for storage, new_states in ((self.keys, keys), (self.values, values)):
                slots = self.slot(self.sink + torch.arange(first, max(min(start, last), first), device=keys.device))
                new_part = new_states[:, :, max(first - start, 0) : max(last - start, 0)]
                states = torch.cat([storage[rows][:, :, slots], new_part], 2) if len(slots) else new_part
                parts.append(states.unflatten(2, (-1, TILE)))
            place = torch.arange(first // TILE, last // TILE, device=keys.device) % self.count
            for tiles, packed in zip(self.tiles, quantize(*parts, self.quantization), strict=True):
                tiles[rows, :, place] = packed
        for row in range(len(self.packed))[rows]:
            self.packed[row] = max(self.packed[row], stop)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slot_states = super().at(positions)
        if not any(self.packed):
            return slot_states
        after_sinks = positions - self.sink
        in_tiles = (after_sinks >= 0) & (after_sinks < on_device(self.packed, self.keys.device)[:, None])
        place = (after_sinks % (TILE * self.count))[:, None, :, None].expand_as(slot_states[0])
        dequantized = (states.flatten(2, 3) for states in dequantize(self.tiles, self.quantization.bits))
        parts = zip(dequantized, slot_states, strict=True)
        keys, values = (
            torch.where(in_tiles[:, None, :, None], tile_part.gather(2, place), slot_part)
            for tile_part, slot_part in parts
        )
        return keys, values

    def tiles_at_once(self, rows: int) -> int:
        """Tiles of each head that are worked on together, in this many rows."""
        return max(1, block_elements(self.keys) // (rows * self.heads * TILE * self.keys.shape[-1]))

    def packed_tiles(self) -> Tiles:
        """The tiles of heads that see all of them: [batch, heads, tiles, ...]."""
        return self.tiles.map(lambda part: part[:, :, : max(self.packed) // TILE])

    def unseen(self, seen: int, slots: int, tokens: int) -> Iterator[tuple[slice, list[tuple[int, int]]]]:
        """Spans that rows do not see, among `slots` slots followed by `tokens` tokens in tiles: rows, [(begin, end)].

        They are empty, or hold tokens that are packed or were taken back. `seen` columns have been stored. A row that
        is only padding so far sees its first slot.
        """
        row_counts = [*zip(self.skips, self.packed, strict=True)]
        rows_agree = len(set(row_counts)) == 1
        for row, (skip, packed) in enumerate(row_counts[:1] if rows_agree else row_counts):
            length, ring = max(seen - skip, 1), self.ring
            ring_tokens, ring_start = max(length - self.sink - packed, 0), packed % ring
            spans = [(min(length, self.sink), self.sink), (slots + packed, slots + tokens)]
            if ring_start + ring_tokens <= ring:
                spans += [(self.sink, self.sink + ring_start), (self.sink + ring_start + ring_tokens, slots)]
            else:
                spans.append((self.sink + ring_start + ring_tokens - ring, self.sink + ring_start))
            rows = slice(None) if rows_agree else slice(row, row + 1)
            yield rows, [(begin, end) for begin, end in spans if begin < end]

    def blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int] | None]]:
        """Keys and values [batch, heads, n, head_dim] of heads that see all of them, dequantized a block at a time.

        With each block comes how many of its first tokens each row has, or None where rows have them all.
        """
        first_token = 0
        tiles, max_tiles = self.packed_tiles(), self.tiles_at_once(self.keys.shape[0])
        for parts in zip(*(part.split(max_tiles, 2) for part in tiles), strict=True):
            keys, values = (states.flatten(2, 3) for states in dequantize(Tiles(*parts), self.quantization.bits))
            tokens = keys.shape[2]
            counts = [min(max(packed - first_token, 0), tokens) for packed in self.packed]
            yield keys, values, None if min(counts) == tokens else counts
            first_token += tokens


def head_group(
    states: torch.Tensor, heads: int, quantization: Quantization | None, sink: int | None = None, recent: int = 0
) -> HeadGroup:
    """Empty storage for `heads` heads like `states`, quantized if that is asked for; without a sink they are full."""
    if quantization is None or not heads:
        return HeadGroup(states, heads, sink, recent)
    if sink is None:
        return QuantizedGroup(states, heads, quantization, quantization.sink, EVERY)
    return QuantizedGroup(states, heads, quantization, sink, recent)


def allocate_tiles(groups: Sequence[QuantizedGroup], counts: Sequence[int]) -> Tiles:
    """Move the tiles of a layer's groups into one buffer for each part, with this many tiles a head."""
    old_tiles = [group.tiles for group in groups]
    total = sum(group.heads * count for group, count in zip(groups, counts, strict=True))
    buffers = empty_tiles(groups[0].keys, total, groups[0].quantization)
    bind_tiles(groups, counts, buffers)
    for group, tiles in zip(groups, old_tiles, strict=True):
        for new_part, old_part in zip(group.tiles, tiles, strict=True):
            new_part[:, :, : old_part.shape[2]] = old_part
    return buffers


def bind_tiles(groups: Sequence[QuantizedGroup], counts: Sequence[int], buffers: Tiles) -> None:
    """Let the tiles of groups be views of buffers that `allocate_tiles` made, or of their rows."""
    start = 0
    for group, count in zip(groups, counts, strict=True):
        shape, stop = (group.heads, count), start + group.heads * count
        group.tiles = buffers.map(lambda part: part[:, start:stop].unflatten(1, shape))  # noqa: B023
        start = stop
