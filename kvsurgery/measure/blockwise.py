"""Attention over a whole prompt with memory linear in its tokens, in the backward pass too.

The emitted models' own functions, block of queries by block of queries. What a block would save for its gradient is
computed anew instead: over all blocks it would add up to a matrix of tokens x tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from kvsurgery.templates import kv_softmax
from kvsurgery.templates.kv_softmax import Scoring, Span, Window


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Full attention: query i sees key j <= i.

    Args:
        query: [batch, query_heads, tokens, head_dim].
        key, value: [batch, kv_heads, tokens, head_dim].

    Returns:
        [batch, query_heads, tokens, head_dim].
    """
    # on CUDA, fused attention with grouped heads is for 16 bit only
    use_fused = not query.is_cuda or query.itemsize == 2 or query.shape[1] == key.shape[1]
    if use_fused and not scoring.explicit:
        return kv_softmax.causal(query, key, value, 0, scoring)

    def block(rows: slice) -> torch.Tensor:
        stop = slice(rows.stop)
        return checkpointed(kv_softmax.causal, query[:, :, rows], key[:, :, stop], value[:, :, stop], 0, scoring)

    return torch.cat([block(rows) for rows in kv_softmax.query_blocks(query, key.shape[2], True, key.shape[1])], 2)


def streaming(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    sink: int,
    recent: int,
    *,
    chunked: bool = False,
) -> torch.Tensor:
    """Streaming attention: query i sees key j <= i where j < sink or i - j < recent. Shapes as in `causal`.

    With `chunked`, it sees its own chunk of `recent` tokens.
    """
    tokens = query.shape[2]
    if tokens <= sink + recent:  # nothing has left the window yet
        return causal(query, key, value, scoring)

    def block(start: int) -> torch.Tensor:
        stop = start + kv_softmax.BLOCK
        rows = (slice(sink), slice(max(start - recent + 1, 0), start), slice(start, stop))
        sinks, before, own_states = [[states[:, :, part] for states in (key, value)] for part in rows]
        window = Window(sink, recent, sinks, before, chunked)
        return checkpointed(kv_softmax.streaming, query[:, :, start:stop], *own_states, Span(start), scoring, window)

    return torch.cat([block(start) for start in range(0, tokens, kv_softmax.BLOCK)], 2)


def layer_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    window: int | None,
    chunked: bool = False,
) -> torch.Tensor:
    """The attention that a layer of the model has: full, or over its window or chunk. Shapes as in `causal`."""
    states = query, key, value, scoring
    return causal(*states) if window is None else streaming(*states, 0, window, chunked=chunked)


def checkpointed(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Call a function with gradient checkpointing: only its inputs are saved for the backward pass."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **options)
