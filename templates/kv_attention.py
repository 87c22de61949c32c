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

import copy
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from . import kv_softmax, kv_torch
from .kv_cache import HandingLayer, Handle, KVLayerCache
from .kv_codes import rotated
from .kv_columns import check_padding, leading_padding
from .kv_heads import HeadGroup
from .kv_inputs import NOT_CAUSAL
from .kv_layout import LayerLayout
from .kv_softmax import Scoring, Skipped
from .kv_tiles import QuantizedGroup
from .kv_torch import AttentionPath

try:
    from . import kv_cuda
except ImportError:  # no triton: torch does everything
    kv_cuda = None

# one registry entry per copy of this module: two converted checkpoints may live in one process
NAME = "kvsurgery_" + __name__.replace(".", "_")
# attention of queries [batch, query_heads, n, head_dim] at the last n columns of a forward, over what was stored of it
Read = Callable[[torch.Tensor, Scoring], torch.Tensor]


class Forward(NamedTuple):
    """A forward of a decoder with layouts, or of a model around it."""

    config: Any = None  # the decoder's; a model of a stock class may have the same
    checked: bool = False  # whether its arguments have been
    starts: torch.Tensor | None = None  # where the texts of its rows begin, once they have


# forwards that are under way, the innermost last
RUNNING: ContextVar[tuple[Forward, ...]] = ContextVar("RUNNING", default=(Forward(),))


class AttentionModule(Protocol):
    """A stock attention module, which got the layout of its heads, those of all processes."""

    kv_layout: LayerLayout
    config: Any


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
    """Reduce a 2D padding mask [batch, tokens] to the left padding of each row, int64 [batch, 1, 1, 1], or None without
    any.

    It has four dimensions, since stock code may cut queries to those that it goes on with.

    Only forwards without a cache use it: a `KVSurgeryCache` keeps the padding itself. There, right padding is harmless,
    since no token sees a later one. Transformers 4 passes `cache_position`, later versions `q_length` and `device`.

    Raises:
        ValueError: the mask has holes, or the model lets tokens see later ones.
    """
    tokens = q_length if cache_position is None else cache_position.shape[0]
    if tokens == 1:
        return None
    if not allow_is_causal_skip:  # the model wants another mask than the causal one
        columns = torch.arange(kv_length - tokens, kv_length - 1, device=device)
        rows = torch.arange(batch_size, device=device)[:, None]
        if mask_function(rows, columns.new_zeros(()), columns, columns + 1).any():
            raise ValueError(NOT_CAUSAL)
    if attention_mask is None or tokens != kv_length:  # what follows something has a cache
        return None
    padded_left, _ = check_padding(attention_mask)
    return leading_padding(attention_mask)[:, None, None, None] if padded_left else None


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
        attention_mask: left padding of each row, int64 [batch, 1, 1, 1], or where the texts of rows begin, as from
            `text_starts`; read without a cache only.
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
    elif isinstance(value, Handle) or (key.shape[2] != query.shape[2] and not _shares(module)):
        raise TypeError("this model runs with its own KVSurgeryCache, or without a cache")
    elif attention_mask is not None and (attention_mask.dtype != torch.int64 or attention_mask.shape[1:3] != (1, 1)):
        raise TypeError("attention masks must be two-dimensional padding masks")
    local_layout = own_layout(layout, key.shape[1], module)
    if layer is not None and local_layout is not layout:
        layer.hold(local_layout, key)
    scoring = Scoring.of(query, scaling, softcap, dropout)
    needs_grad = torch.is_grad_enabled() and _needs_grad(layer, query, key, value, s_aux)
    path = kv_torch if needs_grad or local_layout.chunked else _path(query, dropout)  # kernels know no chunks
    if layer is not None and not isinstance(layer, KVLayerCache):  # it reads a long prompt
        output = layer.attend(query, key, value, path, scoring)
        return output.transpose(1, 2).contiguous(), None
    if local_layout.scattered:
        query, key, value = (full_heads_first(states, local_layout) for states in (query, key, value))
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


def _shares(module: AttentionModule) -> bool:
    """Whether a stock module attends to the keys and values of an earlier layer."""
    return getattr(module, "is_kv_shared_layer", False)


def _path(query: torch.Tensor, dropout: float) -> AttentionPath:
    """Where attention without gradients is computed: kernels on CUDA, but for dropout; plain torch otherwise."""
    if kv_cuda is None or not query.is_cuda or dropout:
        return kv_torch
    supported = query.dtype in (torch.float16, torch.bfloat16, torch.float32) and query.shape[-1] <= 256
    return kv_cuda if supported and kv_cuda.has_tensor_cores(query.device) else kv_torch


def _needs_grad(layer: HandingLayer | None, *states: torch.Tensor | None) -> bool:
    """Whether gradients are wanted of what these states become, by this layer or by those that share its cache."""
    shared = isinstance(layer, KVLayerCache) and layer.shared
    return shared or any(part.requires_grad for part in states if part is not None)


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
        return _over_rows(query, key, value, 0 if mask is None else mask.flatten(), layout, path, scoring)
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
    outputs = []
    heads = [layout.heads - layout.streaming, layout.streaming]
    full, streaming = split_heads(query, key, value, heads)
    scorings = scoring.split(_sizes(heads, query.shape[1]))
    if heads[0]:
        outputs.append(path.causal(*full, skipped, scorings[0]))
    if heads[1]:
        outputs.append(path.streaming_from_start(*streaming, skipped, layout, scorings[1]))
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
    """Store the input and attend from it, head group by head group."""
    layout = layer.layout
    layer.make_room(query.shape[2])
    if query.shape[2] == 1 and layer.ready and not needs_grad and path.decodes(layer):
        output = path.decode(query, key, value, layer, scoring)
        return output, lambda query, scoring: path.decode_stored(query, layer, scoring)
    # all that is stored is rotated, so that nothing else has to know
    query = _rotated_queries(query, layout)
    key, value = rotated(key, layout.rotated_keys), rotated(value, layout.rotated_values)
    heads = [layout.full, layout.streaming, len(layout.budgets)]
    *parts, budgeted = split_heads(query, key, value, heads)
    *scorings, budgeted_scoring = scoring.split(_sizes(heads, query.shape[1]))
    outputs, reads = [], []
    for (group_query, *states), group, group_scoring in zip(
        parts, (layer.full, layer.streaming), scorings, strict=True
    ):
        if group.heads:
            read = store_group(*states, group, layer, layer.seen, path, needs_grad)
            outputs.append(read(group_query, group_scoring))
            reads += [(group.heads, read)] * layer.shared
    if layer.budgeted is not None:
        output, read = layer.budgeted.attend(*budgeted, layer, path, needs_grad, budgeted_scoring)
        outputs.append(output)
        reads.append((len(layout.budgets), read))
    layer.advance(query.shape[2])
    return _rotated_back(torch.cat(outputs, 1), layout), _over_rotated(by_heads(reads), layout)


def _rotated_queries(query: torch.Tensor, layout: LayerLayout) -> torch.Tensor:
    """Queries as the keys are that they meet."""
    return rotated(query, layout.rotated_keys * query.shape[1] // layout.heads)


def _rotated_back(output: torch.Tensor, layout: LayerLayout) -> torch.Tensor:
    """What attention to values gives, whether they are stored rotated or not."""
    return rotated(output, layout.rotated_values * output.shape[1] // layout.heads, back=True)


def _over_rotated(read: Read, layout: LayerLayout) -> Read:
    """Attention of queries as they come to what is stored rotated."""
    return lambda query, scoring: _rotated_back(read(_rotated_queries(query, layout), scoring), layout)


def split_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: list[int]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Queries, keys and values of this many KV heads each."""
    sizes = _sizes(heads, query.shape[1])  # `split` would only call `split_with_sizes`, at a cost in each decode step
    parts = (states.split_with_sizes(counts, 1) for states, counts in ((query, sizes), (key, heads), (value, heads)))
    return zip(*parts, strict=True)


def by_heads(reads: list[tuple[int, Read]]) -> Read:
    """Attention of several groups together, each of this many KV heads."""

    def read(query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        sizes = _sizes([heads for heads, _ in reads], query.shape[1])
        parts = zip(reads, query.split(sizes, 1), scoring.split(sizes), strict=True)
        return torch.cat(
            [group_read(group_query, group_scoring) for (_, group_read), group_query, group_scoring in parts], 1
        )

    return read


def store_group(
    key: torch.Tensor,
    value: torch.Tensor,
    group: HeadGroup,
    layer: KVLayerCache,
    past: int,
    path: AttentionPath,
    snapshot: bool,
) -> Read:
    """Store columns from `past` on of one group of heads, to attend from them.

    Until the group changes again, or beyond that with `snapshot`, as autograd wants it: that keeps what it saw.
    """
    layout, stop, skipped = layer.layout, past + key.shape[2], group.skipped
    if key.shape[2] == 1 and not snapshot and not (group is layer.streaming and layout.quantized_window):
        layer.store(group, past, key, value)
        return lambda query, scoring: kv_torch.decode_group(query, group, stop, layout, scoring)
    if group is layer.streaming:
        window = group.window(past, min(layout.recent - 1, past)) if past else None
        layer.store(group, past, key, value)
        if window is None:
            return lambda query, scoring: path.streaming_from_start(query, key, value, skipped, layout, scoring)
        sinks = tuple(states[:, :, : layout.sink] for states in (group.keys, group.values))
        if snapshot:
            sinks = tuple(states.clone() for states in sinks)

        def read(query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
            past_states, new_states = window, (key, value)
            if (earlier_tokens := stop - past - query.shape[2]) > 0:
                past_states = tuple(
                    torch.cat([past_part, new_part[:, :, :earlier_tokens]], 2)
                    for past_part, new_part in zip(window, new_states, strict=True)
                )
                new_states = tuple(states[:, :, earlier_tokens:] for states in new_states)
            return path.streaming(
                query, sinks, past_states, new_states, past + earlier_tokens, skipped, layout, scoring
            )

        return read
    if past and not snapshot and not isinstance(group, QuantizedGroup):
        layer.store(group, past, key, value)
        return lambda query, scoring: path.after_past(query, group, stop - query.shape[2], scoring)
    read = _over_tiles(key, value, group, past, path, snapshot) if past else over_columns(key, value, skipped, path)
    layer.store(group, past, key, value)
    return read


def over_columns(key: torch.Tensor, value: torch.Tensor, skipped: Skipped, path: AttentionPath) -> Read:
    """Queries over keys and values by column."""
    return lambda query, scoring: path.causal(query, key, value, skipped, scoring)


def _over_tiles(
    key: torch.Tensor, value: torch.Tensor, group: HeadGroup, past: int, path: AttentionPath, snapshot: bool
) -> Read:
    """Queries of full heads at columns from `past` on, before their tokens are stored; for quantized ones above all.

    They see the tiles dequantized, what is not packed yet as it is, and their own tokens' keys as they came.
    """
    *states, skipped = kv_torch.unpacked_columns(key, value, group, past)
    tiles = copy.copy(group) if isinstance(group, QuantizedGroup) and max(group.packed) else None
    if tiles is None:
        return over_columns(*states, skipped, path)
    tiles.packed = [*group.packed]  # tiles that follow are packed beside these
    if snapshot:  # a selection writes to these
        tiles.tiles = tiles.tiles.map(torch.clone)

    def read(query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        output, lse = path.causal_with_lse(query, *states, skipped, scoring)
        output = output.float()  # rounded once, not at every block
        for block in tiles.blocks():
            for part, result in path.over_block(query, *block, scoring):
                output[part], lse[part] = kv_softmax.merge((output[part], lse[part]), result)
        return scoring.sunk(output, lse).to(query.dtype)

    return read


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
    projection = getattr(module, "q_proj" if _shares(module) else "k_proj", None)
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
    parts = states.split(_sizes([heads for block in layout.blocks for heads in block], states.shape[1]), 1)
    return torch.cat(parts[::2] + parts[1::2], 1)


def in_blocks(states: torch.Tensor, layout: LayerLayout) -> torch.Tensor:
    """The reverse: heads [batch, heads, ...] from the order of storage into that of the projections."""
    full_counts, other_counts = zip(*layout.blocks, strict=True)
    parts = states.split(_sizes(full_counts + other_counts, states.shape[1]), 1)
    pairs = zip(parts[: len(full_counts)], parts[len(full_counts) :], strict=True)
    return torch.cat([part for pair in pairs for part in pair], 1)


def _sizes(kv_heads: list[int] | tuple[int, ...], heads: int) -> list[int]:
    """How many of `heads` query or KV heads belong to this many KV heads each."""
    return [count * heads // sum(kv_heads) for count in kv_heads]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask_for)
