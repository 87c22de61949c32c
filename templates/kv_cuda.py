"""Attention on CUDA: what `kv_torch` has, through the Triton kernels, or flash attention and SDPA where they apply."""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from . import kv_append, kv_compact, kv_decode
from .kv_cache import KVLayerCache
from .kv_heads import HeadGroup
from .kv_layout import LayerLayout
from .kv_prefill import prefill

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None


@functools.cache
def has_tensor_cores(device: torch.device) -> bool:
    """Whether the kernels are made for a device: Ampere and later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def decode(query, key, value, layer: KVLayerCache, scaling: float | None, softcap: float | None) -> torch.Tensor:
    """Store one token per row and attend from it, heads of all kinds together: [batch, 1, query_heads, head_dim].

    Nothing here waits for the device. What changes from step to step is in tensors that stay, but for the launch that
    packs tiles: it comes only in steps where some are due.
    """
    pack(layer)
    table, quantised = layer.head_table(), {}
    if layer.tiles is not None:
        quantised = {"tiles": layer.tiles, "packed": table.packed, "first_tiles": table.first_tiles}
        quantised |= {"quantisation": layer.layout.quantisation, "counts": table.counts}
    lengths = layer.columns.on(query.device) - table.skipped
    kv_append.append(layer.keys, layer.values, key, value, table.offsets, lengths - 1, table.sinks, table.rings)
    layer.advance(1)
    heads = table.offsets, lengths, table.sinks, table.rings, table.recents
    output = kv_decode.decode(query[:, :, 0], layer.keys, layer.values, *heads, scaling, softcap, **quantised)
    return output[:, None]


def pack(layer: KVLayerCache) -> None:
    """Quantise the tiles that are due before the next token is stored; in most steps there are none."""
    while any(group.due() for group in layer.quantised):
        table = layer.head_table()
        settled = layer.columns.settled - table.skipped
        tiles = layer.tiles, table.packed, table.first_tiles, layer.layout.quantisation, table.counts
        kv_append.flush(layer.keys, layer.values, table.offsets, table.sinks, table.rings, settled, *tiles)
        for group in layer.quantised:
            group.note_packed()


def compact(keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor, layer: KVLayerCache) -> None:
    """As `kv_torch.compact`."""
    quantised, own = {}, slice(-kept.shape[1], None)
    if layer.tiles is not None:
        for group in layer.budgeted.groups:
            group.packed = [group.packable(row, max(keys.shape[2] - skip, 0)) for row, skip in enumerate(group.skips)]
    table = layer.head_table()
    if layer.tiles is not None:
        quantised = {"tiles": layer.tiles, "packed": table.packed[:, own], "first_tiles": table.first_tiles[own]}
        quantised["quantisation"] = layer.layout.quantisation
    heads = table.offsets[own], table.sinks[own], table.rings[own], table.skipped[:, own]
    kv_compact.compact(layer.keys, layer.values, keys, values, kept, *heads, **quantised)


def causal(query, keys, values, skipped, options: dict, with_lse: bool = False):
    """As `kv_torch.causal`: flash attention if it is installed, SDPA where nothing is padded, the kernel otherwise."""
    past, scores = keys.shape[2] - query.shape[2], _scores(options)
    if torch.is_tensor(skipped) or skipped or with_lse:
        return prefill(query, keys, values, past, _padding(skipped, query), **scores, with_lse=with_lse)
    if flash_attn_func is not None and query.dtype in (torch.float16, torch.bfloat16):
        states = (part.transpose(1, 2) for part in (query, keys, values))
        softcap = {"softcap": scores["softcap"]} if scores["softcap"] else {}
        return flash_attn_func(*states, softmax_scale=scores["scaling"], causal=True, **softcap).transpose(1, 2)
    if scores["softcap"] is not None or query.dtype == torch.float32:  # there, SDPA has a mask of all pairs
        return prefill(query, keys, values, past, **scores)
    mask = {"attn_mask": causal_lower_right(query.shape[2], keys.shape[2])} if past else {"is_causal": True}
    return F.scaled_dot_product_attention(query, keys, values, **mask, scale=scores["scaling"], enable_gqa=True)


def after_past(query: torch.Tensor, group: HeadGroup, past: int, options: dict) -> torch.Tensor:
    """As `kv_torch.after_past`."""
    stop, skipped = past + query.shape[2], group.skipped
    if not torch.is_tensor(skipped) and skipped <= past:  # rows alike: by column from there on
        return causal(query, group.keys[:, :, : stop - skipped], group.values[:, :, : stop - skipped], 0, options)
    keys, values, padding = group.keys[:, :, :stop], group.values[:, :, :stop], _padding(skipped, query)
    return prefill(query, keys, values, past, padding, first=None, **_scores(options))


def over_block(query, keys, values, counts: list[int] | None, options: dict):
    """As `kv_torch.over_block`."""
    for row, count in enumerate(counts or [keys.shape[2]]):
        part = slice(row, row + 1) if counts else slice(None)
        if count:
            block = keys[part, :, :count], values[part, :, :count]
            yield part, prefill(query[part], *block, count, first=None, limit=count, with_lse=True, **_scores(options))


def streaming_from_start(query, keys, values, skipped, layout: LayerLayout, options: dict) -> torch.Tensor:
    """As `kv_torch.streaming_from_start`."""
    sizes = {"sink": layout.sink, "recent": layout.recent}
    return prefill(query, keys, values, 0, _padding(skipped, query), **sizes, **_scores(options))


def streaming(query, sinks, window, own, past: int, skipped, layout: LayerLayout, options: dict) -> torch.Tensor:
    """As `kv_torch.streaming`."""
    columns = (torch.cat(states, 2) for states in zip(window, own, strict=True))
    sizes = {"sink": layout.sink, "recent": layout.recent, "first": past - window[0].shape[2], "sinks": sinks}
    return prefill(query, *columns, past, _padding(skipped, query), **sizes, **_scores(options))


def _padding(skipped: int | torch.Tensor, query: torch.Tensor) -> torch.Tensor | None:
    """Columns that each row skips, int [batch], or None where none does."""
    if torch.is_tensor(skipped):
        return skipped
    return torch.full((len(query),), skipped, device=query.device) if skipped else None


def _scores(options: dict) -> dict:
    return {"scaling": options["scaling"], "softcap": options["softcap"]}
