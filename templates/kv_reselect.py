"""Kernels that select again where budgets hold: one chooses the tokens that each head keeps, and the other moves them.

They are for heads in the model's dtype, whose token at position p lies in slot p. `HeldHeads` (kv_hold.py) has the same
in plain torch, which is the reference, and what quantized heads take on a GPU too.
"""

from typing import NamedTuple

import torch

from .kv_cache import HeadTable
from .kv_kernels import LOWEST, _score_factors, _scores, _sink_score, _slots, _strides, tl, triton
from .kv_layout import VALUE_NORM, Selection
from .kv_torch import Scoring

SELECT_REGISTERS = 255  # of a thread; ptxas would use fewer, and spill
ALWAYS_KEPT = tl.constexpr(0x7F800000)  # the bits of infinity: more than those of any importance


@triton.jit(
    do_not_specialize=[
        *("column", "places", "heads", "skipped_batch", "skipped_head", "asked_head", "asked_place", "score_batch")
    ]
)
def _select_kernel(
    k_ptr,  # [batch, slots of all heads, D]
    v_ptr,
    asked_ptr,  # [batch, heads * group, ASKED, D]
    learned_ptr,  # [heads * group], or None
    offset_ptr,  # [heads]
    sink_ptr,  # of no use: each of these heads has the token at every position in its slot
    ring_ptr,
    budget_ptr,  # [heads]
    skipped_ptr,  # [batch, heads]
    score_ptr,  # [batch, scores of all heads], or None
    first_ptr,  # [heads + 1], each head's first score
    received_ptr,  # [batch, heads, places]
    pooled_ptr,  # [batch, heads, places]
    kept_ptr,  # [batch, heads, places]
    kv_batch,
    kv_slot,
    asked_batch,
    asked_head,
    asked_place,
    skipped_batch,
    skipped_head,
    score_batch,
    heads,
    column,
    places,
    scale,
    cap,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    ASKED: tl.constexpr,
    POOLED: tl.constexpr,
    MEAN: tl.constexpr,
    NORM: tl.constexpr,
    SINKS: tl.constexpr,
    CAP: tl.constexpr,
):
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    skipped = skipped_ptr + batch * skipped_batch + head * skipped_head
    length = column - tl.load(skipped)
    stop = tl.maximum(length - WINDOW, 0)  # the first slots are candidates
    count = tl.minimum(tl.load(budget_ptr + head), stop)
    states = batch * kv_batch + tl.load(offset_ptr + head).to(tl.int64) * kv_slot
    scratch = tl.program_id(0).to(tl.int64) * places
    received, pooled, kept = received_ptr + scratch, pooled_ptr + scratch, kept_ptr + scratch
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DP)[None, :]

    # attention from the queries of the window, M rows at once: a group's heads one after the other
    for first in range(0, ROWS, M):
        row = tl.minimum(first + m, ROWS - 1)
        last = length - WINDOW + row % WINDOW
        query = (head * (ROWS // WINDOW) + row // WINDOW).to(tl.int64)
        place = (column - WINDOW + row % WINDOW) % ASKED
        asked = asked_ptr + batch * asked_batch + query * asked_head + place * asked_place
        q = tl.load(asked[:, None] + d, (d < D) & (m >= 0)[:, None], 0.0)
        top, total = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32)
        if learned_ptr is not None:
            top, total = _sink_score(learned_ptr + query), total + 1
        for begin in range(0, length, N):
            slot = begin + n
            at = states + slot.to(tl.int64)[:, None] * kv_slot + d
            k = tl.load(k_ptr + at, (slot < length)[:, None] & (d < D), 0.0)
            scores = tl.where(slot[None, :] <= last[:, None], _scores(q, k, scale, cap, CAP), float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(scores - higher[:, None]), 1)
            top = higher
        share = tl.where(first + m < ROWS, 1 / (total * ROWS), 0.0)
        for begin in range(0, stop, N):
            slot = begin + n
            at = states + slot.to(tl.int64)[:, None] * kv_slot + d
            k = tl.load(k_ptr + at, (slot < stop)[:, None] & (d < D), 0.0)
            weights = tl.exp2(_scores(q, k, scale, cap, CAP) - top[:, None]) * share[:, None]
            own = tl.sum(weights, 0)
            if first > 0:
                own += tl.load(received + slot, slot < stop, 0.0)
            tl.debug_barrier()  # lanes may hold the same element
            tl.store(received + slot, own, slot < stop)
    if NORM:
        tl.debug_barrier()
        for begin in range(0, stop, N):
            slot = begin + n
            at = states + slot.to(tl.int64)[:, None] * kv_slot + d
            v = tl.load(v_ptr + at, (slot < stop)[:, None] & (d < D), 0.0).to(tl.float32)
            own = tl.load(received + slot, slot < stop, 0.0) * tl.sqrt_rn(tl.sum(v * v, 1))
            tl.debug_barrier()
            tl.store(received + slot, own, slot < stop)
    if score_ptr is not None:
        first_score = tl.load(first_ptr + head)
        scored = tl.load(first_ptr + head + 1) - first_score
        score = score_ptr + batch * score_batch + first_score
        tl.debug_barrier()
        for begin in range(0, tl.minimum(scored, stop), N):
            slot = begin + n
            there = slot < tl.minimum(scored, stop)
            own = tl.load(received + slot, there, 0.0) + tl.load(score + slot, there, 0.0)
            tl.debug_barrier()
            tl.store(received + slot, own, there)
    tl.debug_barrier()  # other threads read what these have stored

    # floats that are not negative are in the order of their bits
    for begin in range(0, stop, N):
        slot = begin + n
        best = tl.zeros([N], tl.float32)
        for beside in range(-(POOLED // 2), POOLED // 2 + 1):
            near = slot + beside
            own = tl.load(received + near, (near >= 0) & (near < stop), 0.0)
            best = best + own if MEAN else tl.maximum(best, own)
        bits = best.to(tl.int32, bitcast=True)
        tl.store(pooled + slot, tl.where(slot < SINKS, ALWAYS_KEPT, bits), slot < stop)
    tl.debug_barrier()

    # the largest threshold that as many reach as are kept
    threshold = tl.zeros([], tl.int32)
    for step in range(0, 31):
        trial = threshold | (1 << (30 - step))
        threshold = tl.where(_reaching(pooled, trial, stop, N) >= count, trial, threshold)
    ties = count - _reaching(pooled, threshold + 1, stop, N)  # of which the first ones stay
    equal_before, kept_before = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for begin in range(0, stop, N):
        slot = begin + n
        bits = tl.load(pooled + slot, slot < stop, -1)
        equal = (bits == threshold).to(tl.int32)
        stays = (bits > threshold) | ((equal > 0) & (equal_before + tl.cumsum(equal, 0) <= ties))
        place = kept_before + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(kept + place, slot, stays)
        equal_before += tl.sum(equal, 0)
        kept_before += tl.sum(stays.to(tl.int32), 0)
    for begin in range(stop, length, N):
        slot = begin + n
        tl.store(kept + count + slot - stop, slot, slot < length)
    tl.debug_barrier()
    if score_ptr is not None:
        for begin in range(0, scored, N):
            slot = begin + n
            source = tl.load(kept + slot, slot < count, 0)
            tl.store(score + slot, tl.load(received + source, slot < count, 0.0), slot < scored)
    tl.store(skipped, column - count - (length - stop))


@triton.jit
def _reaching(pooled, threshold, stop, N: tl.constexpr):
    """How many of the first `stop` bits reach a threshold."""
    n = tl.arange(0, N)
    reaching = tl.zeros([N], tl.int32)
    for begin in range(0, stop, N):
        reaching += (tl.load(pooled + begin + n, begin + n < stop, -1) >= threshold).to(tl.int32)
    return tl.sum(reaching, 0)


class Accumulated(NamedTuple):
    """What the selected tokens of all heads received in earlier selections."""

    scores: torch.Tensor  # float32 [batch, n], of one head after the other
    firsts: torch.Tensor  # int32 [heads + 1], where those of each head begin, and where the last ones end


def select(
    table: HeadTable,
    budgets: torch.Tensor,
    asked: torch.Tensor,
    column: int,
    places: int,
    selection: Selection,
    scoring: Scoring,
    earlier: Accumulated | None = None,
) -> torch.Tensor:
    """Choose the slots that each head keeps before a column, and let `table.skipped` count the others.

    A program has a head of a row. It computes attention twice: for its log-sum-exp, and for the sums over queries. The
    threshold of what stays is found bit by bit.

    Floor: the bytes of all keys over the read bandwidth; else a launch.

    Args:
        table: of the held heads alone, which have a token of every column that they do not skip.
        budgets: int32 [heads].
        asked: queries [batch, heads * group, n, head_dim], column c at c % n.
        places: the most tokens that a head has.
        earlier: scores to which heads add what tokens receive now, and which then are those of the chosen tokens.

    Returns:
        int32 [batch, heads, places], ascending; arbitrary beyond the columns that a head does not skip now.
    """
    assert asked.stride(3) == 1
    slots, (batch, heads) = _slots(table), table.skipped.shape
    rows = asked.shape[1] // heads * selection.window
    received = torch.empty(batch, heads, places, device=asked.device)
    pooled, kept = torch.empty(2, batch, heads, places, dtype=torch.int32, device=asked.device)
    wide = slots["DP"] * asked.element_size() > 256
    with torch.cuda.device_of(asked):
        _select_kernel[(batch * heads,)](
            **slots,
            **_score_factors(scoring),
            **_strides(asked, "asked_batch", "asked_head", "asked_place"),
            **_strides(table.skipped, "skipped_batch", "skipped_head"),
            asked_ptr=asked,
            learned_ptr=scoring.sinks,
            budget_ptr=budgets,
            skipped_ptr=table.skipped,
            score_ptr=earlier.scores if earlier else None,
            first_ptr=earlier.firsts if earlier else None,
            score_batch=earlier.scores.stride(0) if earlier else 0,
            received_ptr=received,
            pooled_ptr=pooled,
            kept_ptr=kept,
            column=column,
            places=places,
            M=min(max(16, triton.next_power_of_2(rows)), 16 if wide else 32),
            N=32 if wide else 64,
            ROWS=rows,
            WINDOW=selection.window,
            ASKED=asked.shape[2],
            POOLED=selection.kernel_size,
            MEAN=selection.pool != "max",
            NORM=selection.select == VALUE_NORM,
            SINKS=selection.sinks,
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=False,
            **({"maxnreg": SELECT_REGISTERS} if torch.version.hip is None else {}),
        )
    return kept


@triton.jit(do_not_specialize=["column", "places", "heads", "skipped_batch", "skipped_head"])
def _move_kernel(
    k_ptr,  # [batch, slots of all heads, D]
    v_ptr,
    kept_ptr,  # [batch, heads, places]
    offset_ptr,  # [heads]
    sink_ptr,  # of no use, as above
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
    DP: tl.constexpr,
    N: tl.constexpr,
):
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    tokens = column - tl.load(skipped_ptr + batch * skipped_batch + head * skipped_head)
    kept = kept_ptr + tl.program_id(0).to(tl.int64) * places
    states = batch * kv_batch + tl.load(offset_ptr + head).to(tl.int64) * kv_slot
    n, d = tl.arange(0, N), tl.arange(0, DP)[None, :]
    for begin in range(0, tokens, N):
        slot = begin + n
        source = tl.load(kept + slot, slot < tokens, 0)
        moves = (source > slot)[:, None] & (d < D)
        at = states + source.to(tl.int64)[:, None] * kv_slot + d
        to = states + slot.to(tl.int64)[:, None] * kv_slot + d
        k, v = tl.load(k_ptr + at, moves), tl.load(v_ptr + at, moves)
        tl.debug_barrier()  # what others of this block still read; later blocks read later slots
        tl.store(k_ptr + to, k, moves)
        tl.store(v_ptr + to, v, moves)


def move(table: HeadTable, kept: torch.Tensor, column: int) -> None:
    """Let the first tokens of each head be those that `select` chose, in place.

    Floor: twice the bytes of what moves over the copy bandwidth; else a launch.
    """
    slots, (batch, heads) = _slots(table), table.skipped.shape
    with torch.cuda.device_of(kept):
        _move_kernel[(batch * heads,)](
            **slots,
            **_strides(table.skipped, "skipped_batch", "skipped_head"),
            kept_ptr=kept,
            skipped_ptr=table.skipped,
            column=column,
            places=kept.shape[2],
            N=32,
            num_warps=4,
            enable_fp_fusion=False,
        )
