"""What reading a prompt chunk by chunk leaves in memory, by its formula."""

from __future__ import annotations

from kvsurgery.templates.kv_reform import Reform


def encode_bytes(reform: Reform, tokens: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes held from chunk to chunk while a prompt of `tokens` is read: what the layers below the exit keep,
    and every token's embedding.

    A chunk adds one layer's states on their way through: keys and values of `encode_budget + chunk` tokens.
    """
    kept = 2 * reform.exit_layer * kv_heads * min(tokens, reform.encode_budget)
    return (kept + len(reform.heads) * tokens) * head_dim * itemsize
