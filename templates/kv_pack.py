"""A kernel that quantizes whole tiles of tokens; others that pack tiles share its parts."""

from collections.abc import Sequence
from typing import Any

import torch

from .kv_kernels import TILE_TOKENS, _padded, _power, _slots, _strides, _tiles, tl, triton
from .kv_layout import CLIPPED, TILE, Quantization
from .kv_storage import HeadTable

PASS_BYTES = 32 * 1024  # of states in fp32 that a program quantizes at once


@triton.jit
def _rounded(x):
    """Non-negative x below 2 ** 22 to the nearest integer, halves to the even one."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def _places(first, n, ring, LISTED: tl.constexpr):
    """Where tokens n of a tile lie: in the slots of a ring from `first` on, or where a list at pointer `first` says."""
    return tl.load(first + n) if LISTED else (first + n) % ring


@triton.jit
def _range(x, mask, low, high, AXIS: tl.constexpr, MOST: tl.constexpr, RANGES: tl.constexpr, dtype: tl.constexpr):
    """Scale and minimum of groups along an axis of x, rounded to dtype, as `kv_codes` chooses them."""
    max_code = tl.full(low.shape, MOST, tl.float32)
    scale, minimum = tl.div_rn(high - low, max_code).to(dtype).to(tl.float32), low
    if RANGES > 1:
        errors = _squared_error(x, mask, scale, minimum, AXIS, MOST)
        for step in range(1, RANGES):
            factor = tl.div_rn(tl.full(low.shape, 20 - step, tl.float32), tl.full(low.shape, 20, tl.float32))
            span = (high - low) * factor
            narrow_scale = tl.div_rn(span, max_code).to(dtype).to(tl.float32)
            narrow_minimum = ((low + high) * 0.5 - span * 0.5).to(dtype).to(tl.float32)
            error = _squared_error(x, mask, narrow_scale, narrow_minimum, AXIS, MOST)
            improves = error < errors
            scale = tl.where(improves, narrow_scale, scale)
            minimum = tl.where(improves, narrow_minimum, minimum)
            errors = tl.where(improves, error, errors)
    return scale, minimum


@triton.jit
def _squared_error(x, mask, scale, low, AXIS: tl.constexpr, MOST: tl.constexpr):
    group_scale = tl.expand_dims(scale, AXIS)
    group_minimum = tl.expand_dims(low, AXIS)
    codes = _rounded(tl.div_rn(x - group_minimum, tl.where(group_scale > 0, group_scale, 1.0) + tl.zeros_like(x)))
    difference = tl.where(mask, tl.minimum(tl.maximum(codes, 0.0), MOST) * group_scale + group_minimum - x, 0.0)
    return tl.sum(difference * difference, AXIS)


@triton.jit
def _pack(
    state_ptr,  # of the head's place 0
    code_ptr,  # [TILE, W] bytes of one tile
    scale_ptr,  # [2, ROWS, COLUMNS]
    first,  # and `ring`: as `_places` takes them
    ring,
    step,  # from place to place
    D: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    RANGES: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Quantize a tile of keys or values: scales first, then codes by them, N tokens at once."""
    dtype: tl.constexpr = state_ptr.dtype.element_ty
    WORD_BITS: tl.constexpr = 2 if BITS == 3 else BITS
    W: tl.constexpr = D * WORD_BITS // 8
    GROUP: tl.constexpr = D // COLUMNS
    MOST: tl.constexpr = 2**BITS - 1
    WP: tl.constexpr = _power(W)
    n = tl.arange(0, N)
    w = tl.arange(0, WP)
    for start in tl.static_range(0, TILE_TOKENS, N):
        token = _places(first, start + n, ring, LISTED)
        if ROWS < TILE_TOKENS:  # of a channel, and N tokens are a group
            d = tl.arange(0, _padded(D))[None, :]
            x = tl.load(state_ptr + token[:, None] * step + d, d < D, 0.0).to(tl.float32)
            inside = (d < D) & (n >= 0)[:, None]
            scale, low = _range(x, inside, tl.min(x, 0), tl.max(x, 0), 0, MOST, RANGES, dtype)
            scale, low = scale[None, :], low[None, :]
            index, mask = start // N * D + d, d < D
        else:
            column = tl.arange(0, _power(COLUMNS))[None, :, None]
            g = tl.arange(0, _power(GROUP))[None, None, :]
            inside = (column < COLUMNS) & (g < GROUP) & (n >= 0)[:, None, None]
            states = state_ptr + token[:, None, None] * step + column * GROUP + g
            x = tl.load(states, inside, 0.0).to(tl.float32)
            low = tl.where(inside, x, float("inf"))
            high = tl.where(inside, x, float("-inf"))
            scale, low = _range(x, inside, tl.min(low, 2), tl.max(high, 2), 2, MOST, RANGES, dtype)
            column = tl.arange(0, _power(COLUMNS))[None, :]
            index, mask = (start + n)[:, None] * COLUMNS + column, (column < COLUMNS) & (n >= 0)[:, None]
        tl.store(scale_ptr + index, scale.to(dtype), mask)
        tl.store(scale_ptr + ROWS * COLUMNS + index, low.to(dtype), mask)
    tl.debug_barrier()  # other threads read what these have stored
    for start in tl.static_range(0, TILE_TOKENS, N):
        token = _places(first, start + n, ring, LISTED)
        mask = (w < W)[None, :] & (n >= 0)[:, None]
        packed = tl.zeros([N, WP], tl.int32)
        third = tl.zeros([N, WP], tl.int32)
        for plane in tl.static_range(8 // WORD_BITS):
            d = plane * W + w
            x = tl.load(state_ptr + token[:, None] * step + d[None, :], mask, 0.0).to(tl.float32)
            pointers = scale_ptr + ((start + n) * ROWS // TILE_TOKENS)[:, None] * COLUMNS + (d // GROUP)[None, :]
            scale = tl.load(pointers, mask, 1.0).to(tl.float32)
            low = tl.load(pointers + ROWS * COLUMNS, mask, 0.0).to(tl.float32)
            code = _rounded(tl.div_rn(x - low, tl.where(scale > 0, scale, 1.0)))
            code = tl.minimum(tl.maximum(code, 0.0), MOST).to(tl.int32)
            packed |= (code & (2**WORD_BITS - 1)) << (WORD_BITS * plane)
            third |= (code >> WORD_BITS) << plane
        tl.store(code_ptr + (start + n)[:, None] * W + w[None, :], packed.to(tl.uint8), mask)
        if BITS == 3:
            even, odd = tl.split(tl.reshape(third, [N, WP // 2, 2]))
            half = tl.arange(0, WP // 2)[None, :]
            thirds = code_ptr + TILE_TOKENS * W + (start + n)[:, None] * (W // 2) + half
            tl.store(thirds, (even | odd << 4).to(tl.uint8), (half < W // 2) & (n >= 0)[:, None])


@triton.jit(
    do_not_specialize=["confirmed_batch", "confirmed_head", "packed_batch", "packed_head", "tiles", "heads", "least"]
)
def _flush_kernel(
    k_ptr,
    v_ptr,
    offset_ptr,  # [heads]
    sink_ptr,
    ring_ptr,
    confirmed_ptr,  # [batch, heads]
    k_codes_ptr,  # [batch, tiles, TILE, W]
    k_scales_ptr,  # [batch, tiles, 2, K_ROWS, K_COLUMNS]
    v_codes_ptr,
    v_scales_ptr,
    packed_ptr,  # [batch, heads]
    first_ptr,  # [heads]
    count_ptr,  # or None
    kv_batch,
    kv_slot,
    confirmed_batch,
    confirmed_head,
    tiles,
    packed_batch,
    packed_head,
    heads,
    least,
    D: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    K_ROWS: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    K_N: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    V_N: tl.constexpr,
    RANGES: tl.constexpr,
):
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    first = tl.load(first_ptr + head)
    packed_count_ptr = packed_ptr + batch * packed_batch + head * packed_head
    packed = tl.load(packed_count_ptr).to(tl.int32)
    confirmed = tl.load(confirmed_ptr + batch * confirmed_batch + head * confirmed_head).to(tl.int32)
    sink = tl.load(sink_ptr + head)
    if (first >= 0) & (confirmed - sink - packed >= least):
        ring = tl.load(ring_ptr + head)
        place = packed // TILE_TOKENS
        if count_ptr is not None:
            place %= tl.load(count_ptr + head)
        tile = batch * tiles + first + place
        states = batch * kv_batch + (tl.load(offset_ptr + head) + sink).to(tl.int64) * kv_slot
        k_codes = k_codes_ptr + tile * (TILE_TOKENS * D * K_BITS // 8)
        v_codes = v_codes_ptr + tile * (TILE_TOKENS * D * V_BITS // 8)
        k_scales = k_scales_ptr + tile * (2 * K_ROWS * K_COLUMNS)
        v_scales = v_scales_ptr + tile * (2 * TILE_TOKENS * V_COLUMNS)
        for values in tl.static_range(2):
            _pack(
                state_ptr=(v_ptr if values else k_ptr) + states,
                code_ptr=v_codes if values else k_codes,
                scale_ptr=v_scales if values else k_scales,
                first=packed,
                ring=ring,
                step=kv_slot,
                D=D,
                BITS=V_BITS if values else K_BITS,
                ROWS=TILE_TOKENS if values else K_ROWS,
                COLUMNS=V_COLUMNS if values else K_COLUMNS,
                N=V_N if values else K_N,
                RANGES=RANGES,
                LISTED=False,
            )
        tl.store(packed_count_ptr, packed + TILE_TOKENS)


def flush(table: HeadTable, confirmed: torch.Tensor) -> None:
    """Pack the oldest whole tile of each head that has enough tokens beyond its residual, in place.

    A head with `residual` + `TILE` confirmed tokens after its sinks that are not packed, or more, gives its `TILE`
    oldest ones to tile packed // `TILE`, as `kv_codes.quantize` makes it, and `packed` grows by as many. The ring keeps
    them until others take their slots.

    Floor: 4 * `TILE` * head_dim * itemsize bytes to read and `quantization.tile_bytes(head_dim)` to write for each
    tile, every `TILE` tokens of a head; else a launch.

    Args:
        confirmed: int [batch, heads], tokens that are stored and will not be taken back.
    """
    assert table.quantization is not None  # as there are tiles
    with torch.cuda.device_of(confirmed):
        _flush_kernel[(confirmed.shape[0] * confirmed.shape[1],)](
            **_slots(table),
            **_tiles(table, torch.uint8),
            **options(table.keys.shape[2], table.quantization),
            count_ptr=table.counts,
            confirmed_ptr=confirmed,
            **_strides(confirmed, "confirmed_batch", "confirmed_head"),
            least=table.quantization.residual + TILE,
            num_warps=8,
            enable_fp_fusion=False,
        )


def flush_due(groups: Sequence[Any], table: HeadTable, settled: int) -> None:
    """Pack the tiles that are due of a table's heads, which are in these groups.

    No column before `settled` is taken back.
    """
    while any(group.due() for group in groups):
        flush(table, settled - table.skipped)
        for group in groups:
            group.note_packed()


def options(head_dim: int, quantization: Quantization) -> dict[str, int]:
    """How a kernel packs tiles: the groups that have scales, and the tokens that it takes at once."""
    key_groups = quantization.key_groups(head_dim)
    _, columns = quantization.value_groups(head_dim)
    tokens = min(max(PASS_BYTES // (4 * _power(columns) * _power(head_dim // columns)), 1), TILE)
    key_tokens = TILE // key_groups[0] if quantization.scheme == "kivi" else tokens
    key_rows, key_columns = key_groups
    return {
        "K_BITS": quantization.widths.keys,
        "V_BITS": quantization.widths.values,
        "K_ROWS": key_rows,
        "K_COLUMNS": key_columns,
        "K_N": key_tokens,
        "V_COLUMNS": columns,
        "V_N": tokens,
        "RANGES": CLIPPED if quantization.clip else 1,
    }
