"""A kernel that selects again which tokens each head keeps, for rolling budgets; kv_move.py moves them.

A head in the model's dtype has the token at position p in slot p. A quantized head has its older tokens in tiles, where
each has scales of its own. `HeldHeads` (kv_hold.py) has the same in plain torch, which is the reference.
"""

import torch

from .kv_kernels import (
    LOWEST,
    TILE_TOKENS,
    _padded,
    _registers,
    _score_factors,
    _scores,
    _sink_score,
    _slots,
    _strides,
    _tiles,
    tl,
    triton,
)
from .kv_layout import VALUE_NORM, Selection
from .kv_softmax import Scoring
from .kv_storage import HeadTable

ALWAYS_KEPT = tl.constexpr(0x7F800000)  # the bits of infinity: more than those of any importance


@triton.jit
def _tokens(
    ptr,
    codes_ptr,
    scales_ptr,
    position,
    mask,
    sink,
    ring,
    packed,
    kv_slot,
    D: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Keys or values [N, D] of a head at positions [N], where `mask` is set; with BITS, `packed` ones are codes."""
    d = tl.arange(0, _padded(D))[None, :]
    inside, in_slots, slot = mask[:, None] & (d < D), mask, position
    if BITS is not None:
        place = position - sink
        in_tiles = (place >= 0) & (place < packed)
        in_slots = mask & ~in_tiles
        slot = tl.where(place < 0, position, sink + place % ring)
    states = tl.load(ptr + slot.to(tl.int64)[:, None] * kv_slot + d, in_slots[:, None] & (d < D), 0.0)
    if BITS is not None:
        WORD_BITS: tl.constexpr = 2 if BITS == 3 else BITS
        W: tl.constexpr = D * WORD_BITS // 8
        inside &= in_tiles[:, None]
        tile, row = place // TILE_TOKENS, place % TILE_TOKENS
        tile_codes = codes_ptr + (tile * (TILE_TOKENS * D * BITS // 8))[:, None]
        words = tl.load(tile_codes + row[:, None] * W + d % W, inside, 0).to(tl.int32)
        codes = (words >> (d // W * WORD_BITS)) & (2**WORD_BITS - 1)
        if BITS == 3:
            words = tl.load(tile_codes + TILE_TOKENS * W + row[:, None] * (W // 2) + d % W // 2, inside, 0).to(tl.int32)
            codes |= ((words >> (d // W + d % 2 * 4)) & 1) << 2
        scales = scales_ptr + ((tile * 2 * TILE_TOKENS + row) * COLUMNS)[:, None] + d // (D // COLUMNS)
        scale = tl.load(scales, inside, 0.0).to(tl.float32)
        low = tl.load(scales + TILE_TOKENS * COLUMNS, inside, 0.0).to(tl.float32)
        states = tl.where(in_tiles[:, None], (codes.to(tl.float32) * scale + low).to(states.dtype), states)
    return states


@triton.jit(
    do_not_specialize=[
        *("column", "places", "heads", "skipped_batch", "skipped_head", "q_head", "q_place"),
        *("packed_batch", "packed_head", "tiles"),
    ]
)
def _select_kernel(
    k_ptr,  # [batch, slots of all heads, D]
    v_ptr,
    q_ptr,  # [batch, heads * group, QUERY_PLACES, D]
    learned_ptr,  # [heads * group], or None
    offset_ptr,  # [heads]
    sink_ptr,
    ring_ptr,
    budget_ptr,  # [heads]
    skipped_ptr,  # [batch, heads]
    k_codes_ptr,  # [batch, tiles, TILE, W]; None, as all of tiles: each token is in the slot of its position
    k_scales_ptr,  # [batch, tiles, 2, TILE, COLUMNS]
    v_codes_ptr,
    v_scales_ptr,
    packed_ptr,  # [batch, heads]
    first_ptr,  # [heads]
    received_ptr,  # [batch, heads, places]
    pooled_ptr,  # [batch, heads, places]
    kept_ptr,  # [batch, heads, places]
    kv_batch,
    kv_slot,
    q_batch,
    q_head,
    q_place,
    skipped_batch,
    skipped_head,
    tiles,
    packed_batch,
    packed_head,
    heads,
    column,
    places,
    scale,
    cap,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERY_PLACES: tl.constexpr,
    POOLED: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    SINKS: tl.constexpr,
    CAP: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    skipped = skipped_ptr + batch * skipped_batch + head * skipped_head
    length = column - tl.load(skipped)
    stop = tl.maximum(length - WINDOW, 0)  # the first positions are candidates
    count = tl.minimum(tl.load(budget_ptr + head), stop)
    states = batch * kv_batch + tl.load(offset_ptr + head).to(tl.int64) * kv_slot
    k_pointers, v_pointers = (k_ptr + states, k_ptr, k_ptr), (v_ptr + states, v_ptr, v_ptr)
    sink, ring, packed = 0, 1, 0
    if K_BITS is not None:
        sink = tl.load(sink_ptr + head)
        ring = tl.load(ring_ptr + head)
        packed = tl.load(packed_ptr + batch * packed_batch + head * packed_head)
        tile = batch * tiles + tl.load(first_ptr + head)
        scales = tile * (2 * TILE_TOKENS * COLUMNS)
        k_codes = k_codes_ptr + tile * (TILE_TOKENS * D * K_BITS // 8)
        v_codes = v_codes_ptr + tile * (TILE_TOKENS * D * V_BITS // 8)
        k_pointers = k_ptr + states, k_codes, k_scales_ptr + scales
        v_pointers = v_ptr + states, v_codes, v_scales_ptr + scales
    scratch = tl.program_id(0).to(tl.int64) * places
    received, pooled, kept_positions = received_ptr + scratch, pooled_ptr + scratch, kept_ptr + scratch
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    d = tl.arange(0, _padded(D))[None, :]

    # attention from the queries of the window, M rows at once: a group's heads one after the other
    for first in range(0, ROWS, M):
        row = tl.minimum(first + m, ROWS - 1)
        last_visible = length - WINDOW + row % WINDOW
        query_head = (head * (ROWS // WINDOW) + row // WINDOW).to(tl.int64)
        place = (column - WINDOW + row % WINDOW) % QUERY_PLACES
        q_pointers = q_ptr + batch * q_batch + query_head * q_head + place * q_place
        q = tl.load(q_pointers[:, None] + d, (d < D) & (m >= 0)[:, None], 0.0)
        top = tl.full([M], LOWEST, tl.float32)
        total = tl.zeros([M], tl.float32)
        if learned_ptr is not None:
            top, total = _sink_score(learned_ptr + query_head), total + 1
        for begin in range(0, length, N):
            slot = begin + n
            k = _tokens(*k_pointers, slot, slot < length, sink, ring, packed, kv_slot, D, K_BITS, COLUMNS)
            scores = tl.where(slot[None, :] <= last_visible[:, None], _scores(q, k, scale, cap, CAP), float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(scores - new_top[:, None]), 1)
            top = new_top
        share = tl.where(first + m < ROWS, 1 / (total * ROWS), 0.0)
        for begin in range(0, stop, N):
            slot = begin + n
            k = _tokens(*k_pointers, slot, slot < stop, sink, ring, packed, kv_slot, D, K_BITS, COLUMNS)
            weights = tl.exp2(_scores(q, k, scale, cap, CAP) - top[:, None]) * share[:, None]
            attention = tl.sum(weights, 0)
            if first > 0:
                attention += tl.load(received + slot, slot < stop, 0.0)
            tl.debug_barrier()  # lanes may hold the same element
            tl.store(received + slot, attention, slot < stop)
    if NORM:
        tl.debug_barrier()
        for begin in range(0, stop, N):
            slot = begin + n
            v = _tokens(*v_pointers, slot, slot < stop, sink, ring, packed, kv_slot, D, V_BITS, COLUMNS).to(tl.float32)
            importance = tl.load(received + slot, slot < stop, 0.0) * tl.sqrt_rn(tl.sum(v * v, 1))
            tl.debug_barrier()
            tl.store(received + slot, importance, slot < stop)
    tl.debug_barrier()  # other threads read what these have stored

    # floats that are not negative are in the order of their bits
    for begin in range(0, stop, N):
        slot = begin + n
        pooled_importance = tl.zeros([N], tl.float32)
        for distance in range(-(POOLED // 2), POOLED // 2 + 1):
            neighbor = slot + distance
            importance = tl.load(received + neighbor, (neighbor >= 0) & (neighbor < stop), 0.0)
            pooled_importance = pooled_importance + importance if MEAN else tl.maximum(pooled_importance, importance)
        bits = pooled_importance.to(tl.int32, bitcast=True)
        tl.store(pooled + slot, tl.where(slot < SINKS, ALWAYS_KEPT, bits), slot < stop)
    tl.debug_barrier()

    # the largest threshold that as many reach as are kept
    threshold = tl.zeros([], tl.int32)
    for step in range(0, 31):
        trial = threshold | (1 << (30 - step))
        threshold = tl.where(_count_reaching(pooled, trial, stop, N) >= count, trial, threshold)
    ties = count - _count_reaching(pooled, threshold + 1, stop, N)  # of which the first ones stay
    ties_before = tl.zeros([], tl.int32)
    kept_before = tl.zeros([], tl.int32)
    for begin in range(0, stop, N):
        slot = begin + n
        bits = tl.load(pooled + slot, slot < stop, -1)
        tie_flags = (bits == threshold).to(tl.int32)
        selected = (bits > threshold) | ((tie_flags > 0) & (ties_before + tl.cumsum(tie_flags, 0) <= ties))
        place = kept_before + tl.cumsum(selected.to(tl.int32), 0) - 1
        tl.store(kept_positions + place, slot, selected)
        ties_before += tl.sum(tie_flags, 0)
        kept_before += tl.sum(selected.to(tl.int32), 0)
    for begin in range(stop, length, N):
        slot = begin + n
        tl.store(kept_positions + count + slot - stop, slot, slot < length)
    tl.store(skipped, column - count - (length - stop))


@triton.jit
def _count_reaching(pooled, threshold, stop, N: tl.constexpr):
    """How many of the first `stop` bits reach a threshold."""
    n = tl.arange(0, N)
    reaching = tl.zeros([N], tl.int32)
    for begin in range(0, stop, N):
        reaching += (tl.load(pooled + begin + n, begin + n < stop, -1) >= threshold).to(tl.int32)
    return tl.sum(reaching, 0)


def _token_scale_options(table: HeadTable) -> dict[str, int | None]:
    """How a kernel finds the codes of tokens in tiles: bits, and the groups of a token that have scales."""
    if table.quantization is None:
        return {"K_BITS": None, "V_BITS": None, "COLUMNS": None}
    _, columns = table.quantization.value_groups(table.keys.shape[2])
    key_bits, value_bits = table.quantization.widths
    return {"K_BITS": key_bits, "V_BITS": value_bits, "COLUMNS": columns}


def select(
    table: HeadTable,
    budgets: torch.Tensor,
    queries: torch.Tensor,
    column: int,
    places: int,
    selection: Selection,
    scoring: Scoring,
) -> torch.Tensor:
    """Choose the positions of tokens that each head keeps before a column, and let `table.skipped` count the others.

    A program has a head of a row. It computes attention twice: for its log-sum-exp, and for the sums over queries. The
    threshold of what stays is found bit by bit.

    Floor: the bytes of all keys over the read bandwidth; else a launch.

    Args:
        table: of the held heads alone, which have a token of every column that they do not skip.
        budgets: int32 [heads].
        queries: [batch, heads * group, n, head_dim], column c at c % n.
        places: the most tokens that a head has.

    Returns:
        int32 [batch, heads, places], ascending; arbitrary beyond the columns that a head does not skip now.
    """
    assert queries.stride(3) == 1
    slots, (batch, heads) = _slots(table), table.skipped.shape
    rows = queries.shape[1] // heads * selection.window
    received = torch.empty(batch, heads, places, device=queries.device)
    pooled, kept_positions = torch.empty(2, batch, heads, places, dtype=torch.int32, device=queries.device)
    wide_rows = _padded(slots["D"]) * queries.element_size() > 256
    with torch.cuda.device_of(queries):
        _select_kernel[(batch * heads,)](
            **slots,
            **_tiles(table, torch.uint8),
            **_token_scale_options(table),
            **_score_factors(scoring),
            **_strides(queries, "q_batch", "q_head", "q_place"),
            **_strides(table.skipped, "skipped_batch", "skipped_head"),
            q_ptr=queries,
            learned_ptr=scoring.sinks,
            budget_ptr=budgets,
            skipped_ptr=table.skipped,
            received_ptr=received,
            pooled_ptr=pooled,
            kept_ptr=kept_positions,
            column=column,
            places=places,
            M=min(max(16, triton.next_power_of_2(rows)), 16 if wide_rows else 32),
            N=(32 if wide_rows else 64) // (1 if table.tiles is None else 2),
            ROWS=rows,
            WINDOW=selection.window,
            QUERY_PLACES=queries.shape[2],
            POOLED=selection.kernel_size,
            MEAN=selection.pool != "max",
            NORM=selection.select == VALUE_NORM,
            SINKS=selection.sinks,
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=False,
            **_registers(),
        )
    return kept_positions
