"""What the Triton kernels compute, in torch and row by row."""

import torch

from kvsurgery.templates.kv_codes import Tiles, dequantize, quantize, rotated
from kvsurgery.templates.kv_layout import EVERY, TILE
from kvsurgery.templates.kv_softmax import Scoring, Span, Window
from kvsurgery.templates.kv_storage import HeadTable


def append_reference(
    table: HeadTable, columns: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """What `append` does, token by token."""
    keys, values = rotated(keys, table.rotated_keys), rotated(values, table.rotated_values)
    for row, of_heads in enumerate((columns - 1 - table.skipped).tolist()):
        for head, position in enumerate(of_heads):
            if position >= 0:
                slot = table.offsets[head] + _slot(table, head, torch.tensor(position))
                table.keys[row, slot], table.values[row, slot] = keys[row, head, 0], values[row, head, 0]
    return rotated(query[:, :, None], table.rotated_keys * query.shape[1] // keys.shape[1])[:, :, 0]


def flush_reference(table: HeadTable, confirmed: torch.Tensor) -> None:
    """What `flush` does, head by head."""
    for row, of_heads in enumerate((confirmed - table.sinks).tolist()):
        for head, tokens in enumerate(of_heads):
            start = int(table.packed[row, head])
            if table.first_tiles[head] >= 0 and tokens - start >= table.quantization.residual + TILE:
                position = table.sinks[head] + torch.arange(start, start + TILE, device=confirmed.device)
                at = table.offsets[head] + _slot(table, head, position)
                place = start // TILE if table.counts is None else start // TILE % int(table.counts[head])
                made = quantize(table.keys[row, at], table.values[row, at], table.quantization)
                for part, own in zip(table.tiles, made, strict=True):
                    part[row, table.first_tiles[head] + place] = own
                table.packed[row, head] += TILE


def decode_reference(query: torch.Tensor, table: HeadTable, columns: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """What `decode` computes, row by row; tiles are dequantized in the query's precision."""
    out = torch.zeros_like(query)
    group = query.shape[1] // len(table.offsets)
    for row, of_heads in enumerate((columns - table.skipped).tolist()):
        for head, length in enumerate(of_heads):
            if length > 0:
                here = slice(head * group, (head + 1) * group)
                states = _visible(table, row, head, length, query.dtype)
                allowed = torch.ones(len(states[0]), dtype=torch.bool, device=query.device)
                sinks = None if scoring.sinks is None else scoring.sinks[here]
                out[row, here] = softmax(query[row, here], *states, allowed, scoring._replace(sinks=sinks))
    return rotated(out[:, :, None], table.rotated_values * group, back=True)[:, :, 0]


def _visible(table: HeadTable, row: int, head: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Keys and values of the tokens of a head that the newest of them sees."""
    sink, start = table.sinks[head], 0 if table.tiles is None else int(table.packed[row, head])
    position = torch.arange(length, device=sink.device)
    in_tiles = (position >= sink) & (position < sink + start)
    visible = (position < sink) | (length - 1 - position < table.recents[head])
    at = table.offsets[head] + _slot(table, head, position[visible & ~in_tiles])
    states = [table.keys[row, at], table.values[row, at]]
    if start:
        place = torch.arange(start // TILE, device=sink.device)
        own = table.first_tiles[head] + (place if table.counts is None else place % table.counts[head])
        key_codes, key_scales, value_codes, value_scales = table.tiles.map(lambda part: part[row, own])
        tiles = Tiles(key_codes, key_scales.to(dtype), value_codes, value_scales.to(dtype))
        tokens = position[visible & in_tiles] - sink
        parts = zip(dequantize(tiles, table.quantization.widths), states, strict=True)
        states = [torch.cat([old.flatten(0, 1)[tokens], rest]) for old, rest in parts]
    return states


def _slot(table: HeadTable, head: int, position: torch.Tensor) -> torch.Tensor:
    """Where a head stores positions, counted from its first slot."""
    sink, ring = table.sinks[head], table.rings[head].clamp(min=1)
    return torch.where(position < sink, position, sink + (position - sink) % ring)


def prefill_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    span: Span,
    scoring: Scoring,
    window: Window | None = None,
) -> torch.Tensor:
    """What `prefill` computes, with all keys and values by column from 0 on."""
    out = torch.zeros_like(query)
    group, tokens = query.shape[1] // keys.shape[1], query.shape[2]
    sink, recent = (window.sink, window.recent) if window else (0, EVERY)
    for row in range(len(query)):
        pad = int(span.padding[row]) if torch.is_tensor(span.padding) else span.padding
        column = torch.arange(span.past + tokens, device=query.device)
        own, age = column[span.past :, None] >= pad, column[span.past :, None] - column
        allowed = (age >= 0) & (column >= pad) & ((age < recent) | (column - pad < sink))
        part = (states[row].repeat_interleave(group, 0) for states in (keys, values))
        # a query in the padding sees itself, for a softmax that is not empty, and is dropped
        result = softmax(query[row], *part, allowed | (age == 0), scoring)
        out[row] = torch.where(own, result, 0)
    return out


def softmax(query, keys, values, allowed: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Attention of [..., m, head_dim] over [..., n, head_dim] in the inputs' precision; queries see something.

    Learned sinks, one for each entry of the queries' first dimension, are a column more of the softmax.
    """
    scores = scoring.scores(query @ keys.mT).masked_fill(~allowed, float("-inf"))
    if scoring.sinks is None:
        return scores.softmax(-1) @ values
    column = scoring.sinks.to(scores.dtype).view(-1, *[1] * (scores.ndim - 1)).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ values
