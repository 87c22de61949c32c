"""One token per row in plain torch, head group by head group; kv_softmax.py has attention of several."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from .kv_cache import KVLayerCache
from .kv_heads import HeadGroup
from .kv_kind import shares
from .kv_layout import LayerLayout
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

KERNELS = False  # whether budgeted heads select and move tokens by kernels


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
    column, groups, query = layer.seen, layer.storage.groups, layer.storage.rotated_query(query)
    key, value = layer.storage.rotated(key, value)
    counts = [heads.count(layer.layout) for heads in layer.heads]
    for heads, heads_query in zip(layer.heads, _split(query, shares(counts, query.shape[1])), strict=True):
        if heads.due == column:
            heads.renew(column)
        heads.settle(column)
        heads.watch(column, heads_query)
    counts = [group.heads for group in groups]
    for group, keys, values in zip(groups, _split(key, counts), _split(value, counts), strict=True):
        group.store(column, keys, values)
    layer.advance(1)
    layer.storage.note_rows()
    return _attend(query, layer, scoring)


def decode_stored(query: torch.Tensor, layer: KVLayerCache, scoring: Scoring) -> torch.Tensor:
    """Attend from a token per row that `decode` has stored."""
    return _attend(layer.storage.rotated_query(query), layer, scoring)


def _attend(query: torch.Tensor, layer: KVLayerCache, scoring: Scoring) -> torch.Tensor:
    """Attention of the newest token of each row, whose query is as keys are stored, to all groups."""
    groups = layer.storage.groups
    sizes = shares([group.heads for group in groups], query.shape[1])
    parts = zip(groups, _split(query, sizes), scoring.split(sizes), strict=True)
    outputs = [group.newest(part, layer.seen, layer.layout, part_scoring) for group, part, part_scoring in parts]
    return layer.storage.rotated_back(outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1))


def _split(states: torch.Tensor, heads: list[int]) -> Sequence[torch.Tensor]:
    """Runs of so many heads of [batch, heads, ...]; where there is one, that takes no time."""
    return (states,) if len(heads) == 1 else states.split_with_sizes(heads, 1)
