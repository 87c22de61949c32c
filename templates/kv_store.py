"""A kernel that writes a token per row to a cache, and how kernels find those that pack tiles."""

import torch

from .kv_kernels import Launch, _matrix, _padded, _slots, _strides, _times_matrix, prepared, tl, triton
from .kv_storage import HeadTable

# of kernels that pack tiles: the function that does, and its options
PACK_OPTIONS = "PACK", "K_BITS", "V_BITS", "K_ROWS", "K_COLUMNS", "K_N", "V_COLUMNS", "V_N", "RANGES"


@triton.jit(do_not_specialize=["skipped_batch", "skipped_head", "heads", "rotated_keys", "rotated_values"])
def _append_kernel(
    q_ptr,  # [batch, heads * G, D]
    new_k_ptr,  # [batch, heads, D]
    new_v_ptr,
    rotated_q_ptr,  # [batch, heads * G, D], or None
    columns_ptr,
    k_ptr,
    v_ptr,
    matrix_ptr,  # [D, D] in fp32, or None
    offset_ptr,
    skipped_ptr,
    sink_ptr,
    ring_ptr,
    kv_batch,
    kv_slot,
    q_batch,
    q_head,
    new_k_batch,
    new_k_head,
    new_v_batch,
    new_v_head,
    skipped_batch,
    skipped_head,
    heads,
    rotated_keys,
    rotated_values,
    G: tl.constexpr,
    D: tl.constexpr,
    MATRIX_N: tl.constexpr,
):
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    state = tl.program_id(1)
    position = tl.load(columns_ptr) - 1 - tl.load(skipped_ptr + batch * skipped_batch + head * skipped_head)
    sink = tl.load(sink_ptr + head)
    ring = tl.load(ring_ptr + head)
    slot = tl.where(position < sink, position, sink + (position - sink) % tl.maximum(ring, 1))
    offset = batch * kv_batch + (tl.load(offset_ptr + head).to(tl.int64) + slot) * kv_slot
    source, target, rotated_heads = new_k_ptr + batch * new_k_batch + head * new_k_head, k_ptr + offset, rotated_keys
    if state == 1:
        source, target, rotated_heads = (
            new_v_ptr + batch * new_v_batch + head * new_v_head,
            v_ptr + offset,
            rotated_values,
        )
    if rotated_q_ptr is not None:  # noqa: SIM102  # which alone the compiler knows
        if state > 1:
            member = head * G + state - 2
            source, target = q_ptr + batch * q_batch + member * q_head, rotated_q_ptr + (batch * heads * G + member) * D
    if (position >= 0) | (state > 1):
        d = tl.arange(0, _padded(D))
        x = tl.load(source + d, d < D, 0.0)
        if matrix_ptr is None:
            tl.store(target + d, x, d < D)
        elif head < rotated_heads:
            _times_matrix(x.to(tl.float32), matrix_ptr, target, step=D, sum_step=1, D=D, N=MATRIX_N)
        else:
            tl.store(target + d, x, d < D)


def append(
    table: HeadTable, columns: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Store one token per row in its slot of every head, in place; nothing where a head skips its column.

    Of rotated heads, states are rotated on the way, as `kv_codes.rotated` does.

    Floor: a launch; what it moves is a few kilobytes per row. A state that is rotated reads 4 * head_dim ** 2 bytes
    of a matrix, which stays in the L2 cache; each has a program of its own.

    Args:
        columns: int32 [1, 1], columns so far, these tokens' included. There must be slots for them.
        query: [batch, query_heads, head_dim], after RoPE; the query heads of a KV head are adjacent.
        keys, values: [batch, heads, 1, head_dim], after RoPE.

    Returns:
        The queries that attend to these keys: [batch, query_heads, head_dim], rotated where keys are.
    """
    launch = prepared(table, lambda: _launch(table, query, keys, values), (query, keys, values))
    rotated_query = torch.empty_like(query, memory_format=torch.contiguous_format) if table.rotated_keys else None
    with torch.cuda.device_of(keys):
        launch(query, keys, values, rotated_query, columns)
    return query if rotated_query is None else rotated_query


def _launch(table: HeadTable, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Launch:
    """The launch of `append` for a table and inputs of this form."""
    assert query.stride(2) == keys.stride(3) == values.stride(3) == 1
    batch, heads = keys.shape[:2]
    group = query.shape[1] // heads
    return Launch(
        _append_kernel,
        (batch * heads, 2 + group if table.rotated_keys else 2),
        **_slots(table),
        **_matrix(table),
        skipped_ptr=table.skipped,
        **_strides(query, "q_batch", "q_head"),
        **_strides(keys, "new_k_batch", "new_k_head"),
        **_strides(values, "new_v_batch", "new_v_head"),
        **_strides(table.skipped, "skipped_batch", "skipped_head"),
        rotated_keys=table.rotated_keys,
        rotated_values=table.rotated_values,
        G=group,
        num_warps=4 if table.rotated_values else 1,
        enable_fp_fusion=False,
    )


def pack_options(table: HeadTable) -> dict:
    """How a kernel packs tiles, whose code only checkpoints with quantized caches carry; None without tiles."""
    if table.quantization is None:
        return dict.fromkeys(PACK_OPTIONS)
    from . import kv_pack

    return {"PACK": kv_pack._pack, **kv_pack.options(table.keys.shape[2], table.quantization)}
