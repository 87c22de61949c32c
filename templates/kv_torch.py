"""One token per row in plain torch, head group by head group; kv_softmax.py has attention of several."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from .kv_cache import KVLayerCache
from .kv_codes import key_products, rotated, weighted_values
from .kv_columns import on_device
from .kv_heads import HeadGroup
from .kv_layout import TILE, LayerLayout
from .kv_softmax import (  # noqa: F401  # a path has them
    Scoring,
    Skipped,
    after_past,
    attend,
    causal,
    causal_with_lse,
    folded,
    over_block,
    streaming,
    streaming_from_start,
)
from .kv_tiles import QuantizedGroup


class AttentionPath(Protocol):
    """Where attention is computed: this module or `kv_cuda`, which have these functions."""

    def decodes(self, layer: KVLayerCache) -> bool: ...
    def decode(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: KVLayerCache, scoring: Scoring
    ) -> torch.Tensor: ...
    def decode_stored(self, query: torch.Tensor, layer: KVLayerCache, scoring: Scoring) -> torch.Tensor: ...
    def causal(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, skipped: Skipped, scoring: Scoring
    ) -> torch.Tensor: ...
    def causal_with_lse(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, skipped: Skipped, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def after_past(self, query: torch.Tensor, group: HeadGroup, past: int, scoring: Scoring) -> torch.Tensor: ...
    def over_block(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        counts: list[int] | None,
        scoring: Scoring,
    ) -> Iterator[tuple[tuple[slice, ...], tuple[torch.Tensor, torch.Tensor]]]: ...
    def streaming_from_start(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        skipped: Skipped,
        layout: LayerLayout,
        scoring: Scoring,
    ) -> torch.Tensor: ...
    def streaming(
        self,
        query: torch.Tensor,
        sinks: Sequence[torch.Tensor],
        window: Sequence[torch.Tensor],
        new_states: Sequence[torch.Tensor],
        past: int,
        skipped: Skipped,
        layout: LayerLayout,
        scoring: Scoring,
    ) -> torch.Tensor: ...


def step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: KVLayerCache, scale: float | None
) -> torch.Tensor:
    """Store one token per row of a layer that has `runs` and attend from it: [batch, 1, query_heads, head_dim].

    `decode` does the same for any layer. Here the host has little to do, of which a small model's step consists: the
    weights of a layer take the place of its code and data in the processor's caches. `make_room` has been called.
    """
    column, (batch, query_heads, _, head_dim) = layer.seen, query.shape
    heads, first_head, outputs = key.shape[1], 0, []
    share = query_heads // heads
    for group in layer.runs:
        keys, values, group_query, position = group.keys, group.values, query, column - group.skips[0]
        group_heads, slots, slot, stop = keys.shape[1], keys.shape[2], group.slot(position), position + 1
        if group_heads == heads:
            keys.narrow(2, slot, 1).copy_(key)
            values.narrow(2, slot, 1).copy_(value)
        else:
            group_query = query.narrow(1, first_head * share, group_heads * share)
            keys.narrow(2, slot, 1).copy_(key.narrow(1, first_head, group_heads))
            values.narrow(2, slot, 1).copy_(value.narrow(1, first_head, group_heads))
            first_head += group_heads
        if stop < slots:
            keys, values = keys.narrow(2, 0, stop), values.narrow(2, 0, stop)
        folded_query = group_query.reshape(batch, group_heads, share, head_dim)
        output = F.scaled_dot_product_attention(folded_query, keys, values, scale=scale)
        outputs.append(output.reshape(batch, 1, group_heads * share, head_dim))
    layer.advance(1)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def decodes(layer: KVLayerCache) -> bool:
    """Whether `decode` runs over a layer: where windows are in tiles, a token attends as several do."""
    return not layer.layout.quantized_window


def decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: KVLayerCache, scoring: Scoring
) -> torch.Tensor:
    """Store one token per row and attend from it, head group by head group: [batch, query_heads, 1, head_dim]."""
    layout, column = layer.layout, layer.seen
    if layout.rotated_keys or layout.rotated_values:  # all that is stored is
        query = rotated(query, layout.rotated_keys * query.shape[1] // layout.heads)
        key, value = rotated(key, layout.rotated_keys), rotated(value, layout.rotated_values)
    if held_heads := layer.held:
        if held_heads.due == column:
            held_heads.renew(column, layer)
        for group in held_heads.groups:
            group.settled = column
        held_heads.watch(column, query[:, -len(held_heads.groups) * query.shape[1] // layout.heads :])
    heads = [group.heads for group in layer.present]
    for group, keys, values in zip(layer.present, _split(key, heads), _split(value, heads), strict=True):
        group.store(column, keys, values)
    layer.advance(1)
    return _decode_groups(query, layer, scoring)


def decode_stored(query: torch.Tensor, layer: KVLayerCache, scoring: Scoring) -> torch.Tensor:
    """The same for a token per row that `decode` has stored."""
    layout = layer.layout
    return _decode_groups(rotated(query, layout.rotated_keys * query.shape[1] // layout.heads), layer, scoring)


def _decode_groups(query: torch.Tensor, layer: KVLayerCache, scoring: Scoring) -> torch.Tensor:
    """Attention of the newest token of each row, whose query is as keys are stored, to all groups."""
    layout, share = layer.layout, query.shape[1] // layer.layout.heads
    sizes = [share * group.heads for group in layer.present]
    parts = zip(layer.present, _split(query, sizes), scoring.split(sizes), strict=True)
    outputs = [
        decode_group(group_query, group, layer.seen, layout, group_scoring)
        for group, group_query, group_scoring in parts
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return rotated(output, layout.rotated_values * share, back=True) if layout.rotated_values else output


def _split(states: torch.Tensor, heads: list[int]) -> Sequence[torch.Tensor]:
    """Runs of so many heads of [batch, heads, ...]; where there is one, that takes no time."""
    return (states,) if len(heads) == 1 else states.split_with_sizes(heads, 1)


def decode_group(
    query: torch.Tensor, group: HeadGroup, seen: int, layout: LayerLayout, scoring: Scoring
) -> torch.Tensor:
    """One query per row, of column seen - 1, over everything that is stored; its own token is stored already."""
    keys, values, allowed = group.keys, group.values, None
    slots = max(1, min(seen - min(group.skips), keys.shape[2]))
    if isinstance(group, QuantizedGroup) and max(group.packed):
        return _decode_tiles(query, group, seen, slots, scoring)
    if torch.is_tensor(group.skipped) or group.margin or layout.chunked:
        lengths = group.lengths(seen).clamp(min=1)  # padding sees itself: no empty softmax
        position, newest = group.positions(lengths, slots, group.ring), lengths - 1
        allowed = (position >= 0) & (position <= newest)
        if group.sink is not None and not isinstance(group, QuantizedGroup):
            allowed = allowed & ((position < group.sink) | layout.in_window(newest, position))
        allowed = allowed[:, None]
    return attend(query, keys.narrow(2, 0, slots), values.narrow(2, 0, slots), allowed, scoring)


def _decode_tiles(query: torch.Tensor, group: QuantizedGroup, seen: int, slots: int, scoring: Scoring) -> torch.Tensor:
    """The same where tokens are in tiles: over slots and the tiles' codes, in float32. Nothing is dequantized."""
    dtype, tiles, bits = torch.promote_types(query.dtype, torch.float32), group.packed_tiles(), group.quantization.bits
    folded_query, width = folded(query, group.keys, None)[0].to(dtype), query.shape[3]
    batch, heads, count = tiles.key_codes.shape[:3]
    room = folded_query.new_empty(batch * heads * min(count, group.tiles_at_once(batch)) * TILE * width)
    products = [folded_query @ group.keys[:, :, :slots].to(dtype).mT, key_products(folded_query, tiles, bits, room)]
    scores = scoring.scores(torch.cat(products, 3))
    for rows, spans in group.unseen(seen, slots, count * TILE):
        for begin, end in spans:
            scores[rows, :, :, begin:end] = float("-inf")
    weights = F.dropout(scores.softmax(3), scoring.dropout)
    output = weights[..., :slots] @ group.values[:, :, :slots].to(dtype)
    output += weighted_values(weights[..., slots:], tiles, bits, room)
    output = output.view(query.shape)
    if scoring.sinks is not None:
        output = scoring.sunk(output, scores.logsumexp(3).view(query.shape[:3]))
    return output.to(query.dtype)


def unpacked_columns(
    keys: torch.Tensor, values: torch.Tensor, group: HeadGroup, past: int
) -> tuple[torch.Tensor, torch.Tensor, Skipped]:
    """What is not in tiles, by column, the arriving tokens last: keys and values, and the columns that rows skip of it.

    `keys` and `values` [batch, kv_heads, tokens, head_dim] are of the columns from `past` on. Sinks come right before
    the tokens after the tiles.
    """
    first_columns = [skip + packed for skip, packed in zip(group.skips, group.packed, strict=True)]
    past_columns = max(past - min(first_columns), 0)
    place = torch.arange(past - past_columns, past, device=keys.device) - on_device(first_columns, keys.device)[:, None]
    after_tiles = place + on_device(group.packed, keys.device)[:, None]
    slot = group.slot(torch.where(place < (group.sink or 0), place, after_tiles).clamp(min=0))
    states = (torch.cat(parts, 2) for parts in zip(group.take(slot), (keys, values), strict=True))
    skips = [first_column - (past - past_columns) for first_column in first_columns]
    rows_agree = len(set(skips)) == 1
    keys, values = states
    return keys, values, skips[0] if rows_agree else on_device(skips, keys.device)
