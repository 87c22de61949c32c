"""Attention in plain torch: of one token per row, head group by head group, or of several as kv_softmax.py has it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from . import kv_softmax
from .kv_cache import KVLayerCache
from .kv_kind import shares
from .kv_softmax import Scoring, Span, Window, blocks, by_column, by_position, causal, masked_blocks, query_blocks

KERNELS = False  # whether budgeted heads select and move tokens by kernels


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
            keys = keys.narrow(2, 0, stop)
            values = values.narrow(2, 0, stop)
        folded_query = group_query.reshape(batch, group_heads, share, head_dim)
        output = F.scaled_dot_product_attention(folded_query, keys, values, scale=scale)
        outputs.append(output.reshape(batch, 1, group_heads * share, head_dim))
    layer.advance(1)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


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


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    span: Span,
    scoring: Scoring,
    window: Window | None = None,
) -> torch.Tensor:
    """Causal attention of several tokens per row, over heads of one kind.

    Args:
        query: [batch, query_heads, tokens, head_dim], at columns past, past + 1, ... of `span`.
        keys, values: [batch, kv_heads, n, head_dim], which lie as `span` says.
        window: of streaming heads; None: full heads.

    Returns:
        [batch, query_heads, tokens, head_dim].
    """
    assert span.limit is None  # which only `attend_with_lse` has
    if window is not None:
        return kv_softmax.streaming(query, keys, values, span, scoring, window)
    if span.first is None:
        return blocks(query, keys, values, span.past, by_position(span.padding), scoring)
    return causal(query, keys, values, span.padding, scoring)


def attend_with_lse(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over full heads, or a block of their past, with the log-sum-exp of the scores, without sinks.

    Returns:
        That of `attend`; and float32 [batch, query_heads, tokens].
    """
    if span.limit is None:
        visible = by_column(span.padding) if span.first is not None else by_position(span.padding)
        parts = masked_blocks(query, keys, values, span.past, visible, explicit=True)
    else:
        queries = query_blocks(query, keys.shape[2], explicit=True, kv_heads=keys.shape[1])
        parts = ((query[:, :, rows], keys, values, None) for rows in queries)
    outputs, sums = zip(*(kv_softmax.attend_with_lse(*part, scoring) for part in parts), strict=True)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


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
