"""Attention over full, streaming and budgeted heads, with this model's cache or without one.

A full head sees every earlier token of its row. A streaming head at position i sees position j <= i when j < sink or
i - j < recent; positions count a row's tokens without its left padding. One-shot, chunked and token-by-token use give
the same result; of a quantized cache, but for what quantizing earlier tokens changes.

With tensor parallelism, transformers gives every process an equal run of heads. A checkpoint converted for T processes
has the heads of a layer in T blocks of equal size, in each block the full heads first, so that a process gets whole
blocks. Where it gets several, its full heads are brought together before attention, and its output back in order.
"""

from types import ModuleType
from typing import Protocol

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from . import kv_torch
from .kv_budget import BudgetedHeads
from .kv_cache import Handle, KVLayerCache
from .kv_heads import HeadGroup, check_padding, leading_padding
from .kv_layout import LayerLayout
from .kv_tiles import QuantizedGroup, rotated
from .kv_torch import Scoring

try:
    from . import kv_cuda
except ImportError:  # no triton: torch does everything
    kv_cuda = None

# one registry entry per copy of this module: two converted checkpoints may live in one process
NAME = "kvsurgery_" + __name__.replace(".", "_")


class AttentionModule(Protocol):
    """A stock attention module, which got the layout of its heads, those of all processes."""

    kv_layout: LayerLayout


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
    module: AttentionModule,
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
        module: the attention module.
        query: [batch, query_heads, tokens, head_dim], after RoPE; the query heads of a KV head are adjacent.
        key, value: what `KVSurgeryCache.update` returned; without a cache [batch, kv_heads, tokens, head_dim].
        attention_mask: left padding of each row, int64 [batch]; read without a cache only.
        scaling: factor of the scores; default head_dim ** -0.5.
        softcap: bound c of scores, c * tanh(score / c) (Gemma 2).
        kwargs: of these only `s_aux` is read, a learned sink of each query head, [query_heads] (gpt-oss).

    Returns:
        [batch, tokens, query_heads, head_dim], and no attention weights.

    Raises:
        TypeError: a cache of another class, or a mask that is not two-dimensional.
        RuntimeError: heads are split in a way that the layout does not know (tensor parallelism).
    """
    layout, layer, s_aux = module.kv_layout, None, kwargs.get("s_aux")
    if isinstance(key, Handle):
        layer, key, value = key
        layout = layer.layout
    elif isinstance(value, Handle) or key.shape[2] != query.shape[2]:
        raise TypeError("this model runs with its own KVSurgeryCache, or without a cache")
    elif attention_mask is not None and attention_mask.ndim != 1:
        raise TypeError("attention masks must be two-dimensional padding masks")
    own = own_layout(layout, key.shape[1], module)
    if layer is not None and own is not layout:
        layer.hold(own, key)
    scoring = Scoring.of(query, scaling, softcap, dropout)
    path = kv_torch if own.chunked else _path(query, key, value, s_aux, dropout)  # kernels know no chunks
    if layer is not None and not isinstance(layer, KVLayerCache):  # it reads a long prompt
        output = layer.attend(query, key, value, path, scoring)
        return output.transpose(1, 2).contiguous(), None
    if own.scattered:
        query, key, value = (full_heads_first(states, own) for states in (query, key, value))
        s_aux = None if s_aux is None else full_heads_first(s_aux[None], own)[0]
    if s_aux is not None:
        scoring = scoring._replace(sinks=s_aux)
    if layer is None:
        output = _without_cache(query, key, value, attention_mask, own, path, scoring)
    else:
        layer.make_room(query.shape[2])
        heads, group = own.quantized_heads, query.shape[1] // key.shape[1]
        rotate = own.quantization.rotate if own.quantization and heads else "none"
        if rotate != "none":  # all that is stored is, so that nothing else has to know
            value = rotated(value, heads)
        if rotate == "both":
            query, key = rotated(query, heads * group), rotated(key, heads)
        if query.shape[2] == 1 and layer.ready and path is not kv_torch and path.has_room(layer):
            output = path.decode(query, key, value, layer, scoring).transpose(1, 2)
        else:
            output = _with_cache(query, key, value, layer, path, scoring)
        if rotate != "none":
            output = rotated(output, heads * group, back=True)
    if own.scattered:
        output = in_blocks(output, own)
    return output.transpose(1, 2).contiguous(), None


def _path(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, s_aux: torch.Tensor | None, dropout: float
) -> ModuleType:
    """Where attention is computed: kernels on CUDA, without gradients and dropout; plain torch otherwise."""
    tracked = _tracked(query, key, value, *(() if s_aux is None else (s_aux,)))
    if kv_cuda is None or not query.is_cuda or dropout or tracked:
        return kv_torch
    fits = query.dtype in (torch.float16, torch.bfloat16, torch.float32) and query.shape[-1] <= 256
    return kv_cuda if fits and kv_cuda.has_tensor_cores(query.device) else kv_torch


def _tracked(*states: torch.Tensor) -> bool:
    """Whether gradients are wanted of what these states become."""
    return torch.is_grad_enabled() and any(part.requires_grad for part in states)


def _without_cache(query, key, value, padding, layout: LayerLayout, path: ModuleType, scoring: Scoring) -> torch.Tensor:
    """All heads over their own input; nothing is selected, nothing is quantized."""
    skipped, outputs = 0 if padding is None else padding, []
    heads = [layout.heads - layout.streaming, layout.streaming]
    whole, streaming = _split(query, key, value, heads)
    scorings = scoring.split(_sizes(heads, query.shape[1]))
    if heads[0]:
        outputs.append(path.causal(*whole, skipped, scorings[0]))
    if heads[1]:
        outputs.append(path.streaming_from_start(*streaming, skipped, layout, scorings[1]))
    return torch.cat(outputs, 1)


def _with_cache(query, key, value, layer: KVLayerCache, path: ModuleType, scoring: Scoring) -> torch.Tensor:
    """Store the input and attend from it, head group by head group."""
    layout, outputs = layer.layout, []
    heads = [layout.full, layout.streaming, len(layout.budgets)]
    *parts, budgeted = _split(query, key, value, heads)
    *scorings, of_budgeted = scoring.split(_sizes(heads, query.shape[1]))
    for states, group, own in zip(parts, (layer.full, layer.streaming), scorings, strict=True):
        if group.heads:
            outputs.append(_of_group(*states, group, layer, layer.seen, path, own))
    if layer.budgeted is not None:
        outputs.append(_of_budgeted(*budgeted, layer.budgeted, layer, path, of_budgeted))
    layer.advance(query.shape[2])
    return torch.cat(outputs, 1)


def _split(query, key, value, heads: list[int]):
    """Queries, keys and values of this many KV heads each."""
    return zip(query.split(_sizes(heads, query.shape[1]), 1), key.split(heads, 1), value.split(heads, 1), strict=True)


def _of_group(
    query, key, value, group: HeadGroup, layer: KVLayerCache, past: int, path: ModuleType, scoring: Scoring
) -> torch.Tensor:
    """Store columns from `past` on of one group of heads, and attend from them."""
    layout, tracked = layer.layout, _tracked(query, key, value)
    if query.shape[2] == 1 and not tracked and not (group is layer.streaming and layout.quantized_window):
        layer.store(group, past, key, value)
        return kv_torch.decode(query, group, past + 1, layout, scoring)
    if group is layer.streaming:
        window = group.window(past, min(layout.recent - 1, past)) if past else None
        layer.store(group, past, key, value)
        if not past:
            return path.streaming_from_start(query, key, value, group.skipped, layout, scoring)
        sinks = tuple(states[:, :, : layout.sink] for states in (group.keys, group.values))
        if tracked:  # autograd keeps what it saw, and storage changes
            sinks = tuple(states.clone() for states in sinks)
        return path.streaming(query, sinks, window, (key, value), past, group.skipped, layout, scoring)
    if past and not tracked and not isinstance(group, QuantizedGroup):
        layer.store(group, past, key, value)
        return path.after_past(query, group, past, scoring)
    if past:
        output = _over_tiles(query, key, value, group, past, path, scoring)
    else:
        output = path.causal(query, key, value, group.skipped, scoring)
    layer.store(group, past, key, value)
    return output


def _over_tiles(query, key, value, group: HeadGroup, past: int, path: ModuleType, scoring: Scoring) -> torch.Tensor:
    """Queries of full heads at columns from `past` on, before their tokens are stored; for quantized ones above all.

    They see the tiles dequantized, what is not packed yet as it is, and their own tokens' keys as they came.
    """
    *states, skipped = kv_torch.near(key, value, group, past)
    if not isinstance(group, QuantizedGroup) or not max(group.packed):
        return path.causal(query, *states, skipped, scoring)
    output, lse = path.causal(query, *states, skipped, scoring, with_lse=True)
    output = output.float()  # rounded once, not at every block
    for block in group.blocks():
        for part, result in path.over_block(query, *block, scoring):
            output[part], lse[part] = kv_torch.merge((output[part], lse[part]), result)
    return scoring.sunk(output, lse).to(query.dtype)


def _of_budgeted(
    query, key, value, heads: BudgetedHeads, layer: KVLayerCache, path: ModuleType, scoring: Scoring
) -> torch.Tensor:
    """Queries of budgeted heads, and their storage: the whole prompt while it comes in, then what was selected.

    One forward may hold the prompt and tokens after it (assisted decoding); those see the selection only. Where budgets
    hold, it is cut where heads select again, so that chunks of any size give the same result.
    """
    past, tokens = layer.seen, query.shape[2]
    cut = 0 if heads.selected else min(heads.prompt - past, tokens)
    outputs = []
    if cut:
        asking, whole = query[:, :, :cut], (key[:, :, :cut], value[:, :, :cut])
        if past or cut < heads.prompt:
            heads.wait(past, *whole)
        if past:
            whole = tuple(states[:, :, : past + cut] for states in (heads.waiting.keys, heads.waiting.values))
        outputs.append(path.causal(asking, *whole, layer.full.skipped, scoring))
        heads.observe(past, asking)
        if past + cut == heads.prompt:
            kept = heads.select(*whole, layer.columns.pads, scoring)
            layer.table = None  # rows skip other columns
            path.compact(*whole, kept, layer)
    one = [1] * len(heads.groups)
    scorings = scoring.split(_sizes(one, query.shape[1]))
    while cut < tokens:
        if past + cut == heads.due:
            heads.renew(layer)
        stop = min(heads.due - past, tokens)
        states = [part[:, :, cut:stop] for part in (query, key, value)]
        heads.watch(past + cut, states[0])
        later = [
            _of_group(*of_head, group, layer, past + cut, path, own)
            for group, of_head, own in zip(heads.groups, _split(*states, one), scorings, strict=True)
        ]
        outputs.append(torch.cat(later, 1))
        cut = stop
    return torch.cat(outputs, 2)


def own_layout(layout: LayerLayout, heads: int, module: AttentionModule) -> LayerLayout:
    """The layout of the heads that this process holds of a layer, told by how many its keys have.

    Where processes hold different ones, the device mesh of the attention module's weights says which process this is.

    Raises:
        RuntimeError: heads are split in a way that the layout does not know. Every process raises, since each has as
            many of them.
    """
    if heads == layout.heads:
        return layout
    mesh = getattr(getattr(getattr(module, "k_proj", None), "weight", None), "device_mesh", None)
    # the mesh's dimensions of data parallelism come first
    processes = max(layout.heads // heads, 1) if mesh is None else mesh.shape[-1]
    try:
        if processes * heads != layout.heads:
            raise ValueError(f"{layout.heads} heads do not divide so")
        return layout.part(None if mesh is None else mesh.get_local_rank(mesh.ndim - 1), processes)
    except ValueError as error:
        raise RuntimeError(
            f"this process holds {heads} of the {layout.heads} KV heads of a layer, which this checkpoint was not "
            f"converted for ({error}); convert it with --tp {processes}, or a multiple, for tensor parallelism over "
            f"{processes} processes"
        ) from error


def full_heads_first(states: torch.Tensor, layout: LayerLayout) -> torch.Tensor:
    """Heads [batch, heads, ...] as they come, brought into the order of storage: all full heads, then all others."""
    parts = states.split(_sizes([heads for block in layout.blocks for heads in block], states.shape[1]), 1)
    return torch.cat(parts[::2] + parts[1::2], 1)


def in_blocks(states: torch.Tensor, layout: LayerLayout) -> torch.Tensor:
    """The reverse: heads [batch, heads, ...] from the order of storage into that of the projections."""
    full, others = zip(*layout.blocks, strict=True)
    parts = states.split(_sizes(full + others, states.shape[1]), 1)
    pairs = zip(parts[: len(full)], parts[len(full) :], strict=True)
    return torch.cat([part for pair in pairs for part in pair], 1)


def _sizes(kv_heads: list[int] | tuple[int, ...], heads: int) -> list[int]:
    """How many of `heads` query or KV heads belong to this many KV heads each."""
    return [count * heads // sum(kv_heads) for count in kv_heads]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)
