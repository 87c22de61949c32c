"""Attention of a stock model, seen or replaced while scores are measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from kvsurgery.templates.kv_softmax import Scoring

INTERCEPTION = "kvsurgery_interception"

# (stock, module, query, key, value, mask, **options) -> output [batch, tokens, query_heads, head_dim], and weights
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@contextmanager
def intercepted(model: PreTrainedModel, attend: Attend, *, masks: bool = True) -> Generator[None]:
    """Inside, every attention layer calls `attend` in place of its attention function. One model at a time.

    Args:
        model: any causal language model whose attention goes through transformers' attention interface.
        attend: called as attend(stock, module, query, key, value, attention_mask, **options). `stock` is the function
            it stands for and takes what follows; query is [batch, query_heads, tokens, head_dim] after RoPE, key and
            value are [batch, kv_heads, past + tokens, head_dim], `module.layer_idx` is the layer.
        masks: give it the masks that the stock function needs; without them the attention mask is None, and no
            [tokens x tokens] tensor is made.
    """
    previous = model.config._attn_implementation
    is_eager = previous == "eager"

    def function(module, query, key, value, attention_mask, **options):
        # the model's own eager function, where it is used, knows of soft caps and the like
        stock = sys.modules[type(module).__module__].eager_attention_forward if is_eager else sdpa_attention_forward
        return attend(stock, module, query, key, value, attention_mask, **options)

    AttentionInterface.register(INTERCEPTION, function)
    AttentionMaskInterface.register(INTERCEPTION, (eager_mask if is_eager else sdpa_mask) if masks else no_mask)
    model.set_attn_implementation(INTERCEPTION)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)
        # transformers never forgets a function, and `attend` may hold the model
        AttentionInterface.register(INTERCEPTION, sdpa_attention_forward)


def no_mask(*args, **kwargs) -> None:
    """A mask function that makes none."""


def scoring_of(query: torch.Tensor, options: Mapping[str, Any]) -> Scoring:
    """How a layer turns products of queries and keys into weights, by the options of its attention function."""
    return Scoring.of(query, options.get("scaling"), options.get("softcap"), 0.0, options.get("s_aux"))


def attention_weights(query: torch.Tensor, key: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Softmax weights of the last queries over all keys up to their own.

    Args:
        query: [batch, query_heads, tokens, head_dim], of the last `tokens` positions; keep them few.
        key: [batch, kv_heads, n, head_dim].

    Returns:
        float32 [batch, query_heads, tokens, n]; a learned sink takes its share, so that they add up to less than 1.
    """
    batch, kv_heads, n, head_dim = key.shape
    tokens = query.shape[2]
    grouped_queries = query.reshape(batch, kv_heads, -1, head_dim)
    scores = scoring.scores((grouped_queries @ key.mT).float()).view(batch, -1, tokens, n)
    if tokens > 1:
        future_mask = torch.ones(tokens, n, dtype=torch.bool, device=key.device).triu(n - tokens + 1)
        scores = scores.masked_fill(future_mask, float("-inf"))
    if scoring.sinks is None:
        return scores.softmax(-1)
    sinks = scoring.sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
