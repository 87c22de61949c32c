"""Compaction: what budgeted heads keep of a prompt moves to its place in the cache, in one launch for a layer."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # transformers demands whatever is imported outside of a try
    raise ImportError("the CUDA kernels of this checkpoint need triton") from error

from .kv_append import PACK_OPTIONS, _pack, _pack_options
from .kv_kernels import TILE_TOKENS, _padded
from .kv_layout import TILE, Quantisation
from .kv_quant import Tiles

MOVE_BYTES = 2 * 1024  # of keys that a warp moves at once


@triton.jit(do_not_specialize=["heads", "columns", "skipped_batch", "skipped_head", "packed_batch", "packed_head"])
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
    codes_batch,
    k_scales_batch,
    v_scales_batch,
    packed_batch,
    packed_head,
    heads,
    columns,
    D: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    K_ROWS: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    K_N: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    V_N: tl.constexpr,
    WP: tl.constexpr,
    CP: tl.constexpr,
    GP: tl.constexpr,
):
    begin = tl.program_id(0) * TILE_TOKENS
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    tokens = columns - tl.load(skipped_ptr + batch * skipped_batch + head * skipped_head).to(tl.int32)
    if begin >= tokens:
        return
    kept = kept_ptr + batch * kept_batch + head * kept_head + begin
    k_from = prompt_k_ptr + batch * prompt_k_batch + head * prompt_k_head
    v_from = prompt_v_ptr + batch * prompt_v_batch + head * prompt_v_head
    to = batch * kv_batch + tl.load(offset_ptr + head).to(tl.int64) * kv_slot
    sink, ring = tl.load(sink_ptr + head), tl.load(ring_ptr + head)
    n, d = tl.arange(0, N), tl.arange(0, DP)[None, :]
    for start in range(0, TILE_TOKENS, N):
        position = begin + start + n
        stays = (position < tokens) & ((position < sink) | (position >= tokens - ring))
        column = tl.load(kept + start + n, stays, 0).to(tl.int64)[:, None]
        slot = tl.where(position < sink, position, sink + (position - sink) % ring).to(tl.int64)[:, None]
        there = stays[:, None] & (d < D)
        k = tl.load(k_from + column * prompt_k_column + d, there)
        v = tl.load(v_from + column * prompt_v_column + d, there)
        tl.store(k_ptr + to + slot * kv_slot + d, k, there)
        tl.store(v_ptr + to + slot * kv_slot + d, v, there)
    if BITS is not None:
        packed = tl.load(packed_ptr + batch * packed_batch + head * packed_head)
        if begin < packed:
            tile = (tl.load(first_ptr + head) + tl.program_id(0)).to(tl.int64)
            codes = batch * codes_batch + tile * (TILE_TOKENS * D * BITS // 8)
            k_scales = k_scales_ptr + batch * k_scales_batch + tile * (2 * K_ROWS * K_COLUMNS)
            v_scales = v_scales_ptr + batch * v_scales_batch + tile * (2 * TILE_TOKENS * V_COLUMNS)
            _pack(
                *(k_from, k_codes_ptr + codes, k_scales, kept, ring, prompt_k_column),
                *(D, DP, BITS, K_ROWS, K_COLUMNS, K_N, WP, CP, GP, True),
            )
            _pack(
                *(v_from, v_codes_ptr + codes, v_scales, kept, ring, prompt_v_column),
                *(D, DP, BITS, TILE_TOKENS, V_COLUMNS, V_N, WP, CP, GP, True),
            )


def compact(
    keys: torch.Tensor,
    values: torch.Tensor,
    prompt_keys: torch.Tensor,
    prompt_values: torch.Tensor,
    kept: torch.Tensor,
    offsets: torch.Tensor,
    sinks: torch.Tensor,
    rings: torch.Tensor,
    skipped: torch.Tensor,
    tiles: Tiles | None = None,
    packed: torch.Tensor | None = None,
    first_tiles: torch.Tensor | None = None,
    quantisation: Quantisation | None = None,
) -> None:
    """Store some columns of a prompt as each head's first tokens: slots and tiles of all rows and heads, in place.

    A program has `TILE` tokens of a head; every head gets as many programs as `kept` is long. `kv_torch.compact` is the
    reference.

    Floor: twice the bytes that go into slots, and for each tile those of its tokens and `quantisation.tile_bytes`, over
    the copy bandwidth; else a launch.

    Args:
        keys, values, tiles, quantisation: as `decode` takes them.
        offsets, sinks, rings, first_tiles: as `decode` takes them, of budgeted heads alone.
        prompt_keys, prompt_values: [batch, heads, columns, head_dim], in other memory.
        kept: int [batch, heads, n], the columns that each head keeps, ascending; beyond the last of them anything.
        skipped: int [batch, heads], the columns that each head does not keep; `columns` or more: it keeps none.
        packed: int [batch, heads], the first tokens of each head that go into tiles, a multiple of `TILE`.
    """
    batch, heads, columns, head_dim = prompt_keys.shape
    assert keys.stride() == values.stride()
    assert keys.stride(2) == prompt_keys.stride(3) == prompt_values.stride(3) == kept.stride(2) == 1
    options, stored, strides = dict.fromkeys(PACK_OPTIONS), (None,) * 6, (0,) * 5
    if tiles is not None:
        assert tiles.key_codes.stride() == tiles.value_codes.stride()
        assert all(part[0].is_contiguous() for part in tiles)
        options, stored = _pack_options(head_dim, quantisation), (*tiles, packed, first_tiles)
        strides = *(part.stride(0) for part in (tiles[0], tiles.key_scales, tiles.value_scales)), *packed.stride()
    padded, warps = _padded(head_dim), 4 if tiles is None else 8
    sources = *prompt_keys.stride()[:3], *prompt_values.stride()[:3], *kept.stride()[:2]
    with torch.cuda.device_of(keys):
        _compact_kernel[(triton.cdiv(kept.shape[2], TILE), batch * heads)](
            *(keys, values, prompt_keys, prompt_values, kept, offsets, sinks, rings, skipped, *stored),
            *(*keys.stride()[:2], *sources, *skipped.stride(), *strides, heads, columns),
            D=head_dim,
            DP=padded,
            N=min(MOVE_BYTES * warps // (padded * keys.element_size()), TILE),
            **options,
            num_warps=warps,
        )
