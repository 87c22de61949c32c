"""Attention over full, streaming and budgeted heads, with this model's cache or without one.

A full head sees every earlier token of its row. A streaming head at position i sees position j <= i when j < sink or
i - j < recent; positions count a row's tokens without its left padding. One-shot, chunked and token-by-token use give
the same result. Long inputs go through in blocks of queries, so that no mask is larger than one block.
"""

import torch
import torch.nn.functional as F
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from .kv_cache import Handle, KVLayerCache, check_padding, leading_padding
from .kv_heads import HeadGroup

try:
    from . import kv_kernels
except ImportError:  # no triton: torch does everything
    kv_kernels = None

# one registry entry per copy of this module: two converted checkpoints may live in one process
NAME = "kvsurgery_" + __name__.replace(".", "_")
BLOCK = 256  # queries per block of a streaming group
SCORES = 2**24  # elements of the largest mask, or of explicit scores, of a full group's block


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
        module: the attention module, whose `kv_layout` is its `LayerLayout`.
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
    layout = module.kv_layout
    layer, padding = None, attention_mask
    if isinstance(key, Handle):
        layer, key, value = key
        padding = layer.padding()
    elif key.shape[2] != query.shape[2]:
        raise TypeError("this model runs with its own KVSurgeryCache, or without a cache")
    if padding is not None and padding.ndim != 1:
        raise TypeError("attention masks must be two-dimensional padding masks")
    if key.shape[1] != layout.heads:
        raise RuntimeError(
            f"this checkpoint's layout has {layout.heads} KV heads a layer, this process holds {key.shape[1]}: "
            "it was not converted for tensor parallelism"
        )
    decoding = layer is not None and query.shape[2] == 1
    launching = _kernels_apply(query)
    if decoding and launching and not layout.budgets:
        return _decode_in_one_launch(query, key, value, layer, scaling, softcap), None

    options = {"scaling": scaling, "softcap": softcap, "dropout": dropout}
    heads = [layout.full, layout.heads - layout.full]
    queries = query.split([count * query.shape[1] // layout.heads for count in heads], 1)
    (full_keys, keys), (full_values, values) = (states.split(heads, 1) for states in (key, value))
    past = layer.seen if layer else 0
    window = layer.recent_window() if past and layout.streaming and not decoding else None
    if layer:
        layer.append(key, value)

    if decoding:
        full = _decode(queries[0], layer.full, layer, options)
    elif past and launching and layout.full:
        stored = (states[:, :, : layer.seen] for states in (layer.full.keys, layer.full.values))
        full = kv_kernels.prefill(queries[0], *stored, past, padding, first=None, scaling=scaling, softcap=softcap)
    elif past:
        full = _after_past(queries[0], layer.full, past, padding, options)
    else:
        full = _causal(queries[0], full_keys, full_values, padding, options)

    if layout.budgets and layer:
        rest = _budgeted(queries[1], keys, values, layer, past, padding, options)
    elif layout.budgets:  # without a cache nothing is selected
        rest = _causal(queries[1], keys, values, padding, options)
    elif decoding:
        rest = _decode(queries[1], layer.streaming, layer, options)
    elif past:
        sinks = tuple(states[:, :, : layout.sink] for states in (layer.streaming.keys, layer.streaming.values))
        if launching and layout.streaming:
            columns = (torch.cat(states, 2) for states in zip(window, (keys, values), strict=True))
            sizes = {"sink": layout.sink, "recent": layout.recent, "first": past - window[0].shape[2], "sinks": sinks}
            rest = kv_kernels.prefill(queries[1], *columns, past, padding, **sizes, scaling=scaling, softcap=softcap)
        else:
            rest = _streaming(queries[1], sinks, window, (keys, values), past, padding, layout, options)
    elif launching and layout.streaming:
        sizes = {"sink": layout.sink, "recent": layout.recent}
        rest = kv_kernels.prefill(queries[1], keys, values, 0, padding, **sizes, scaling=scaling, softcap=softcap)
    else:
        rest = _streaming_from_start(queries[1], keys, values, padding, layout, options)
    return torch.cat([full, rest], 1).transpose(1, 2).contiguous(), None


def _kernels_apply(query: torch.Tensor) -> bool:
    """Whether the Triton kernels serve: on CUDA, without gradients; budgeted heads have none."""
    if kv_kernels is None or not query.is_cuda or query.requires_grad:
        return False
    return query.dtype in (torch.float16, torch.bfloat16, torch.float32) and query.shape[-1] <= 256


def _decode_in_one_launch(query, key, value, layer: KVLayerCache, scaling, softcap) -> torch.Tensor:
    """Store one token per row and attend from it, all heads together: [batch, 1, query_heads, head_dim]."""
    layer.make_room(1)
    offsets, sinks, rings, recents = layer.head_table()
    position = layer.lengths()[:, 0].expand(query.shape[0])
    kv_kernels.append(layer.keys, layer.values, key, value, offsets, position, sinks, rings)
    layer.advance(1)
    lengths = (position + 1)[:, None].expand(-1, layer.layout.heads)
    output = kv_kernels.decode(
        query[:, :, 0], layer.keys, layer.values, offsets, lengths, sinks, rings, recents, scaling, softcap
    )
    return output[:, None]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    dropout: float,
) -> torch.Tensor:
    """Softmax attention with grouped heads, keys and values never repeated.

    Args:
        query: [batch, kv_heads * group, tokens, head_dim].
        keys, values: [batch, kv_heads, n, head_dim].
        allowed: bool [1 or batch, tokens, n], or None where every query sees every key.

    Returns:
        [batch, kv_heads * group, tokens, head_dim]
    """
    batch, kv_heads, _, head_dim = keys.shape
    tokens = query.shape[2]
    group = query.shape[1] // kv_heads
    # a group's query heads become further queries of their KV head
    folded = query.reshape(batch, kv_heads, group * tokens, head_dim)
    mask = None if allowed is None else allowed[:, None].repeat(1, 1, group, 1)
    if softcap is None:
        output = F.scaled_dot_product_attention(folded, keys, values, mask, dropout, scale=scaling)
    else:
        scores = folded @ keys.transpose(-1, -2) * (head_dim**-0.5 if scaling is None else scaling)
        scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(values.dtype), dropout)
        output = weights @ values
    return output.view(batch, kv_heads * group, tokens, head_dim)


def _decode(query: torch.Tensor, group: HeadGroup, layer: KVLayerCache, options: dict) -> torch.Tensor:
    """One query per row, over everything that is stored; its own token is stored already."""
    if not query.shape[1]:
        return query
    slots = min(layer.seen, group.slots)
    allowed = None
    if layer.padding() is not None or group.margin:
        lengths = layer.lengths().clamp(min=1)  # padding sees itself: no empty softmax
        position, newest = group.positions(lengths, slots, group.ring), lengths - 1
        allowed = (position >= 0) & (position <= newest)
        if group.sink is not None:
            allowed &= (position < group.sink) | (newest - position < group.recent)
        allowed = allowed[:, None]
    return attend(query, group.keys[:, :, :slots], group.values[:, :, :slots], allowed, **options)


def _causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, padding: torch.Tensor | None, options: dict
) -> torch.Tensor:
    """Queries over the same tokens' keys, nothing before them: every earlier token of the row is visible."""
    if not query.shape[1]:
        return query
    if padding is None and options["softcap"] is None:
        return F.scaled_dot_product_attention(
            query, keys, values, dropout_p=options["dropout"], is_causal=True, scale=options["scaling"], enable_gqa=True
        )
    return _blocks(query, keys, values, 0, _by_column(padding), options)


def _by_column(padding: torch.Tensor | None):
    """What queries see of keys that lie by column: all that is earlier in their row."""
    first = 0 if padding is None else padding[:, None, None]

    def allowed(queries: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return (columns <= queries) & (columns >= first) | (columns == queries)  # padding sees itself: no empty softmax

    return allowed


def _after_past(
    query: torch.Tensor, group: HeadGroup, past: int, padding: torch.Tensor | None, options: dict
) -> torch.Tensor:
    """Queries of full heads over the cache, their own tokens stored already."""
    if not query.shape[1]:
        return query
    pad = 0 if padding is None else padding[:, None, None]

    def allowed(queries: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return slots <= (queries - pad).clamp(min=0)

    return _blocks(query, group.keys, group.values, past, allowed, options)


def _blocks(query, keys, values, past: int, allowed, options: dict) -> torch.Tensor:
    """Attend in blocks of queries; `allowed(queries [1, m, 1], keys [1, 1, n])` is a block's mask, in columns."""
    batch, heads, tokens, _ = query.shape
    per_query = (
        batch * heads * (past + tokens) if options["softcap"] else batch * heads // keys.shape[1] * (past + tokens)
    )
    block = min(max(SCORES // per_query, 16), 1024)
    outputs = []
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        rows = torch.arange(past + start, past + stop, device=query.device)[None, :, None]
        columns = torch.arange(past + stop, device=query.device)[None, None]
        part = (states[:, :, : past + stop] for states in (keys, values))
        outputs.append(attend(query[:, :, start:stop], *part, allowed(rows, columns), **options))
    return torch.cat(outputs, 2)


def _streaming_from_start(query, keys, values, padding, layout, options) -> torch.Tensor:
    """Queries of streaming heads over the same tokens' keys, nothing before them."""
    tokens = query.shape[2]
    if tokens <= layout.sink + layout.recent:  # nothing has left the window yet
        return _causal(query, keys, values, padding, options)
    if padding is None:
        sinks = keys[:, :, : layout.sink], values[:, :, : layout.sink]
    else:
        columns = padding[:, None] + torch.arange(layout.sink, device=query.device)
        index = columns.clamp(max=tokens - 1)[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        sinks = keys.gather(2, index), values.gather(2, index)
    nothing = keys[:, :, :0], values[:, :, :0]
    return _streaming(query, sinks, nothing, (keys, values), 0, padding, layout, options)


def _streaming(query, sinks, window, new, past: int, padding, layout, options) -> torch.Tensor:
    """Queries of streaming heads over sinks and window, in blocks; time and memory linear in the tokens.

    Args:
        query: [batch, query_heads, tokens, head_dim], at columns past, past + 1, ...
        sinks: keys and values [batch, kv_heads, <= sink, head_dim] of positions 0, 1, ..., of this input too.
        window: those of the last columns before `past`.
        new: those of the queries' own columns.
    """
    if not query.shape[1]:
        return query
    pad = 0 if padding is None else padding[:, None, None]
    before, tokens = window[0].shape[2], query.shape[2]
    sink = torch.arange(sinks[0].shape[2], device=query.device)[None, None]
    outputs = []
    for start in range(0, tokens, BLOCK):
        stop = min(start + BLOCK, tokens)
        first = max(start - layout.recent + 1, -before)
        parts = (
            torch.cat(
                [still, old[:, :, before + first :] if first < 0 else old[:, :, :0], own[:, :, max(first, 0) : stop]], 2
            )
            for still, old, own in zip(sinks, window, new, strict=True)
        )
        position = torch.arange(past + start, past + stop, device=query.device)[None, :, None] - pad
        recent = torch.arange(past + first, past + stop, device=query.device)[None, None] - pad
        in_window = (recent >= layout.sink) & (recent <= position) & (position - recent < layout.recent)
        in_window |= (recent == position) & (position < 0)  # padding sees itself: no empty softmax
        allowed = torch.cat([sink <= position, in_window], 2)
        outputs.append(attend(query[:, :, start:stop], *parts, allowed, **options))
    return torch.cat(outputs, 2)


def _budgeted(query, keys, values, layer: KVLayerCache, past: int, padding, options) -> torch.Tensor:
    """Queries of budgeted heads, and their storage: the whole prompt while it comes in, then what was selected.

    One forward may hold the prompt and tokens after it (assisted decoding); those see the selection only.
    """
    group, prompt, tokens = layer.budgeted, layer.cache.prompt, query.shape[2]
    softmax = {**options, "scaling": options["scaling"] or query.shape[-1] ** -0.5}
    cut = min(max(prompt - past, 0), tokens)
    outputs = []
    if cut:
        arriving = keys[:, :, :cut], values[:, :, :cut]
        if past or cut < prompt:
            group.wait(past, *arriving, prompt)
        whole = (group.waiting.keys[:, :, : past + cut], group.waiting.values[:, :, : past + cut]) if past else arriving
        if past:
            outputs.append(_blocks(query[:, :, :cut], *whole, past, _by_column(padding), options))
        else:
            outputs.append(_causal(query[:, :, :cut], *arriving, padding, options))
        group.observe(past, query[:, :, :cut], prompt)
        if past + cut == prompt:
            group.select(*whole, layer.capacity, padding, softmax["scaling"], softmax["softcap"])
    if cut < tokens:
        group.append(past + cut, keys[:, :, cut:], values[:, :, cut:], layer.capacity)
        longest = max(group.capacities, default=0) + past + tokens - group.start
        block = min(max(SCORES // (query.shape[0] * query.shape[1] * longest), 16), 1024)
        for start in range(cut, tokens, block):
            part = query[:, :, start : start + block]
            outputs.append(group.attend(part, past + start, padding, **softmax))
    return torch.cat(outputs, 2)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)
