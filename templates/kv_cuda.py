"""Attention on CUDA: the functions of `kv_torch` with Triton kernels, or flash attention and SDPA where they apply."""

import functools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from . import kv_decode, kv_store
from .kv_cache import KVLayerCache
from .kv_heads import HeadGroup
from .kv_layout import LayerLayout
from .kv_prefill import Span, Window, prefill, prefill_with_lse
from .kv_softmax import Scoring, Skipped, first_positions

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None

KERNELS = True  # whether budgeted heads select and move tokens by kernels


@functools.cache
def has_tensor_cores(device: torch.device) -> bool:
    """Whether the kernels are made for a device: Ampere and later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def decodes(layer: KVLayerCache) -> bool:
    """Always: kernels decode every layer."""
    return True


def decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: KVLayerCache, scoring: Scoring
) -> torch.Tensor:
    """Store one token per row and attend from it, heads of all kinds together: [batch, query_heads, 1, head_dim].

    Nothing here waits for the device. What changes from step to step is in tensors that stay, but for the launch that
    packs tiles: it comes only in steps where some are due.
    """
    layer.pack()
    table = layer.storage.table()
    columns = layer.columns.on(query.device)
    rotated_query = kv_store.append(table, columns, query[:, :, 0], key, value)
    for heads in layer.heads:
        heads.watch_step(columns, rotated_query[:, :, None])
    layer.advance(1)
    return kv_decode.decode(rotated_query, table, columns, scoring)[:, :, None]


def decode_stored(query: torch.Tensor, layer: KVLayerCache, scoring: Scoring) -> torch.Tensor:
    """Attend from a token per row that `decode` has stored."""
    table, rotated_query = layer.storage.table(), layer.storage.rotated_query(query)
    return kv_decode.decode(rotated_query[:, :, 0], table, layer.columns.on(query.device), scoring)[:, :, None]


def causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, skipped: Skipped, scoring: Scoring
) -> torch.Tensor:
    """As `kv_softmax.causal`: flash attention if installed, SDPA where nothing is padded, the kernel otherwise."""
    past = keys.shape[2] - query.shape[2]
    if torch.is_tensor(skipped) or skipped:
        return prefill(query, keys, values, Span(past, _padding(skipped, query)), scoring)
    if flash_attn_func is not None and query.dtype in (torch.float16, torch.bfloat16) and scoring.sinks is None:
        states = (part.transpose(1, 2) for part in (query, keys, values))
        softcap = {"softcap": scoring.softcap} if scoring.softcap else {}
        return flash_attn_func(*states, softmax_scale=scoring.scale, causal=True, **softcap).transpose(1, 2)
    if scoring.explicit or query.dtype == torch.float32:  # there, SDPA has a mask of all pairs
        return prefill(query, keys, values, Span(past), scoring)
    mask = causal_lower_right(query.shape[2], keys.shape[2]) if past else None
    return F.scaled_dot_product_attention(
        query, keys, values, mask, is_causal=not past, scale=scoring.scale, enable_gqa=True
    )


def causal_with_lse(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, skipped: Skipped, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kv_softmax.causal_with_lse`."""
    span = Span(keys.shape[2] - query.shape[2], _padding(skipped, query))
    return prefill_with_lse(query, keys, values, span, scoring)


def after_past(query: torch.Tensor, group: HeadGroup, past: int, scoring: Scoring) -> torch.Tensor:
    """As `kv_softmax.after_past`."""
    stop, skipped = past + query.shape[2], group.skipped
    if not torch.is_tensor(skipped) and skipped <= past:  # rows alike: by column from there on
        return causal(query, group.keys[:, :, : stop - skipped], group.values[:, :, : stop - skipped], 0, scoring)
    span = Span(past, _padding(skipped, query), first=None)
    return prefill(query, group.keys[:, :, :stop], group.values[:, :, :stop], span, scoring)


def over_block(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, counts: list[int] | None, scoring: Scoring
) -> Iterator[tuple[tuple[slice, ...], tuple[torch.Tensor, torch.Tensor]]]:
    """As `kv_softmax.over_block`."""
    for row, count in enumerate(counts or [keys.shape[2]]):
        rows = slice(row, row + 1) if counts else slice(None)
        if count:
            block, span = (keys[rows, :, :count], values[rows, :, :count]), Span(count, first=None, limit=count)
            yield (rows,), prefill_with_lse(query[rows], *block, span, scoring)


def streaming_from_start(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    skipped: Skipped,
    layout: LayerLayout,
    scoring: Scoring,
) -> torch.Tensor:
    """As `kv_softmax.streaming_from_start`."""
    if past := keys.shape[2] - query.shape[2]:
        sinks = first_positions(keys, values, skipped, layout.sink)
        past_states, new_states = (
            [states[:, :, part] for states in (keys, values)] for part in (slice(past), slice(past, None))
        )
        return streaming(query, sinks, past_states, new_states, past, skipped, layout, scoring)
    window = Window(layout.sink, layout.recent)
    return prefill(query, keys, values, Span(0, _padding(skipped, query)), scoring, window)


def streaming(
    query: torch.Tensor,
    sinks: Sequence[torch.Tensor],
    window: Sequence[torch.Tensor],
    new_states: Sequence[torch.Tensor],
    past: int,
    skipped: Skipped,
    layout: LayerLayout,
    scoring: Scoring,
) -> torch.Tensor:
    """As `kv_softmax.streaming`."""
    keys, values = (torch.cat(states, 2) for states in zip(window, new_states, strict=True))
    span = Span(past, _padding(skipped, query), first=past - window[0].shape[2])
    return prefill(query, keys, values, span, scoring, Window(layout.sink, layout.recent, sinks))


def _padding(skipped: Skipped, query: torch.Tensor) -> torch.Tensor | None:
    """Columns that each row skips, int [batch], or None where none does."""
    if torch.is_tensor(skipped):
        return skipped
    return torch.full((len(query),), skipped, device=query.device) if skipped else None
