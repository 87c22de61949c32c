"""Attention over full, streaming and budgeted heads, with this model's cache or without one.

A full head sees every earlier token of its row. A streaming head at position i sees position j <= i when j < sink or
i - j < recent; positions count a row's tokens without its left padding. One-shot, chunked and token-by-token use give
the same result; of a quantised cache, but for what quantising earlier tokens changes.
"""

from types import ModuleType

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from . import kv_torch
from .kv_cache import Handle, KVLayerCache
from .kv_columns import check_padding, leading_padding
from .kv_heads import HeadGroup, QuantisedGroup
from .kv_layout import LayerLayout
from .kv_parallel import full_heads_first, in_blocks, own_layout

try:
    from . import kv_cuda
except ImportError:  # no triton: torch does everything
    kv_cuda = None

# one registry entry per copy of this module: two converted checkpoints may live in one process
NAME = "kvsurgery_" + __name__.replace(".", "_")


def padding_mask(batch_size, *args, kv_length, attention_mask=None, q_length=None, cache_position=None, **kwargs):
    """Reduce a 2D padding mask [batch, tokens] to the left padding of each row, int64 [batch], or None without any.

    Only forwards without a cache use it: a `KVSurgeryCache` keeps the padding itself. There, right padding is harmless,
    since no token sees a later one. Transformers 4 passes `cache_position`, later versions `q_length`.

    Raises:
        ValueError: the mask has holes.
    """
    tokens = q_length if cache_position is None else cache_position.shape[0]
    if attention_mask is None or tokens == 1 or tokens != kv_length:  # what follows something has a cache
        return None
    padded_left, _ = check_padding(attention_mask)
    return leading_padding(attention_mask) if padded_left else None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | Handle,
    value: torch.Tensor | Handle,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function that stock attention modules call.

    Args:
        module: the attention module, whose `kv_layout` is its `LayerLayout`, of the heads of all processes.
        query: [batch, query_heads, tokens, head_dim], after RoPE; the query heads of a KV head are adjacent.
        key, value: what `KVSurgeryCache.update` returned; without a cache [batch, kv_heads, tokens, head_dim].
        attention_mask: left padding of each row, int64 [batch]; read without a cache only.
        scaling: factor of the scores; default head_dim ** -0.5.
        softcap: bound c of scores, c * tanh(score / c) (Gemma 2).

    Returns:
        [batch, tokens, query_heads, head_dim], and no attention weights.

    Raises:
        TypeError: a cache of another class, or a mask that is not two-dimensional.
        RuntimeError: heads are split in a way that the layout does not know (tensor parallelism).
    """
    layout, layer = module.kv_layout, None
    if isinstance(key, Handle):
        layer, key, value = key
        layout = layer.layout
    elif key.shape[2] != query.shape[2]:
        raise TypeError("this model runs with its own KVSurgeryCache, or without a cache")
    elif attention_mask is not None and attention_mask.ndim != 1:
        raise TypeError("attention masks must be two-dimensional padding masks")
    own = own_layout(layout, key.shape[1], module)
    if layer is not None and own is not layout:
        layer.hold(own, key)
    options = {"scaling": scaling, "softcap": softcap, "dropout": dropout}
    path = _path(query, key, value, dropout)
    if layer is not None and not isinstance(layer, KVLayerCache):  # it reads a long prompt
        output = layer.attend(query, key, value, path, options)
        return output.transpose(1, 2).contiguous(), None
    if own.scattered:
        query, key, value = (full_heads_first(states, own) for states in (query, key, value))
    if layer is None:
        output = _without_cache(query, key, value, attention_mask, own, path, options)
    else:
        layer.make_room(query.shape[2])
        if query.shape[2] == 1 and layer.ready and path is not kv_torch:
            output = kv_cuda.decode(query, key, value, layer, scaling, softcap).transpose(1, 2)
        else:
            output = _with_cache(query, key, value, layer, path, options)
    if own.scattered:
        output = in_blocks(output, own)
    return output.transpose(1, 2).contiguous(), None


def _path(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> ModuleType:
    """Where attention is computed: kernels on CUDA, without gradients and dropout; plain torch otherwise."""
    if kv_cuda is None or not query.is_cuda or dropout or _tracked(query, key, value):
        return kv_torch
    fits = query.dtype in (torch.float16, torch.bfloat16, torch.float32) and query.shape[-1] <= 256
    return kv_cuda if fits and kv_cuda.has_tensor_cores(query.device) else kv_torch


def _tracked(*states: torch.Tensor) -> bool:
    """Whether gradients are wanted of what these states become."""
    return torch.is_grad_enabled() and any(part.requires_grad for part in states)


def _without_cache(query, key, value, padding, layout: LayerLayout, path: ModuleType, options: dict) -> torch.Tensor:
    """All heads over their own input; nothing is selected, nothing is quantised."""
    skipped, outputs = 0 if padding is None else padding, []
    heads = [layout.heads - layout.streaming, layout.streaming]
    whole, streaming = _split(query, key, value, heads)
    if heads[0]:
        outputs.append(path.causal(*whole, skipped, options))
    if heads[1]:
        outputs.append(path.streaming_from_start(*streaming, skipped, layout, options))
    return torch.cat(outputs, 1)


def _with_cache(query, key, value, layer: KVLayerCache, path: ModuleType, options: dict) -> torch.Tensor:
    """Store the input and attend from it, head group by head group."""
    layout, outputs = layer.layout, []
    *parts, budgeted = _split(query, key, value, [layout.full, layout.streaming, len(layout.budgets)])
    for states, group in zip(parts, (layer.full, layer.streaming), strict=True):
        if group.heads:
            outputs.append(_of_group(*states, group, layer, layer.seen, path, options))
    if layout.budgets:
        outputs.append(_of_budgeted(*budgeted, layer, path, options))
    layer.advance(query.shape[2])
    return torch.cat(outputs, 1)


def _split(query, key, value, heads: list[int]):
    """Queries, keys and values of so many KV heads each."""
    of_queries = [count * query.shape[1] // key.shape[1] for count in heads]
    return zip(query.split(of_queries, 1), key.split(heads, 1), value.split(heads, 1), strict=True)


def _of_group(query, key, value, group: HeadGroup, layer: KVLayerCache, past: int, path, options) -> torch.Tensor:
    """Store columns from `past` on of one group of heads, and attend from them."""
    layout, tracked = layer.layout, _tracked(query, key, value)
    if query.shape[2] == 1 and not tracked and not (group is layer.streaming and layout.quantised_window):
        layer.store(group, past, key, value)
        return kv_torch.decode(query, group, past + 1, options)
    if group is layer.streaming:
        window = group.window(past, min(layout.recent - 1, past)) if past else None
        layer.store(group, past, key, value)
        if not past:
            return path.streaming_from_start(query, key, value, group.skipped, layout, options)
        sinks = tuple(states[:, :, : layout.sink] for states in (group.keys, group.values))
        if tracked:  # autograd keeps what it saw, and storage changes
            sinks = tuple(states.clone() for states in sinks)
        return path.streaming(query, sinks, window, (key, value), past, group.skipped, layout, options)
    if past and not tracked and not isinstance(group, QuantisedGroup):
        layer.store(group, past, key, value)
        return path.after_past(query, group, past, options)
    if past:
        output = _over_tiles(query, key, value, group, past, path, options)
    else:
        output = path.causal(query, key, value, group.skipped, options)
    layer.store(group, past, key, value)
    return output


def _over_tiles(query, key, value, group: HeadGroup, past: int, path: ModuleType, options: dict) -> torch.Tensor:
    """Queries of full heads at columns from `past` on, before their tokens are stored; for quantised ones above all.

    They see the tiles dequantised, what is not packed yet as it is, and their own tokens' keys as they came.
    """
    *states, skipped = kv_torch.near(key, value, group, past)
    if not max(group.packed):
        return path.causal(query, *states, skipped, options)
    output, lse = path.causal(query, *states, skipped, options, with_lse=True)
    output = output.float()  # rounded once, not at every block
    for block in group.blocks():
        for part, result in path.over_block(query, *block, options):
            output[part], lse[part] = kv_torch.merge((output[part], lse[part]), result)
    return output.to(query.dtype)


def _of_budgeted(query, key, value, layer: KVLayerCache, path: ModuleType, options: dict) -> torch.Tensor:
    """Queries of budgeted heads, and their storage: the whole prompt while it comes in, then what was selected.

    One forward may hold the prompt and tokens after it (assisted decoding); those see the selection only.
    """
    heads, past, tokens = layer.budgeted, layer.seen, query.shape[2]
    cut = 0 if heads.selected else min(heads.prompt - past, tokens)
    outputs = []
    if cut:
        asking, whole = query[:, :, :cut], (key[:, :, :cut], value[:, :, :cut])
        if past or cut < heads.prompt:
            heads.wait(past, *whole)
        if past:
            whole = tuple(states[:, :, : past + cut] for states in (heads.waiting.keys, heads.waiting.values))
        outputs.append(path.causal(asking, *whole, layer.full.skipped, options))
        heads.observe(past, asking)
        if past + cut == heads.prompt:
            scaling = options["scaling"] or query.shape[-1] ** -0.5
            kept = heads.select(whole[0], layer.columns.pads, scaling, options["softcap"])
            layer.table = None  # rows skip other columns
            path.compact(*whole, kept, layer)
    if cut < tokens:
        states = (part[:, :, cut:] for part in (query, key, value))
        later = [
            _of_group(*of_head, group, layer, past + cut, path, options)
            for group, of_head in zip(heads.groups, _split(*states, [1] * len(heads.groups)), strict=True)
        ]
        outputs.append(torch.cat(later, 1))
    return torch.cat(outputs, 2)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)
