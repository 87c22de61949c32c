"""Attention over full, streaming and budgeted heads, with this model's cache or without one.

A full head sees every earlier token of its row. A streaming head at position i sees position j <= i when j < sink or
i - j < recent; positions count a row's tokens without its left padding. One-shot, chunked and token-by-token use give
the same result; of a quantized cache, but for what quantizing earlier tokens changes.

With tensor parallelism, transformers gives every process an equal run of heads. A checkpoint converted for T processes
has the heads of a layer in T blocks of equal size, in each block the full heads first, so that a process gets whole
blocks. Where it gets several, its full heads are brought together before attention, and its output back in order.

Where layers share the KV cache of an earlier one, the earlier layer stores and leaves a `Read` in its handle, by which
their queries attend as its own did, to what was there when it attended.
"""

from collections.abc import Callable
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from . import kv_softmax, kv_torch
from .kv_cache import Handle, KVLayerCache
from .kv_columns import check_padding, leading_padding
from .kv_kind import Forward, by_heads, shares, split_heads
from .kv_layout import LayerLayout
from .kv_softmax import AttentionPath, Read, Scoring, Skipped, Span, Window

kv_cuda: Any = None  # the path of kernels, where `find_kernels` has found them
kv_graph: Any = None
# one registry entry per copy of this module: two converted checkpoints may live in one process
NAME = "kvsurgery_" + __name__.replace(".", "_")
SHARES = "is_kv_shared_layer"  # of a stock attention module that attends to keys and values of an earlier layer


class Running(NamedTuple):
    """A forward of a decoder with layouts, or of a model around it."""

    config: Any = None  # the decoder's; a model of a stock class may have the same
    checked: bool = False  # whether its arguments have been
    starts: torch.Tensor | None = None  # where the texts of its rows begin, once they have


# forwards that are under way, the innermost last
RUNNING: ContextVar[tuple[Running, ...]] = ContextVar("RUNNING", default=(Running(),))


class AttentionModule(Protocol):
    """A stock attention module, which got the layout of its heads, those of all processes."""

    kv_layout: LayerLayout
    config: Any


def find_kernels() -> None:
    """Look for the kernels, which need Triton.

    The modeling file of every checkpoint calls this: transformers 4 keeps this module for another folder of the same
    name, whose checkpoint may have kernels where this one's has none, and executes only that file.
    """
    global kv_cuda, kv_graph
    try:
        from . import kv_cuda, kv_graph
    except ImportError:  # torch does everything
        kv_cuda = kv_graph = None


def mask_for(*args, config: Any, **options) -> torch.Tensor | None:
    """The mask function that stock decoders call: of stock SDPA where the attention modules have no layouts."""
    if RUNNING.get()[-1].config is config:
        return padding_mask(*args, **options)
    return AttentionMaskInterface()["sdpa"](*args, config=config, **options)


def padding_mask(
    batch_size: int,
    *args,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    q_length: int = 0,
    cache_position: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """Reduce a 2D padding mask [batch, tokens] to the left padding of each row, int64 [batch, 1, 1, 1], or None.

    It has four dimensions, since stock code may cut queries to those that it goes on with. None is no padding at all.
    Only forwards without a cache use it: a `KVSurgeryCache` keeps the padding itself. There, right padding is harmless,
    since no token sees it. Transformers 4 passes `cache_position`, later versions `q_length` and `device`.

    Where tokens see later ones, it is what `kv_blocks.later_tokens` returns, int32 [batch, 1, tokens, 2].

    Raises:
        ValueError: the mask has holes, or tokens in a cache should have seen those of the input.
    """
    tokens = q_length if cache_position is None else cache_position.shape[0]
    if tokens == 1 and allow_is_causal_skip:
        return None
    padding = None
    if attention_mask is not None and tokens == kv_length and check_padding(attention_mask)[0]:
        padding = leading_padding(attention_mask)[:, None, None, None]
    if not allow_is_causal_skip:  # the model wants another mask than the causal one
        columns = torch.arange(max(kv_length - tokens - 1, 0), kv_length - 1, device=device)
        rows = torch.arange(batch_size, device=device)[:, None]
        sees_next = mask_function(rows, columns.new_zeros(()), columns, columns + 1)
        if sees_next.any():
            from . import kv_blocks  # only models that need it have it

            return kv_blocks.later_tokens(sees_next, tokens, padding, RUNNING.get()[-1].starts)
    return padding


@torch.compiler.disable  # traced, a cache's heads and lengths would be compiled anew for each layer and prompt
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
        module: the attention module; one without a layout gets the attention of stock SDPA.
        query: [batch, query_heads, tokens, head_dim], after RoPE; the query heads of a KV head are adjacent.
        key, value: what `KVSurgeryCache.update` returned; without a cache [batch, kv_heads, tokens, head_dim]. A layer
            that shares an earlier layer's cache gets what that one got, and may ask at the last columns only.
        attention_mask: as from `padding_mask`, or where the texts of rows begin, as from `text_starts`. With a cache
            it is read only where tokens see later ones.
        scaling: factor of the scores; default head_dim ** -0.5.
        softcap: bound c of scores, c * tanh(score / c) (Gemma 2).
        kwargs: of these only `s_aux` is read, a learned sink of each query head, [query_heads] (gpt-oss), and
            `sliding_window`, to be refused.

    Returns:
        [batch, tokens, query_heads, head_dim], and no attention weights.

    Raises:
        TypeError: a cache of another class, or a mask that is not two-dimensional.
        ValueError: the layer has a window that it was converted without.
        RuntimeError: heads are split in a way that the layout does not know (tensor parallelism).
    """
    if not hasattr(module, "kv_layout"):
        scoring = Scoring.of(query, scaling, softcap, dropout, kwargs.get("s_aux"))
        return _stock_attention(module, query, key, value, attention_mask, scoring, kwargs)
    layout, layer, s_aux, reads = module.kv_layout, None, kwargs.get("s_aux"), []
    window = kwargs.get("sliding_window")  # that stock code knows of
    if window is not None and not layout.native and window < module.config.max_position_embeddings:
        raise ValueError(
            f"this layer was converted without a window, but config.json has sliding_window {window}; convert the "
            "original with this config"
        )
    if isinstance(key, Handle):
        layer, key, value, reads = key
        can_fuse = s_aux is None and softcap is None and not dropout and not torch.is_grad_enabled()
        runs = isinstance(layer, KVLayerCache) and layer.runs
        if can_fuse and runs and query.shape[2] == 1 and _path(query, dropout) is kv_torch:
            layer.make_room(1)
            if layer.runs:  # still, with what this forward may take back
                return kv_torch.step(query, key, value, layer, scaling), None
        layout = layer.layout
    elif isinstance(value, Handle) or (key.shape[2] != query.shape[2] and not getattr(module, SHARES, False)):
        raise TypeError("this model runs with its own KVSurgeryCache, or without a cache")
    elif attention_mask is not None and attention_mask.dtype not in (torch.int32, torch.int64):
        raise TypeError("attention masks must be two-dimensional padding masks")
    local_layout = own_layout(layout, key.shape[1], module)
    if layer is not None and local_layout is not layout:
        layer.hold(local_layout, key)
    scoring = Scoring.of(query, scaling, softcap, dropout)
    states = query, key, value, s_aux
    is_shared = isinstance(layer, KVLayerCache) and layer.shared  # gradients may be wanted by layers that share it
    needs_grad = torch.is_grad_enabled() and (
        is_shared or any(getattr(part, "requires_grad", False) for part in states)
    )
    path = kv_torch if needs_grad or local_layout.chunked else _path(query, dropout)  # kernels know no chunks
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        from . import kv_blocks

        path = kv_blocks.Blocks(attention_mask, layer)
        attention_mask = path.padding
    if layer is not None and not isinstance(layer, KVLayerCache):  # it reads a long prompt
        output = layer.attend(query, key, value, path, scoring)
        return output.transpose(1, 2).contiguous(), None
    if local_layout.scattered:
        query = full_heads_first(query, local_layout)
        key = full_heads_first(key, local_layout)
        value = full_heads_first(value, local_layout)
        s_aux = None if s_aux is None else full_heads_first(s_aux[None], local_layout)[0]
    if s_aux is not None:
        scoring = scoring._replace(sinks=s_aux)
    if layer is None:
        output = _without_cache(query, key, value, attention_mask, local_layout, path, scoring)
    elif reads:
        output = reads[0](query.to(key.device), scoring).to(query.device)
    else:
        output, read = _with_cache(query, key, value, layer, path, needs_grad, scoring)
        reads += [read] * layer.shared
    if local_layout.scattered:
        output = in_blocks(output, local_layout)
    return output.transpose(1, 2).contiguous(), None


def _stock_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | Handle,
    value: torch.Tensor | Handle,
    attention_mask: torch.Tensor | None,
    scoring: Scoring,
    options: dict,
) -> tuple[torch.Tensor, None]:
    """Attention with the mask of stock SDPA, bool [batch, 1, tokens, keys]; as SDPA, but with soft caps and sinks."""
    if isinstance(key, Handle) or isinstance(value, Handle):
        raise TypeError("a KVSurgeryCache belongs to a converted model, and this one is of a stock class; leave it out")
    if not scoring.explicit:
        return AttentionInterface()["sdpa"](
            module, query, key, value, attention_mask, dropout=scoring.dropout, scaling=scoring.scale, **options
        )
    if attention_mask is None:
        output = kv_softmax.causal(query, key, value, 0, scoring)
    else:
        output = kv_softmax.attend(query, key, value, attention_mask[:, 0], scoring)
    return output.transpose(1, 2).contiguous(), None


def _path(query: torch.Tensor, dropout: float) -> AttentionPath:
    """Where attention without gradients is computed: kernels on CUDA, but for dropout; plain torch otherwise."""
    if kv_cuda is None or not query.is_cuda or dropout:
        return kv_torch
    supported = query.dtype in (torch.float16, torch.bfloat16, torch.float32) and query.shape[-1] <= 256
    return kv_cuda if supported and kv_cuda.has_tensor_cores(query.device) else kv_torch


def _without_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    layout: LayerLayout,
    path: AttentionPath,
    scoring: Scoring,
) -> torch.Tensor:
    """All heads over their own input, or each text of a row by itself; nothing is selected, nothing is quantized."""
    if mask is None or mask.shape[3] == 1:
        padding = 0 if mask is None else mask.flatten().expand(len(query)).contiguous()  # a mask may have one row
        return _over_rows(query, key, value, padding, layout, path, scoring)
    earlier_tokens = key.shape[2] - query.shape[2]  # whose queries are not asked
    rows = []
    for starts, *states in zip(mask, *(states.chunk(len(mask)) for states in (query, key, value)), strict=True):
        texts = pairwise([*starts.unique().tolist(), key.shape[2]])
        outputs = []
        for begin, end in texts:
            if end > earlier_tokens:
                row_query, *row_states = states
                text_query = row_query[:, :, max(begin - earlier_tokens, 0) : end - earlier_tokens]
                text_key, text_value = (part[:, :, begin:end] for part in row_states)
                outputs.append(_over_rows(text_query, text_key, text_value, 0, layout, path, scoring))
        rows.append(torch.cat(outputs, 2))
    return torch.cat(rows)


def _over_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    skipped: Skipped,
    layout: LayerLayout,
    path: AttentionPath,
    scoring: Scoring,
) -> torch.Tensor:
    """All heads over rows of one text, whose first columns are skipped."""
    span = Span(key.shape[2] - query.shape[2], skipped)
    counts = [layout.heads - layout.streaming, layout.streaming]
    states = split_heads(query, key, value, counts)
    scorings = scoring.split(shares(counts, query.shape[1]))
    kinds = zip(counts, states, scorings, (None, Window.of(layout)), strict=True)
    outputs = [
        path.attend(*kind_states, span=span, scoring=kind_scoring, window=window)
        for count, kind_states, kind_scoring, window in kinds
        if count
    ]
    return torch.cat(outputs, 1)


def _with_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: KVLayerCache,
    path: AttentionPath,
    needs_grad: bool,
    scoring: Scoring,
) -> tuple[torch.Tensor, Read]:
    """Store the input and attend from it, kind by kind."""
    layer.make_room(query.shape[2])
    if query.shape[2] == 1 and layer.ready and not needs_grad:
        output = path.decode(query, key, value, layer, scoring)
        return output, lambda query, scoring: path.decode_stored(query, layer, scoring)
    storage, forward = layer.storage, Forward(layer.seen, path, needs_grad, layer.shared)
    query = storage.rotated_query(query)
    states = storage.rotated(key, value)
    counts = [heads.count(layer.layout) for heads in layer.heads]
    scorings = scoring.split(shares(counts, query.shape[1]))
    outputs, reads = [], []
    for heads, parts, part_scoring in zip(layer.heads, split_heads(query, *states, counts), scorings, strict=True):
        output, read = heads.attend(*parts, forward, part_scoring)
        outputs.append(output)
        reads.append(read)
    layer.finish(query.shape[2])
    read_all = by_heads([*zip(counts, reads, strict=True)])
    return storage.rotated_back(torch.cat(outputs, 1)), lambda query, scoring: storage.rotated_back(
        read_all(storage.rotated_query(query), scoring)
    )


def own_layout(layout: LayerLayout, heads: int, module: AttentionModule) -> LayerLayout:
    """The layout of the heads that this process holds of a layer, told by how many its keys have.

    Where processes hold different ones, the device mesh of the attention module's weights says which process this is.

    Raises:
        RuntimeError: heads are split in a way that the layout does not know. Every process raises, since each has as
            many of them.
    """
    if heads == layout.heads:
        return layout
    # layers that share a cache have no projection of keys
    projection = getattr(module, "q_proj" if getattr(module, SHARES, False) else "k_proj", None)
    mesh = getattr(getattr(projection, "weight", None), "device_mesh", None)
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
    parts = states.split(shares([heads for block in layout.blocks for heads in block], states.shape[1]), 1)
    return torch.cat(parts[::2] + parts[1::2], 1)


def in_blocks(states: torch.Tensor, layout: LayerLayout) -> torch.Tensor:
    """The reverse: heads [batch, heads, ...] from the order of storage into that of the projections."""
    full_counts, other_counts = zip(*layout.blocks, strict=True)
    parts = states.split(shares(full_counts + other_counts, states.shape[1]), 1)
    pairs = zip(parts[: len(full_counts)], parts[len(full_counts) :], strict=True)
    return torch.cat([part for pair in pairs for part in pair], 1)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask_for)
