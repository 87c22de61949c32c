"""A kernel that stores the prompt tokens that budgeted heads keep."""

import torch

from .kv_kernels import TILE_TOKENS, _padded, _registers, _slots, _strides, _tiles, tl, triton
from .kv_layout import TILE
from .kv_storage import HeadTable
from .kv_store import pack_options

MOVE_BYTES = 2 * 1024  # of keys that a warp moves at once


@triton.jit(
    do_not_specialize=["heads", "columns", "skipped_batch", "skipped_head", "packed_batch", "packed_head", "tiles"]
)
def _compact_kernel(
    k_ptr,  # [batch, slots of all heads, D]
    v_ptr,
    prompt_k_ptr,  # [batch, heads, columns, D]
    prompt_v_ptr,
    kept_ptr,  # [batch, heads, n]
    offset_ptr,  # [heads]
    sink_ptr,
    ring_ptr,
    skipped_ptr,  # [batch, heads]
    k_codes_ptr,  # [batch, tiles, TILE, W]
    k_scales_ptr,  # [batch, tiles, 2, K_ROWS, K_COLUMNS]
    v_codes_ptr,
    v_scales_ptr,
    packed_ptr,  # [batch, heads]
    first_ptr,  # [heads]
    kv_batch,
    kv_slot,
    prompt_k_batch,
    prompt_k_head,
    prompt_k_column,
    prompt_v_batch,
    prompt_v_head,
    prompt_v_column,
    kept_batch,
    kept_head,
    skipped_batch,
    skipped_head,
    tiles,
    packed_batch,
    packed_head,
    heads,
    columns,
    D: tl.constexpr,
    N: tl.constexpr,
    PACK: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    K_ROWS: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    K_N: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    V_N: tl.constexpr,
    RANGES: tl.constexpr,
):
    begin = tl.program_id(0) * TILE_TOKENS
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    tokens = columns - tl.load(skipped_ptr + batch * skipped_batch + head * skipped_head).to(tl.int32)
    if begin >= tokens:
        return
    kept_columns = kept_ptr + batch * kept_batch + head * kept_head + begin
    k_source = prompt_k_ptr + batch * prompt_k_batch + head * prompt_k_head
    v_source = prompt_v_ptr + batch * prompt_v_batch + head * prompt_v_head
    target_offset = batch * kv_batch + tl.load(offset_ptr + head).to(tl.int64) * kv_slot
    sink = tl.load(sink_ptr + head)
    ring = tl.load(ring_ptr + head)
    n = tl.arange(0, N)
    d = tl.arange(0, _padded(D))[None, :]
    for start in range(0, TILE_TOKENS, N):
        position = begin + start + n
        in_slots = (position < tokens) & ((position < sink) | (position >= tokens - ring))
        column = tl.load(kept_columns + start + n, in_slots, 0).to(tl.int64)[:, None]
        slot = tl.where(position < sink, position, sink + (position - sink) % ring).to(tl.int64)[:, None]
        mask = in_slots[:, None] & (d < D)
        k = tl.load(k_source + column * prompt_k_column + d, mask)
        v = tl.load(v_source + column * prompt_v_column + d, mask)
        tl.store(k_ptr + target_offset + slot * kv_slot + d, k, mask)
        tl.store(v_ptr + target_offset + slot * kv_slot + d, v, mask)
    if PACK is not None:
        packed = tl.load(packed_ptr + batch * packed_batch + head * packed_head)
        if begin < packed:
            tile = batch * tiles + tl.load(first_ptr + head) + tl.program_id(0)
            k_codes = k_codes_ptr + tile * (TILE_TOKENS * D * K_BITS // 8)
            v_codes = v_codes_ptr + tile * (TILE_TOKENS * D * V_BITS // 8)
            k_scales = k_scales_ptr + tile * (2 * K_ROWS * K_COLUMNS)
            v_scales = v_scales_ptr + tile * (2 * TILE_TOKENS * V_COLUMNS)
            for values in tl.static_range(2):
                PACK(
                    state_ptr=v_source if values else k_source,
                    code_ptr=v_codes if values else k_codes,
                    scale_ptr=v_scales if values else k_scales,
                    first=kept_columns + sink,
                    ring=ring,
                    step=prompt_v_column if values else prompt_k_column,
                    D=D,
                    BITS=V_BITS if values else K_BITS,
                    ROWS=TILE_TOKENS if values else K_ROWS,
                    COLUMNS=V_COLUMNS if values else K_COLUMNS,
                    N=V_N if values else K_N,
                    RANGES=RANGES,
                    LISTED=True,
                )


def compact(table: HeadTable, keys: torch.Tensor, values: torch.Tensor, kept_columns: torch.Tensor) -> None:
    """Store some columns of a prompt as each head's first tokens: slots and tiles of all rows and heads, in place.

    A program has `TILE` tokens of a head; every head gets as many programs as `kept_columns` is long.
    `BudgetedHeads.compact` has the reference.

    Floor: twice the bytes that go into slots, and for each tile those of its tokens and `quantization.tile_bytes`, over
    the copy bandwidth; else a launch.

    Args:
        table: of budgeted heads alone: `skipped` are the columns that each head does not keep; `columns` or more: it
            keeps none. `packed` are its first tokens after the sinks, which go into tiles.
        keys, values: [batch, heads, columns, head_dim], in other memory.
        kept_columns: int [batch, heads, n], those that each head keeps, ascending; beyond the last of them anything.
    """
    assert keys.stride(3) == values.stride(3) == kept_columns.stride(2) == 1
    warps = 4 if table.tiles is None else 8
    with torch.cuda.device_of(keys):
        _compact_kernel[(triton.cdiv(kept_columns.shape[2], TILE), keys.shape[0] * keys.shape[1])](
            **_slots(table),
            **_tiles(table, torch.uint8),
            **pack_options(table),
            prompt_k_ptr=keys,
            prompt_v_ptr=values,
            kept_ptr=kept_columns,
            skipped_ptr=table.skipped,
            **_strides(keys, "prompt_k_batch", "prompt_k_head", "prompt_k_column"),
            **_strides(values, "prompt_v_batch", "prompt_v_head", "prompt_v_column"),
            **_strides(kept_columns, "kept_batch", "kept_head"),
            **_strides(table.skipped, "skipped_batch", "skipped_head"),
            columns=keys.shape[2],
            N=min(MOVE_BYTES * warps // (_padded(keys.shape[3]) * keys.element_size()), TILE),
            num_warps=warps,
            enable_fp_fusion=False,
            **(_registers() if table.tiles is not None else {}),
        )
