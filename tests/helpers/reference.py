"""An independent statement of what a converted model computes: the stock model with one dense mask per head."""

from __future__ import annotations

from functools import cache

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from tests.helpers.families import attention_of

NAME = "tests_dense_reference"


@cache
def visible(tokens: int, padding: int, sink: int | None, recent: int, chunked: bool = False) -> torch.Tensor:
    """bool [tokens, tokens]: which column j a query at column i sees, by the definition, one pair at a time."""
    result = torch.eye(tokens, dtype=torch.bool)
    for i in range(padding, tokens):
        for j in range(padding, i + 1):
            if chunked:
                result[i, j] = j >= i - (i - padding) % recent
            else:
                result[i, j] = sink is None or j - padding < sink or i - j < recent
    return result


def later_in_image(types: torch.Tensor) -> torch.Tensor:
    """bool [tokens, tokens]: which later column j a query at column i sees: types [tokens] are 1 from i to j."""
    result = torch.zeros(len(types), len(types), dtype=torch.bool)
    for i in range(len(types)):
        for j in range(i + 1, len(types)):
            result[i, j] = types[i : j + 1].eq(1).all()
    return result


def softmax(scores: torch.Tensor, s_aux: torch.Tensor | None) -> torch.Tensor:
    """Weights of scores [batch, query_heads, tokens, keys]; a learned sink is one more column, without a value."""
    if s_aux is None:
        return scores.softmax(-1)
    sinks = s_aux.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def dense_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    softcap=None,
    sliding_window=None,
    s_aux=None,
    **kwargs,
):
    group = query.shape[1] // key.shape[1]
    tokens = query.shape[2]
    mask = torch.ones(len(query), tokens) if attention_mask is None else attention_mask[:, 0, 0]
    full, sink, recent, types = module.reference
    kinds = getattr(module.config, "layer_types", None) or ()
    chunked = kinds[module.layer_idx : module.layer_idx + 1] == ["chunked_attention"]
    rows = []
    for index, row in enumerate(mask.bool().tolist()):
        padding = row.index(True) if True in row else tokens
        heads = []
        for is_full in full:
            if chunked:
                heads.append(visible(tokens, padding, 0, module.config.attention_chunk_size, True))
            elif sliding_window is not None:
                heads.append(visible(tokens, padding, 0, sliding_window))
            else:
                heads.append(visible(tokens, padding, None if is_full else sink, recent))
        if types is not None:
            heads = [head | later_in_image(types[index]) for head in heads]
        rows.append(torch.stack(heads).repeat_interleave(group, 0))
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query.double() @ key.double().transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~torch.stack(rows), float("-inf"))
    return (softmax(scores, s_aux) @ value.double()).to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, dense_attention)
# padding masks [batch, 1, 1, tokens]: stock code may cut the queries of a mask
AttentionMaskInterface.register(
    NAME, lambda *args, attention_mask=None, **kwargs: None if attention_mask is None else attention_mask[:, None, None]
)


def reference_logits(
    model: torch.nn.Module,
    full: list[list[bool]],
    sink: int,
    recent: int,
    tokens: torch.Tensor,
    mask: torch.Tensor | None = None,
    **images: torch.Tensor,
) -> torch.Tensor:
    """Logits of a stock model whose KV head h of layer l keeps everything if full[l][h] and streams otherwise.

    Layers with a sliding window of their own keep it. Tokens of an image see later ones of it too: in all layers if the
    model takes `token_type_ids`, and in sliding ones if its config says so.
    """
    decoder = model.get_decoder()
    decoder = getattr(decoder, "model", decoder)  # of Llama 4, it has the output layer
    types = {"full_attention": images.get("token_type_ids"), "sliding_attention": images.get("token_type_ids")}
    if getattr(decoder.config, "use_bidirectional_attention", None) == "vision":
        types["sliding_attention"] = images["mm_token_type_ids"]
    kinds = getattr(decoder.config, "layer_types", None) or ["full_attention"] * len(decoder.layers)
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation = NAME
    for layer, heads, kind in zip(decoder.layers, full, kinds, strict=True):
        if heads:
            attention_of(layer).reference = (heads, sink, recent, types.get(kind))
    try:
        with torch.no_grad():
            return model(tokens, attention_mask=mask, use_cache=False, **images).logits
    finally:
        decoder.config._attn_implementation = before
