"""Quantized heads with rolling budgets: each token has its own codes, which move from tile to tile unchanged."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from .kv_codes import Tiles, quantize_groups, scale_codes, split_thirds, unpack
from .kv_columns import on_device
from .kv_heads import VALUES, take_positions
from .kv_layout import TILE, Quantization, Widths
from .kv_storage import Storage
from .kv_tiles import QuantizedGroup


class TokenCodes:
    """The tokens of quantized heads, as they are before a selection: those in tiles by codes of their own."""

    def __init__(self, groups: Sequence[QuantizedGroup], storage: Storage):
        """Of the last groups of a layer, each of one head. They are told apart by where they begin in its buffers."""
        assert storage.keys is not None  # as there are tiles
        assert storage.values is not None
        assert storage.tiles is not None
        self.groups, self.quantization, self.sink = groups, groups[0].quantization, groups[0].sink
        self.packed = [group.packed for group in groups]
        slots = [group.slots for group in groups]
        tiles = [TILE * group.count for group in groups]
        self.stored = [part[:, part.shape[1] - sum(slots) :] for part in (storage.keys, storage.values)]
        self.tiles = storage.tiles.map(lambda part: part[:, part.shape[1] - sum(tiles) // TILE :])
        self.tokens = by_token(self.tiles, self.quantization.widths)
        starts = [[*accumulate(sizes[:-1], initial=0)] for sizes in (slots, tiles)]
        rows = [*zip(*self.packed, strict=True)]
        row_packed = rows[:1] if len({*rows}) == 1 else rows
        lookup = on_device([*starts, *row_packed], storage.keys.device)[..., None]
        self.first_slots, self.first_places, self.packed_rows = lookup[0], lookup[1], lookup[2:]

    def states(self, kind: int, position: torch.Tensor) -> torch.Tensor:
        """Keys or values at positions: int64 [1 or batch, 1 or heads, n] -> [batch, heads, n, head_dim]."""
        stored = self.stored[kind]
        slot = self.groups[0].slot(position) + self.first_slots
        slot_states = _gather_places(stored, slot.clamp(max=stored.shape[1] - 1))
        if not any(map(any, self.packed)):
            return slot_states
        in_tile, place = self._place(position)
        codes, scales = (_gather_places(part, place) for part in self.tokens[2 * kind : 2 * kind + 2])
        return token_states(codes, scales, self.quantization.widths[kind]).where(in_tile[..., None], slot_states)

    def _place(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether tokens are in tiles, bool [1 or batch, heads, n], and where among all that could be there."""
        place = position - self.sink
        in_tile = (place >= 0) & (place < self.packed_rows)
        return in_tile, (place + self.first_places).where(in_tile, 0)

    def keep(
        self, keys: torch.Tensor, source: torch.Tensor, kept_counts: torch.Tensor, counts: list, lengths: list
    ) -> None:
        """Let each head's tokens be some of them, those in tiles by the codes that they have.

        Tiles stay as many while there are tokens to fill them, so that none returns to the slots to be quantized again.

        Args:
            keys: of all tokens, [batch, heads, >= n, head_dim].
            source: int64 [batch, heads, n], where the token at each position is, ascending.
            kept_counts: int64 [batch, heads, 1], how many tokens each head keeps.
            counts, lengths: of each head, how many tokens each row keeps, and has.
        """
        quantization, sink, device, fresh_starts, fresh_tokens = self.quantization, self.sink, source.device, [], 1
        for group, row_counts, row_lengths, packed in zip(self.groups, counts, lengths, self.packed, strict=True):
            rows = [*zip(row_counts, row_lengths, packed, strict=True)]
            group.refill(row_counts)
            # up to here all are from tiles: those from slots come last, and are no more than there were
            fresh_starts.append(
                max(min(*group.packed, *(count - length + packed_before for count, length, packed_before in rows)), 0)
            )
            fresh_tokens = max(fresh_tokens, max(group.packed) - fresh_starts[-1])
        last_position, slots = source.shape[2] - 1, max(group.slots for group in self.groups)
        fresh_start = on_device(fresh_starts, device)[:, None]
        slot_positions = (
            self.groups[0]
            .positions(kept_counts.flatten(0, 1), slots, self.groups[0].ring)
            .unflatten(0, kept_counts.shape[:2])
        )
        late_positions = (sink + fresh_start + torch.arange(fresh_tokens, device=device)).expand(len(source), -1, -1)
        sources = source.gather(2, torch.cat([slot_positions, late_positions], 2).clamp(0, last_position))
        states = take_positions(keys, sources), self.states(VALUES, sources)
        if any(any(group.packed) for group in self.groups):
            place = torch.arange(TILE * max(group.count for group in self.groups), device=device)
            in_tile, index = self._place(source[..., (sink + place).clamp(max=last_position)])
            head = torch.arange(len(fresh_start), device=device)[:, None]
            fresh_index = (
                self.tokens.key_codes.shape[1] + fresh_tokens * head + (place - fresh_start).clamp(0, fresh_tokens - 1)
            )
            parts = zip(index.where(in_tile, fresh_index).unbind(1), self.groups, strict=True)
            pool_index = torch.cat([token_index[:, : TILE * group.count] for token_index, group in parts], 1)[:, None]
            fresh_parts = (
                encoded.flatten(1, 2)
                for part, bits in zip(states, quantization.widths, strict=True)
                for encoded in encoded_tokens(part[:, :, slots:], bits, quantization)
            )
            pools = (torch.cat(pair, 1) for pair in zip(self.tokens, fresh_parts, strict=True))
            moved_tokens = Tiles(*(_gather_places(pool, pool_index)[:, 0] for pool in pools))
            for stored, part in zip(self.tiles, by_tile(moved_tokens, quantization.widths), strict=True):
                stored.copy_(part)
        for head, group in enumerate(self.groups):
            for stored, part in zip((group.keys, group.values), states, strict=True):
                stored.copy_(part[:, head, None, : group.slots])


def _gather_places(states: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Places of a buffer: [batch, N, width], int64 [1 or batch, heads, n] -> [batch, heads, n, width]."""
    if len(place) == 1:  # the same of every row: whole tokens at a time
        gathered = states.index_select(1, place.flatten())
    else:
        gathered = states.gather(1, place.flatten(1)[..., None].expand(-1, -1, states.shape[2]))
    return gathered.unflatten(1, place.shape[1:])


def by_token(tiles: Tiles, widths: Widths) -> Tiles:
    """Bytes of codes, scales and minima [..., tiles * TILE, n] of tokens that have their own."""
    packed = zip((tiles.key_codes, tiles.value_codes), widths, strict=True)
    codes = (_token_bytes(part, bits).flatten(-3, -2) for part, bits in packed)
    scales = (part.transpose(-3, -2).flatten(-2).flatten(-3, -2) for part in (tiles.key_scales, tiles.value_scales))
    return Tiles(*(part for pair in zip(codes, scales, strict=True) for part in pair))


def by_tile(tokens: Tiles, widths: Widths) -> Tiles:
    """The reverse: [..., tiles, *] as tiles have them."""
    key_codes, key_scales, value_codes, value_scales = tokens.map(lambda part: part.unflatten(-2, (-1, TILE)))
    scales = (part.unflatten(-1, (2, -1)).transpose(-3, -2) for part in (key_scales, value_scales))
    packed = zip((key_codes, value_codes), widths, strict=True)
    codes = (_token_bytes(part, bits, back=True) for part, bits in packed)
    return Tiles(*(part for pair in zip(codes, scales, strict=True) for part in pair))


def _token_bytes(packed: torch.Tensor, bits: int, back: bool = False) -> torch.Tensor:
    """Packed codes [..., tokens, width] with all bytes of a token in its row, or the reverse."""
    if bits != 3:  # they are there
        return packed
    tokens, width = packed.shape[-2:]
    if back:
        parts = packed.split([width * 2 // 3, width // 3], -1)
        return torch.cat([part.flatten(-2) for part in parts], -1).unflatten(-1, (tokens, -1))
    return torch.cat(split_thirds(packed), -1)


def encoded_tokens(states: torch.Tensor, bits: int, quantization: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of codes, scales and minima, as `by_token` has them, of tokens [..., n, head_dim]."""
    *_, tokens, head_dim = states.shape
    codes, scales = quantize_groups(states, (tokens, quantization.value_groups(head_dim)[1]), bits, quantization)
    return _token_bytes(codes, bits), scales.transpose(-3, -2).flatten(-2)


def token_states(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """States [..., n, head_dim] that these bytes, scales and minima stand for."""
    scale, low = scales.unflatten(-1, (2, -1, 1)).unbind(-3)
    states = unpack(_token_bytes(codes, bits, back=True), bits).to(scales.dtype)
    return scale_codes(states.unflatten(-1, (scale.shape[-2], -1)), scale, low).flatten(-2)
