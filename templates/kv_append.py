"""Tokens on their way into a cache: one per row into its slot of every head, and whole tiles from there into codes."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # transformers demands whatever is imported outside of a try
    raise ImportError("the CUDA kernels of this checkpoint need triton") from error

from .kv_kernels import _padded


@triton.jit(do_not_specialize=["position_batch", "position_head", "heads"])
def _append_kernel(
    k_ptr,
    v_ptr,
    new_k_ptr,
    new_v_ptr,
    offset_ptr,
    position_ptr,
    sink_ptr,
    ring_ptr,
    kv_batch,
    kv_slot,
    new_k_batch,
    new_k_head,
    new_v_batch,
    new_v_head,
    position_batch,
    position_head,
    heads,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    position = tl.load(position_ptr + batch * position_batch + head * position_head).to(tl.int32)
    if position >= 0:
        sink, ring = tl.load(sink_ptr + head), tl.load(ring_ptr + head)
        slot = tl.where(position < sink, position, sink + (position - sink) % tl.maximum(ring, 1))
        at = batch.to(tl.int64) * kv_batch + (tl.load(offset_ptr + head).to(tl.int64) + slot) * kv_slot
        d = tl.arange(0, DP)
        new_k = tl.load(new_k_ptr + batch * new_k_batch + head * new_k_head + d, d < D)
        new_v = tl.load(new_v_ptr + batch * new_v_batch + head * new_v_head + d, d < D)
        tl.store(k_ptr + at + d, new_k, d < D)
        tl.store(v_ptr + at + d, new_v, d < D)


def append(
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    offsets: torch.Tensor,
    positions: torch.Tensor,
    sinks: torch.Tensor,
    rings: torch.Tensor,
) -> None:
    """Store one token per row in its slot of every head, in place. Where the position is negative, nothing is stored.

    Floor: a launch; what it moves is a few kilobytes per row.

    Args:
        keys, values, offsets, sinks, rings: as `decode` takes them. There must be a slot for the position.
        new_keys, new_values: [batch, heads, 1, head_dim], after RoPE.
        positions: int [batch, heads], each head's own: tokens that it holds already.
    """
    batch, heads, _, head_dim = new_keys.shape
    assert keys.stride() == values.stride()
    assert keys.stride(2) == new_keys.stride(3) == new_values.stride(3) == 1
    with torch.cuda.device_of(keys):
        _append_kernel[(batch * heads,)](
            *(keys, values, new_keys, new_values, offsets, positions, sinks, rings),
            *(*keys.stride()[:2], *new_keys.stride()[:2], *new_values.stride()[:2], *positions.stride(), heads),
            D=head_dim,
            DP=_padded(head_dim),
            num_warps=1,
        )


def append_reference(keys, values, new_keys, new_values, offsets, positions, sinks, rings):
    """What `append` does, token by token."""
    for row, of_heads in enumerate(positions.tolist()):
        for head, (position, sink, ring) in enumerate(zip(of_heads, sinks.tolist(), rings.tolist(), strict=True)):
            if position >= 0:
                slot = position if position < sink else sink + (position - sink) % ring
                keys[row, offsets[head] + slot] = new_keys[row, head, 0]
                values[row, offsets[head] + slot] = new_values[row, head, 0]
