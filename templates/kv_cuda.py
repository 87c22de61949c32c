"""Attention on CUDA: the functions of `kv_torch` with Triton kernels, or flash attention and SDPA where they apply."""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from . import kv_decode, kv_store
from .kv_cache import KVLayerCache
from .kv_prefill import prefill, prefill_with_lse
from .kv_softmax import Scoring, Span, Window, rows_apart

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None

LONG = 8192  # tokens of padded rows for which fused attention should gain more than waiting takes; not timed
KERNELS = True  # whether budgeted heads select and move tokens by kernels


@functools.cache
def has_tensor_cores(device: torch.device) -> bool:
    """Whether the kernels are made for a device: Ampere and later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


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
    rotated_query = kv_store.append(table, columns, query.squeeze(2), key, value)
    for heads in layer.heads:
        heads.watch_step(columns, rotated_query)
    layer.advance(1)
    return kv_decode.decode(rotated_query, table, columns, scoring).unsqueeze(2)


def decode_stored(query: torch.Tensor, layer: KVLayerCache, scoring: Scoring) -> torch.Tensor:
    """Attend from a token per row that `decode` has stored."""
    table = layer.storage.table()
    rotated_query = layer.storage.rotated_query(query).squeeze(2)
    return kv_decode.decode(rotated_query, table, layer.columns.on(query.device), scoring).unsqueeze(2)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    span: Span,
    scoring: Scoring,
    window: Window | None = None,
) -> torch.Tensor:
    """Causal attention of several tokens per row, by flash attention, SDPA where nothing is padded, or a kernel.

    Arguments and result are those of `kv_torch.attend`.
    """
    assert span.limit is None  # which only `attend_with_lse` has
    if window is not None:
        assert not window.chunked  # the kernels know no chunks
        if window.before is not None:
            span = span._replace(first=span.past - window.before[0].shape[2])
            keys, values = (torch.cat(parts, 2) for parts in zip(window.before, (keys, values), strict=True))
        return prefill(query, keys, values, span, scoring, window)
    past, skipped = span.past, span.padding
    if span.first is None and not torch.is_tensor(skipped) and skipped <= past:  # rows alike: by column from there on
        stop = past + query.shape[2] - skipped  # there may be fewer slots than columns
        return attend(query, keys[:, :, :stop], values[:, :, :stop], Span(past - skipped), scoring)
    # flash attention knows soft caps but no sinks, SDPA neither; in float32, SDPA has a mask of all pairs
    unfused = query.dtype == torch.float32 or scoring.sinks is not None or (scoring.softcap and not flash_attn_func)
    if not unfused and torch.is_tensor(skipped) and not past and query.shape[2] >= LONG:
        return rows_apart(functools.partial(attend, span=Span(0), scoring=scoring), skipped, query, keys, values)
    if unfused or span.first is None or torch.is_tensor(skipped) or skipped:
        return prefill(query, keys, values, span, scoring)
    if flash_attn_func is not None:
        states = (part.transpose(1, 2) for part in (query, keys, values))
        softcap = {"softcap": scoring.softcap} if scoring.softcap else {}
        return flash_attn_func(*states, softmax_scale=scoring.scale, causal=True, **softcap).transpose(1, 2)
    mask = causal_lower_right(query.shape[2], keys.shape[2]) if past else None
    return F.scaled_dot_product_attention(
        query, keys, values, mask, is_causal=not past, scale=scoring.scale, enable_gqa=True
    )


def attend_with_lse(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over full heads, or a block of their past, with the log-sum-exp of the scores, without sinks.

    Arguments and results are those of `kv_torch.attend_with_lse`.
    """
    return prefill_with_lse(query, keys, values, span, scoring)
