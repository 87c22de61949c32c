"""Heads whose older tokens lie in quantized tiles, each written once."""

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .kv_codes import (
    Rounding,
    Tiles,
    dequantize,
    empty_tiles,
    key_products,
    nearest,
    quantize,
    rotated,
    rotation,
    weighted_values,
)
from .kv_columns import Rows, on_device
from .kv_heads import HeadGroup, block_elements
from .kv_layout import EVERY, NEAREST, TILE, KVLayout, LayerLayout, Quantization, Widths, in_window
from .kv_softmax import AttentionPath, Read, Scoring, Span, folded, merge
from .kv_storage import HeadTable, Storage

LOOP_QUERIES = 256  # of a KV head, up to which the loop in C reads codes: more share the work of dequantizing tiles


class VisibleTokens(NamedTuple):
    """What queries see of slots, or of other states that are not in tiles, and of tiles."""

    hidden: torch.Tensor  # which of the states a query does not see, bool [batch, queries, states]
    places: torch.Tensor  # of each row's tiles in `by_place`, the oldest first, int64 [batch, tiles]
    seen: torch.Tensor  # the first token in these tiles that a query sees, and the end, int64 [batch, queries, 2]
    row_tiles: int  # tiles between a row and the next in storage

    def in_tiles(self, count: int) -> torch.Tensor:
        """Which tokens of a head's `count` tiles queries see, as the tiles lie: bool [batch, queries, count * TILE]."""
        batch, queries, _ = self.seen.shape
        token = torch.arange(self.places.shape[1] * TILE, device=self.seen.device)
        sees = (token >= self.seen[..., :1]) & (token < self.seen[..., 1:])
        place = (self.places % self.row_tiles)[:, None, :, None].expand(-1, queries, -1, TILE)
        in_order = sees.view(batch, queries, -1, TILE)
        return in_order.new_zeros(batch, queries, count, TILE).scatter_(2, place, in_order).flatten(2)


class QuantizedGroup(HeadGroup):
    """Heads whose older tokens are quantized: whole tiles packed, sinks and the newest tokens kept as they are.

    A tile is packed once, when `residual + TILE` tokens that will not be taken back are in the ring and another one
    comes. Positions from `sink` to `sink + packed` are in tiles; of a streaming head those of its `span`, in tiles that
    go round a ring as well.
    """

    sink: int
    tiled = True

    def __init__(
        self,
        states: torch.Tensor,
        heads: int,
        quantization: Quantization,
        sink: int,
        span: int,
        round_keys: Rounding = nearest,
    ):
        """Empty storage for `heads` heads like `states` [batch, _, _, head_dim] that see `sink` and `span` tokens."""
        super().__init__(states, heads, sink, quantization.residual + TILE)
        self.quantization, self.span, self.round_keys = quantization, span, round_keys
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

    @property
    def next_tile(self) -> int:
        """The first column before which a row packs another tile."""
        first_unpacked = min(skip + packed for skip, packed in zip(self.skips, self.packed, strict=True))
        return first_unpacked + self.sink + self.quantization.residual + TILE

    def refill(self, counts: Sequence[int]) -> None:
        """Count what is packed where rows keep so many tokens: as much as before, while there are tokens to fill tiles.

        So no token of a tile returns to the slots, to be quantized again.
        """
        max_tiles = [(count - self.sink) // TILE for count in counts]
        min_tiles = [self.quantization.tiles(count + 1 - self.sink) for count in counts]
        rows = zip(self.packed, max_tiles, min_tiles, strict=True)
        self.packed = [max(TILE * lower, min(packed, TILE * upper)) for packed, upper, lower in rows]

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
            for tiles, packed in zip(self.tiles, quantize(*parts, self.quantization, self.round_keys), strict=True):
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
        dequantized = (states.flatten(2, 3) for states in dequantize(self.tiles, self.quantization.widths))
        parts = zip(dequantized, slot_states, strict=True)
        keys, values = (
            torch.where(in_tiles[:, None, :, None], tile_part.gather(2, place), slot_part)
            for tile_part, slot_part in parts
        )
        return keys, values

    def newest(self, query: torch.Tensor, seen: int, layout: LayerLayout, scoring: Scoring) -> torch.Tensor:
        if not max(self.packed):
            return super().newest(query, seen, layout, scoring)
        slots = self.used(seen)
        states = self.keys.narrow(2, 0, slots), self.values.narrow(2, 0, slots)
        visible = self.visible(seen, slots, layout.chunked)
        folded_query = folded(query, self.keys, None)[0]
        loop = self.loop(query, scoring)
        if loop is None:
            output, lse = self._in_torch(folded_query, states, visible, scoring)
        else:
            output, lse = loop(
                folded_query, states, visible.hidden, self.by_place(), visible.places, visible.seen, scoring
            )
        return scoring.sunk(output.view(query.shape), lse.view(query.shape[:3])).to(query.dtype)

    def loop(self, query: torch.Tensor, scoring: Scoring) -> Any:
        """The loop in C that attends to codes, `kv_cpu.CodesLoop`; None where PyTorch does."""
        codes_loop = _codes_loop()
        wants_grad = query.requires_grad and torch.is_grad_enabled()
        if codes_loop is None or not query.is_cpu or wants_grad or scoring.dropout:
            return None
        return codes_loop(self.quantization, query.shape[3], self.keys.dtype)

    def _in_torch(
        self, query: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor], visible: VisibleTokens, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to slots and the tiles' codes, in float32 or wider: nothing is dequantized.

        Args:
            query: [batch, heads, group, head_dim].
            states: keys and values of slots, [batch, heads, slots, head_dim].

        Returns:
            [batch, heads, group, head_dim], and the log-sum-exp of the scores of each query.
        """
        keys, values = states
        slots = keys.shape[2]
        tiles = self.packed_tiles()
        widths = self.quantization.widths
        query = query.to(torch.promote_types(query.dtype, torch.float32))
        batch, heads, count = tiles.key_codes.shape[:3]
        room = query.new_empty(batch * heads * min(count, self.tiles_at_once(batch)) * TILE * query.shape[3])
        products = [query @ keys.to(query.dtype).mT, key_products(query, tiles, widths.keys, room)]
        hidden = torch.cat([visible.hidden, ~visible.in_tiles(self.count)[:, :, : count * TILE]], 2)
        scores = scoring.scores(torch.cat(products, 3)).masked_fill(hidden[:, None], float("-inf"))
        lse = scores.logsumexp(3)
        weights = F.dropout((scores - lse[..., None]).exp(), scoring.dropout)
        output = weights[..., :slots] @ values.to(query.dtype)
        output += weighted_values(weights[..., slots:], tiles, widths.values, room)
        return output, lse

    def in_window(self, newest: torch.Tensor, position: torch.Tensor, layout: LayerLayout) -> torch.Tensor:
        return (position < self.sink) | in_window(newest, position, self.span, layout.chunked)

    def over_past(
        self, keys: torch.Tensor, values: torch.Tensor, past: int, path: AttentionPath, snapshot: bool
    ) -> Read:
        """What is not packed yet and the queries' own tokens are read as they came, beside the tiles."""
        if not max(self.packed):
            return super().over_past(keys, values, past, path, snapshot)
        *states, skipped = self.by_column(keys, values, past)
        then = copy.copy(self)
        then.packed = [*self.packed]  # tiles that follow are packed beside these
        if snapshot:  # a selection writes to these
            then.tiles = then.tiles.map(torch.clone)

        def read(query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
            span = Span(states[0].shape[2] - query.shape[2], skipped)
            output, lse = path.attend_with_lse(query, *states, span, scoring)
            output = output.float()  # rounded once, not at every part
            for rows, part, part_lse in then.over_tiles(query, path, scoring):
                # copies, since autograd keeps what is merged
                output[rows], lse[rows] = merge((output[rows].clone(), lse[rows].clone()), (part, part_lse))
            return scoring.sunk(output, lse).to(query.dtype)

        return read

    def over_tiles(
        self, query: torch.Tensor, path: AttentionPath, scoring: Scoring
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Attention of queries to all that is in tiles, of heads that see all of it, without sinks.

        Few queries attend to the codes, if there is the loop for it; for others, tiles are dequantized block by block.

        Args:
            query: [batch, query_heads, tokens, head_dim].

        Yields:
            Rows, their output [rows, query_heads, tokens, head_dim], and the log-sum-exp of their scores.
        """
        tokens = query.shape[2]
        folded_query = folded(query, self.keys, None)[0]
        loop = self.loop(query, scoring) if folded_query.shape[2] <= LOOP_QUERIES else None
        if loop is not None:
            visible = self.visible(0, 0)
            hidden = visible.hidden.expand(-1, tokens, -1)
            seen = visible.seen.expand(-1, tokens, -1)
            no_states = self.keys[:, :, :0], self.values[:, :, :0]
            output, lse = loop(folded_query, no_states, hidden, self.by_place(), visible.places, seen, scoring)
            yield slice(None), output.view(query.shape), lse.view(query.shape[:3])
            return
        for rows, *block in self.blocks():
            span = Span(block[0].shape[2], first=None, limit=block[0].shape[2])
            yield rows, *path.attend_with_lse(query[rows], *block, span, scoring)

    def descriptor(self) -> tuple[int, ...]:
        return self.sink, max(self.ring, 1), self.span

    def tiles_at_once(self, rows: int) -> int:
        """Tiles of each head that are worked on together, in this many rows."""
        return max(1, block_elements(self.keys) // (rows * self.heads * TILE * self.keys.shape[-1]))

    def packed_tiles(self) -> Tiles:
        """The tiles that have been packed, as they lie: [batch, heads, tiles, ...]."""
        return self.tiles.map(lambda part: part[:, :, : max(self.packed) // TILE])

    def by_place(self) -> Tiles:
        """Views of the tiles by place, [places, heads, ...]: tile t of row r is at place r * row_tiles + t."""

        def view(part: torch.Tensor) -> torch.Tensor:
            batch, heads, count, *shape = part.shape
            row, head, tile, *steps = part.stride()
            places = (batch - 1) * (row // tile) + count
            return part.as_strided((places, heads, *shape), (tile, head, *steps))

        return self.tiles.map(view)

    def visible(self, seen: int, slots: int, chunked: bool = False) -> VisibleTokens:
        """What the newest token of each row sees, of the first slots and of tiles; `seen` columns have been stored."""
        codes = self.tiles.key_codes
        lengths = tuple(max(seen - skip, 1) for skip in self.skips)  # padding sees its first slot
        return visible_to_newest(
            *(lengths, tuple(self.packed), self.sink, self.ring, self.span, chunked),
            *(slots, self.count, codes.stride(0) // codes.stride(2), codes.device),
        )

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Rows, and their keys and values [rows, heads, n, head_dim], dequantized a block at a time.

        They are of heads that see all of them. Rows come together where they have equally many.
        """
        first_token = 0
        tiles = self.packed_tiles()
        max_tiles = self.tiles_at_once(self.keys.shape[0])
        for parts in zip(*(part.split(max_tiles, 2) for part in tiles), strict=True):
            keys, values = (states.flatten(2, 3) for states in dequantize(Tiles(*parts), self.quantization.widths))
            tokens = keys.shape[2]
            counts = [min(max(packed - first_token, 0), tokens) for packed in self.packed]
            if len(set(counts)) == 1:
                yield slice(None), keys[:, :, : counts[0]], values[:, :, : counts[0]]
            else:
                for row, count in enumerate(counts):
                    if count:
                        yield slice(row, row + 1), keys[row : row + 1, :, :count], values[row : row + 1, :, :count]
            first_token += tokens


@functools.lru_cache(maxsize=16)  # in a step, most layers ask for the same
@torch.inference_mode(False)
def visible_to_newest(
    lengths: tuple[int, ...],
    packed: tuple[int, ...],
    sink: int,
    ring: int,
    span: int,
    chunked: bool,
    slots: int,
    count: int,
    row_tiles: int,
    device: torch.device,
) -> VisibleTokens:
    """What the newest token of each row sees.

    Args:
        lengths: tokens of each row.
        packed: of these, how many are in tiles, or were before the tiles went round.
        sink, ring, span: of a `QuantizedGroup`.
        chunked: whether the span is a chunk, not a window.
        slots: how many there are.
        count: tiles of a head that storage is allocated for.
        row_tiles: tiles between a row and the next in storage.
    """
    oldest, seen, places = [], [], []
    for length in lengths:
        first_position = (length - 1) // span * span if chunked else length - span
        oldest.append(max(first_position - sink, 0))
    first_tiles = [min(pair) // TILE for pair in zip(oldest, packed, strict=True)]
    tiles = max(end // TILE - first for end, first in zip(packed, first_tiles, strict=True))
    for row, (first, begin, end) in enumerate(zip(first_tiles, oldest, packed, strict=True)):
        places.append([row * row_tiles + tile % count for tile in range(first, first + tiles)])
        seen.append([[begin - first * TILE, end - first * TILE]])
    newest = on_device(lengths, device)[:, None] - 1
    slot = torch.arange(slots, device=device)
    position = torch.where(slot < sink, slot, newest - (newest - slot) % ring)
    in_ring = position - sink >= on_device([*map(max, oldest, packed)], device)[:, None]
    hidden = (position > newest) | ~((slot < sink) | in_ring)
    return VisibleTokens(hidden[:, None], on_device(places, device, torch.int64), on_device(seen, device), row_tiles)


@functools.cache
def _codes_loop() -> Any:
    """`kv_cpu.codes_loop`; None in a checkpoint without it."""
    try:
        from . import kv_cpu
    except ImportError:
        return None
    return kv_cpu.codes_loop


class TiledStorage(Storage):
    """Storage of a layer with quantized heads: one more buffer of each part of their tiles, and rotated states."""

    def __init__(self, layout: LayerLayout):
        super().__init__(layout)
        assert layout.quantization is not None
        self.quantization = layout.quantization
        self.counts: list[int] = []  # tiles of a head of each tiled group

    def add(
        self, states: torch.Tensor, heads: int, quantized: bool, sink: int | None = None, recent: int = 0
    ) -> HeadGroup:
        if not quantized:
            return super().add(states, heads, quantized, sink, recent)
        sink, span = (self.quantization.sink, EVERY) if sink is None else (sink, recent)
        round_keys = nearest
        if self.layout.round_keys is not None:
            first = sum(group.heads for group in self.groups)
            round_keys = self.layout.round_keys.part(first, heads).to(states.device)
        group = QuantizedGroup(states, heads, self.quantization, sink, span, round_keys)
        self.groups.append(group)
        self.tiled.append(group)
        return group

    def fit(self, capacity: int) -> None:
        super().fit(capacity)
        counts = [group.wanted_tiles(capacity) for group in self.tiled]
        if counts == self.counts:
            return
        old_tiles = [group.tiles for group in self.tiled]
        total = sum(group.heads * count for group, count in zip(self.tiled, counts, strict=True))
        self.tiles = empty_tiles(self.tiled[0].keys, total, self.quantization)
        self.counts, self.made = counts, None
        self._bind()
        for group, tiles in zip(self.tiled, old_tiles, strict=True):
            for new_part, old_part in zip(group.tiles, tiles, strict=True):
                new_part[:, :, : old_part.shape[2]] = old_part

    def _bind(self) -> None:
        super()._bind()
        if self.tiles is None:
            return
        begin = 0
        for group, count in zip(self.tiled, self.counts, strict=True):
            shape, end = (group.heads, count), begin + group.heads * count
            group.tiles = self.tiles.map(lambda part: part[:, begin:end].unflatten(1, shape))  # noqa: B023
            begin = end

    @torch.inference_mode(False)
    def take_rows(self, rows: Rows) -> None:
        if self.tiles is not None:
            self.tiles = self.tiles.map(rows)
        super().take_rows(rows)

    def note_rows(self) -> None:
        super().note_rows()
        if self.made is not None and self.made.packed is not None:
            self.made.packed.copy_(self._by_row("packed"))

    def _make(self) -> HeadTable:
        table = super()._make()
        if self.tiles is None:
            return table
        first_tiles, counts, tile = [], [], 0
        for group in self.groups:
            for _ in range(group.heads):
                first_tiles.append(tile if group.tiled else -1)
                counts.append(max(group.count, 1))
                tile += group.count
        layout, device = self.layout, table.keys.device
        return table._replace(
            tiles=self.tiles,
            first_tiles=on_device(first_tiles, device, torch.int32),
            packed=self._by_row("packed"),
            counts=on_device(counts, device, torch.int32) if layout.quantized_window else None,
            quantization=self.quantization,
            rotated_keys=layout.rotated_keys,
            rotated_values=layout.rotated_values,
            matrix=rotation(table.keys.shape[2], torch.float32, device) if layout.rotated_values else None,
        )

    def pack(self, settled: int) -> None:
        if not any(group.due() for group in self.tiled):
            return
        if self.layout.round_keys is not None:  # which kernels do not know
            for group in self.tiled:
                group.pack()
            self.note_rows()
        else:
            from . import kv_pack  # a checkpoint may lack kernels

            kv_pack.flush_due(self.tiled, self.table(), settled)

    def runs(self) -> list[HeadGroup]:
        return [] if self.tiled else super().runs()

    def rotated_query(self, query: torch.Tensor) -> torch.Tensor:
        return rotated(query, self.layout.rotated_keys * query.shape[1] // self.layout.heads)

    def rotated(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotated(key, self.layout.rotated_keys), rotated(value, self.layout.rotated_values)

    def rotated_back(self, output: torch.Tensor) -> torch.Tensor:
        return rotated(output, self.layout.rotated_values * output.shape[1] // self.layout.heads, back=True)


def with_rounding(layout: KVLayout, config: Any) -> KVLayout:
    """The layout of a config with the factors by which keys are rounded, where they are rounded by the queries.

    Raises:
        ValueError: this checkpoint was converted without their code, or its file of factors does not fit.
    """
    if not any(layer.rounded_by_queries for layer in layout.layers):
        return layout
    try:
        from . import kv_rounding
    except ImportError as error:
        raise ValueError(
            "config.json rounds keys by the queries, and this checkpoint was converted without their code; convert the "
            "original model with --kv-rounding queries"
        ) from error
    return kv_rounding.with_factors(layout, config.name_or_path, getattr(config, "_commit_hash", None))


def requested_quantization(cache_config: dict | None, config: Any) -> Quantization:
    """What `generate(cache_implementation="quantized", cache_config=...)` asks for, in the terms of transformers.

    `nbits`, `q_group_size`, `residual_length`, and `axis_key` and `axis_value` as the `backend` means them: its default
    axes are one scale per token. What is left out is as the config says, 4 bits if it says nothing.

    Raises:
        ValueError: an unknown key, or a value that this cache cannot have.
    """
    cache_config = cache_config or {}
    known_keys = {"backend", "nbits", "q_group_size", "residual_length", "axis_key", "axis_value"}
    if unknown_keys := sorted(set(cache_config) - known_keys):
        raise ValueError(
            f"cache_config has {', '.join(unknown_keys)}; this checkpoint's cache knows {', '.join(sorted(known_keys))}"
        )
    backend = str(cache_config.get("backend", "quanto")).lower()
    per_token = {"quanto": 0, "hqq": 1}.get(backend)  # axes of a scale for each token
    if per_token is None:
        raise ValueError(f"cache_config has the backend {backend!r}; quanto and hqq are known")
    layout = KVLayout.from_config(config)
    if len({layer.quantization for layer in layout.layers}) > 1 and "nbits" not in cache_config:
        raise ValueError(
            "cache_config: the layers of this checkpoint differ in bits; give nbits, or leave cache_implementation out"
        )
    by_bits = {layer.quantization.bits: layer.quantization for layer in layout.layers if layer.quantization}
    requested_bits = Widths.of(cache_config.get("nbits")).bits
    default = by_bits.get(requested_bits, layout.quantization or Quantization(4))
    all_rounded = all(layer.rounded_by_queries for layer in layout.layers if layer.full)
    scheme = default.scheme
    if "axis_key" in cache_config:
        scheme = "per-token" if cache_config["axis_key"] == per_token else "kivi"
    if cache_config.get("axis_value", per_token) != per_token:
        raise ValueError(f"cache_config: values have a scale per token, which is axis_value {per_token} of {backend}")
    bits = default.bits if requested_bits is None else requested_bits
    same_codes = (bits, scheme) == (default.bits, default.scheme)
    return Quantization(
        bits=bits,
        scheme=scheme,
        group_size=cache_config.get("q_group_size", default.group_size),
        residual=cache_config.get("residual_length", default.residual),
        streaming=default.streaming,
        sink=default.sink,
        rotate=default.rotate if same_codes else None,
        clip=default.clip if same_codes else None,
        rounding=default.rounding if same_codes and all_rounded else NEAREST,
    )
