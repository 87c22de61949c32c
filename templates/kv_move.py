"""A kernel that moves the tokens selected by kv_reselect.py to the first positions of a head, for rolling budgets.

Moving is in place. A token only ever moves to an earlier position, so the first ones go first.
"""

import torch

from .kv_kernels import _padded, _slots, _strides, tl, triton
from .kv_storage import HeadTable

MOVED = 32  # tokens at once


@triton.jit(do_not_specialize=["column", "places", "heads", "skipped_batch", "skipped_head"])
def _move_kernel(
    k_ptr,  # [batch, slots of all heads, D]
    v_ptr,
    kept_ptr,  # [batch, heads, places]
    offset_ptr,  # [heads]
    sink_ptr,  # of no use: each of these heads has the token at every position in its slot
    ring_ptr,
    skipped_ptr,  # [batch, heads]
    kv_batch,
    kv_slot,
    skipped_batch,
    skipped_head,
    heads,
    column,
    places,
    D: tl.constexpr,
    N: tl.constexpr,
):
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    tokens = column - tl.load(skipped_ptr + batch * skipped_batch + head * skipped_head)
    kept_positions = kept_ptr + tl.program_id(0).to(tl.int64) * places
    states = batch * kv_batch + tl.load(offset_ptr + head).to(tl.int64) * kv_slot
    n = tl.arange(0, N)
    d = tl.arange(0, _padded(D))[None, :]
    for begin in range(0, tokens, N):
        slot = begin + n
        source = tl.load(kept_positions + slot, slot < tokens, 0)
        mask = (source > slot)[:, None] & (d < D)
        source_offsets = states + source.to(tl.int64)[:, None] * kv_slot + d
        target_offsets = states + slot.to(tl.int64)[:, None] * kv_slot + d
        k = tl.load(k_ptr + source_offsets, mask)
        v = tl.load(v_ptr + source_offsets, mask)
        tl.debug_barrier()  # what others of this block still read; later blocks read later slots
        tl.store(k_ptr + target_offsets, k, mask)
        tl.store(v_ptr + target_offsets, v, mask)


def move(table: HeadTable, kept_positions: torch.Tensor, column: int) -> None:
    """Let the first tokens of each head be those that `select` chose, in place.

    Tokens in tiles keep their codes, and `table.packed` says how many are in tiles now. What slots get is put aside
    first.

    Floor: twice the bytes of what moves over the copy bandwidth; else a launch.
    """
    batch, heads = table.skipped.shape
    arguments = {
        **_slots(table),
        **_strides(table.skipped, "skipped_batch", "skipped_head"),
        "kept_ptr": kept_positions,
        "skipped_ptr": table.skipped,
        "column": column,
        "places": kept_positions.shape[2],
        "N": MOVED,
        "enable_fp_fusion": False,
    }
    with torch.cuda.device_of(kept_positions):
        if table.tiles is None or table.quantization is None:
            _move_kernel[(batch * heads,)](**arguments, num_warps=4)
            return
        from . import kv_move_codes  # which only checkpoints with quantized caches carry

        kv_move_codes.move(arguments, table, kept_positions)
