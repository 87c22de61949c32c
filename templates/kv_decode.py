"""Decode: attention of each row's newest token over heads of every kind, in one launch and one to combine.

Batches of many rows have one more, which plans.
"""

import functools

import torch

from .kv_kernels import (
    LOWEST,
    TILE_BYTES,
    TILE_TOKENS,
    Launch,
    _accumulate,
    _matrix,
    _padded,
    _power,
    _registers,
    _score_factors,
    _scores,
    _sink_score,
    _slots,
    _strides,
    _tiles,
    _times_matrix,
    prepared,
    tl,
    triton,
)
from .kv_layout import TILE
from .kv_softmax import Scoring
from .kv_storage import HeadTable

# of the kernel, where there are tiles: the function that reads them, and its options
PACKED_OPTIONS = "OVER_TILES", "PACKED_M", "PACKED_N", "STRIPS", "K_BITS", "V_BITS", "KEY_ROWS", "GROUPS", "COLUMNS"
PACKED_OPTIONS += "K_PARTS", "V_PARTS", "KW", "VW"
# arguments whose values no kernel is compiled for
SIZES = "skipped_batch", "skipped_head", "packed_batch", "packed_head", "rows", "heads"
# measured on an H100: more programs or more units under way have more to finish when the last bytes have arrived
PROGRAMS = 2  # on a multiprocessor
STAGES = 3  # of the loop over units, of which one fewer is under way
PARTS = 128  # partial results of 128 channels that are combined at once; with more channels fewer
WARP = 32  # lanes; as many segments are planned without shared memory, and with fewer registers spill
ALONE = 128  # rows that every decode program plans for by itself; for more of them there is a launch
PLANNED = 512  # segments that this launch plans at once


@triton.jit
def _used_slots(length, sink, ring):
    """How many slots hold a token after `length` tokens."""
    return tl.maximum(tl.where(length > sink, sink + tl.minimum(length - sink, ring), length), 0)


@triton.jit
def _units(
    segment,
    columns_ptr,
    skipped_ptr,
    sink_ptr,
    ring_ptr,
    packed_ptr,
    count_ptr,
    skipped_batch,
    skipped_head,
    packed_batch,
    packed_head,
    rows,
    heads,
    N: tl.constexpr,
    PACKED_N: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Units of segments: with two of each row, of what is packed of all rows, and then of their slots."""
    valid, row, head = segment < SEGMENTS * rows, segment, segment % heads
    if SEGMENTS == 2:
        row = segment % rows
    skipped = tl.load(skipped_ptr + row // heads * skipped_batch + head * skipped_head, valid, 0)
    # columns are loaded wherever they count: held in a register, they add 26 instructions to the loop over slots
    lengths = tl.where(valid, tl.load(columns_ptr) - skipped, 0)
    used_slots = _used_slots(lengths, tl.load(sink_ptr + head, valid, 0), tl.load(ring_ptr + head, valid, 0))
    units = (used_slots + N - 1) // N
    if SEGMENTS == 2:
        packed_tokens = tl.load(packed_ptr + row // heads * packed_batch + head * packed_head, valid, 0).to(tl.int32)
        if count_ptr is not None:
            packed_tokens = tl.minimum(packed_tokens, tl.load(count_ptr + head, valid, 0) * TILE_TOKENS)
        units = tl.where(segment < rows, packed_tokens // PACKED_N, units)
    return units


@triton.jit
def _share(program, units, programs):
    """The first unit of a program's share."""
    return (program.to(tl.int64) * units // programs).to(tl.int32)


@triton.jit(do_not_specialize=[*SIZES, "programs", "steps"])
def _plan_kernel(
    columns_ptr,  # [1]
    skipped_ptr,  # [batch, heads]
    sink_ptr,  # [heads]
    ring_ptr,
    packed_ptr,  # [batch, heads]
    count_ptr,  # [heads], or None
    end_ptr,  # [SEGMENTS * rows]
    start_ptr,  # [programs]
    skipped_batch,
    skipped_head,
    packed_batch,
    packed_head,
    rows,
    heads,
    programs,
    steps,
    N: tl.constexpr,
    PACKED_N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Where segments end, and which of them has the first unit of each program: for batches of many rows.

    A decode program that planned so many would execute thousands of instructions, and be another one for each power of
    two of rows. This one counts on the device too, and is the same for all of them.
    """
    lanes, segments = tl.arange(0, LANES), SEGMENTS * rows
    all_units = 0
    for first in range(0, segments, LANES):
        segment = first + lanes
        units = _units(
            segment=segment,
            columns_ptr=columns_ptr,
            skipped_ptr=skipped_ptr,
            sink_ptr=sink_ptr,
            ring_ptr=ring_ptr,
            packed_ptr=packed_ptr,
            count_ptr=count_ptr,
            skipped_batch=skipped_batch,
            skipped_head=skipped_head,
            packed_batch=packed_batch,
            packed_head=packed_head,
            rows=rows,
            heads=heads,
            N=N,
            PACKED_N=PACKED_N,
            SEGMENTS=SEGMENTS,
        )
        ends = all_units + tl.cumsum(units, 0)
        tl.store(end_ptr + segment, ends, segment < segments)
        all_units = tl.max(ends, 0)
    tl.debug_barrier()  # other threads read what these have stored
    busy_programs = tl.minimum(programs, all_units)
    for first in range(0, busy_programs, LANES):
        program = first + lanes
        unit = _share(tl.minimum(program, busy_programs - 1), all_units, busy_programs)
        low = tl.zeros_like(lanes)
        high = tl.zeros_like(lanes) + segments
        for _ in range(steps):
            middle = (low + high) // 2
            ends_before = tl.load(end_ptr + middle) <= unit
            low = tl.where(ends_before, middle + 1, low)
            high = tl.where(ends_before, high, middle)
        tl.store(start_ptr + program, low, program < busy_programs)


@triton.jit(do_not_specialize=[*SIZES, "tiles"])
def _decode_kernel(
    q_ptr,  # [batch, heads * G, D]
    columns_ptr,  # [1]
    k_ptr,  # [batch, slots of all heads, D]
    v_ptr,
    offset_ptr,  # [heads]
    skipped_ptr,  # [batch, heads]
    sink_ptr,  # [heads]
    ring_ptr,
    recent_ptr,
    partial_ptr,  # [programs + rows, G, D]
    lse_ptr,  # [programs + rows, G]
    end_ptr,  # [SEGMENTS * rows]
    start_ptr,  # [programs], or None
    k_codes_ptr,  # int16 words [batch, tiles, TILE, D * K_BITS / 16]
    k_scales_ptr,  # [batch, tiles, 2, ...]
    v_codes_ptr,
    v_scales_ptr,
    packed_ptr,  # [batch, heads]
    first_ptr,  # [heads]
    count_ptr,  # or None
    q_batch,
    q_head,
    kv_batch,
    kv_slot,
    skipped_batch,
    skipped_head,
    tiles,
    packed_batch,
    packed_head,
    rows,
    heads,
    scale,
    cap,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    OVER_TILES: tl.constexpr,
    PACKED_M: tl.constexpr,
    PACKED_N: tl.constexpr,
    STRIPS: tl.constexpr,
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    K_PARTS: tl.constexpr,
    V_PARTS: tl.constexpr,
    KW: tl.constexpr,
    VW: tl.constexpr,
    CAP: tl.constexpr,
    ASM: tl.constexpr,
):
    pid = tl.program_id(0)
    if start_ptr is None:  # every program plans for itself
        all_segments = tl.arange(0, LANES)
        units = _units(
            segment=all_segments,
            columns_ptr=columns_ptr,
            skipped_ptr=skipped_ptr,
            sink_ptr=sink_ptr,
            ring_ptr=ring_ptr,
            packed_ptr=packed_ptr,
            count_ptr=count_ptr,
            skipped_batch=skipped_batch,
            skipped_head=skipped_head,
            packed_batch=packed_batch,
            packed_head=packed_head,
            rows=rows,
            heads=heads,
            N=N,
            PACKED_N=PACKED_N,
            SEGMENTS=SEGMENTS,
        )
        ends = tl.cumsum(units, 0)
        if pid == 0:
            tl.store(end_ptr + all_segments, ends, all_segments < SEGMENTS * rows)
        all_units = tl.max(ends, 0)
    else:
        all_units = tl.load(end_ptr + SEGMENTS * rows - 1)
    programs = tl.minimum(tl.num_programs(0), all_units)
    if pid >= programs:
        return
    unit = _share(pid, all_units, programs)
    stop = _share(pid + 1, all_units, programs)
    DP: tl.constexpr = _padded(D)
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    n = tl.arange(0, N)
    in_head = (d < D)[None, :]

    if SEGMENTS == 2:
        if start_ptr is None:
            packed_stop = tl.minimum(stop, tl.max(tl.where(all_segments < rows, ends, 0), 0))
            begin = tl.max(tl.where(ends <= unit, ends, 0), 0)
            row = tl.sum((ends <= unit).to(tl.int32), 0)
        else:
            packed_stop = tl.minimum(stop, tl.load(end_ptr + rows - 1))
            row = tl.load(start_ptr + pid)
            begin = tl.load(end_ptr + row - 1, row > 0, 0)
        share = unit
        while unit < packed_stop:
            batch, head = (row // heads).to(tl.int64), row % heads
            packed = tl.load(packed_ptr + batch * packed_batch + head * packed_head).to(tl.int32)
            stored, newest, recent, count = packed, 0, 0, 0
            if count_ptr is not None:
                count = tl.load(count_ptr + head)
                stored = tl.minimum(packed, count * TILE_TOKENS)
                length = tl.load(columns_ptr) - tl.load(skipped_ptr + batch * skipped_batch + head * skipped_head)
                newest = length - 1 - tl.load(sink_ptr + head)
                recent = tl.load(recent_ptr + head)
            end = begin + stored // PACKED_N
            tile = (row // heads * tiles + tl.maximum(tl.load(first_ptr + head), 0)).to(tl.int64)
            KEY_SCALES: tl.constexpr = KEY_ROWS * D if KEY_ROWS > 0 else TILE_TOKENS * GROUPS
            for query in tl.static_range(0, G, PACKED_M):
                OVER_TILES(
                    q_ptr=q_ptr + batch * q_batch + (head * G + query) * q_head,
                    k_codes=k_codes_ptr + tile * (TILE_TOKENS * D * K_BITS // 16),
                    k_scales=k_scales_ptr + tile * (2 * KEY_SCALES),
                    v_codes=v_codes_ptr + tile * (TILE_TOKENS * D * V_BITS // 16),
                    v_scales=v_scales_ptr + tile * (2 * TILE_TOKENS * GROUPS),
                    partial_ptr=partial_ptr,
                    lse_ptr=lse_ptr,
                    part_number=(pid + row).to(tl.int64) * G + query,
                    q_head=q_head,
                    begin=unit - begin,
                    end=tl.minimum(end, packed_stop) - begin,
                    scale=scale,
                    cap=cap,
                    packed=packed,
                    newest=newest,
                    recent=recent,
                    count=count,
                    page_ptr=None,
                    code_page=0,
                    scale_page=0,
                    G=min(PACKED_M, G - query),
                    D=D,
                    M=PACKED_M,
                    N=PACKED_N,
                    STRIPS=STRIPS,
                    K_BITS=K_BITS,
                    V_BITS=V_BITS,
                    KEY_ROWS=KEY_ROWS,
                    GROUPS=GROUPS,
                    COLUMNS=COLUMNS,
                    K_PARTS=K_PARTS,
                    V_PARTS=V_PARTS,
                    KW=KW,
                    VW=VW,
                    CAP=CAP,
                    ASM=ASM,
                    RING=count_ptr is not None,
                )
            unit = tl.minimum(end, packed_stop)
            begin = end
            row += 1
        unit = tl.maximum(share, packed_stop)  # as it is; but after a while loop Triton 3.9 gives up cp.async below

    if start_ptr is None:
        begin = tl.max(tl.where(ends <= unit, ends, 0), 0)
        segment = tl.sum((ends <= unit).to(tl.int32), 0)
    else:
        segment = tl.maximum(tl.load(start_ptr + pid), (SEGMENTS - 1) * rows)
        begin = tl.load(end_ptr + segment - 1, segment > 0, 0)
    while unit < stop:
        row = segment - (SEGMENTS - 1) * rows
        batch, head = row // heads, row % heads
        length = tl.load(columns_ptr) - tl.load(skipped_ptr + batch * skipped_batch + head * skipped_head)
        sink = tl.load(sink_ptr + head)
        ring = tl.load(ring_ptr + head)
        recent = tl.load(recent_ptr + head)
        slots = _used_slots(length, sink, ring)
        end = begin + (slots + N - 1) // N
        newest = (length - 1 - sink) % tl.maximum(ring, 1)  # of the ring's slots, the one of the newest token
        q_rows = q_ptr + batch.to(tl.int64) * q_batch + (head * G + m)[:, None] * q_head + d[None, :]
        q = tl.load(q_rows, (m < G)[:, None] & in_head, 0.0)
        if SEGMENTS == 2:
            packed = tl.load(packed_ptr + batch.to(tl.int64) * packed_batch + head * packed_head).to(tl.int32)
            recent = tl.minimum(recent, length - sink - packed)
        first = (unit - begin) * N
        offset = batch.to(tl.int64) * kv_batch + (tl.load(offset_ptr + head).to(tl.int64) + first) * kv_slot
        k_tile, v_tile = k_ptr + offset, v_ptr + offset
        top = tl.full([M], LOWEST, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        for start in range(first, (tl.minimum(end, stop) - begin) * N, N):
            slot = start + n
            stored = slot < slots
            age = newest - (slot - sink)
            age = tl.where(age < 0, age + ring, age)
            visible = stored & ((slot < sink) | (age < recent))
            if SEGMENTS == 2:  # many slots may hold what is packed
                stored = visible
            states = n[:, None] * kv_slot + d[None, :]
            k = tl.load(k_tile + states, stored[:, None] & in_head, 0.0)
            v = tl.load(v_tile + states, stored[:, None] & in_head, 0.0)
            scores = tl.where(visible[None, :], _scores(q, k, scale, cap, CAP), float("-inf"))
            top, total, acc = _accumulate(scores, v, top, total, acc)
            k_tile += N * kv_slot
            v_tile += N * kv_slot
        # a program's segments follow one another, and so do programs: pid + segment is never taken twice
        part = (pid + segment).to(tl.int64) * G + m
        safe_total = tl.where(total > 0, total, 1.0)
        tl.store(lse_ptr + part, tl.where(total > 0, top + tl.log2(safe_total), LOWEST), m < G)
        tl.store(partial_ptr + part[:, None] * D + d[None, :], acc / safe_total[:, None], (m < G)[:, None] & in_head)
        unit = tl.minimum(end, stop)
        begin = end
        segment += 1


@triton.jit(do_not_specialize=["rows", "heads", "programs", "rotated"])
def _combine_kernel(
    out_ptr,  # [rows, G, D]
    logit_ptr,  # [heads * G] of learned sinks, or None
    partial_ptr,  # [programs + SEGMENTS * rows, G, D]
    lse_ptr,  # [programs + SEGMENTS * rows, G]
    end_ptr,  # [SEGMENTS * rows]
    matrix_ptr,  # [D, D] in fp32, or None
    rows,
    heads,
    programs,
    rotated,
    G: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    MATRIX_N: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    row = tl.program_id(0)
    member = tl.program_id(1)
    units = tl.load(end_ptr + SEGMENTS * rows - 1).to(tl.int64)
    programs = tl.minimum(programs, units)
    DP: tl.constexpr = _padded(D)
    d = tl.arange(0, DP)
    top = LOWEST
    total = 0.0
    if logit_ptr is not None:
        top = _sink_score(logit_ptr + row % heads * G + member)
        total = 1.0
    acc = tl.zeros([DP], tl.float32)
    for number in tl.static_range(SEGMENTS):
        segment = row + number * rows
        end = tl.load(end_ptr + segment)
        begin = tl.load(end_ptr + segment - 1, segment > 0, 0)
        # the programs that had the segment's first and last unit: inverse of floor(program * units / programs)
        first = (((begin + 1) * programs - 1) // tl.maximum(units, 1)).to(tl.int32)
        stop = tl.where(end > begin, ((end * programs - 1) // tl.maximum(units, 1)).to(tl.int32) + 1, first)
        for start in range(first, stop, PARTS):
            program = start + tl.arange(0, PARTS)
            part = (program + segment).to(tl.int64) * G + member
            lse = tl.load(lse_ptr + part, program < stop, float("-inf"))
            partial = tl.load(
                partial_ptr + part[:, None] * D + d[None, :], (program < stop)[:, None] & (d < D)[None, :], 0.0
            )
            new_top = tl.maximum(top, tl.max(lse, 0))
            weights = tl.exp2(lse - new_top)
            fade = tl.exp2(top - new_top)
            acc = acc * fade + tl.sum(partial * weights[:, None], 0)
            total = total * fade + tl.sum(weights, 0)
            top = new_top
    out = acc / tl.where(total > 0, total, 1.0)
    out_row = out_ptr + (row.to(tl.int64) * G + member) * D
    if matrix_ptr is None:
        tl.store(out_row + d, out.to(out_ptr.dtype.element_ty), d < D)
    elif row % heads < rotated:  # back: a rotation's inverse is its transpose
        _times_matrix(out, matrix_ptr, out_row, step=1, sum_step=D, D=D, N=MATRIX_N)
    else:
        tl.store(out_row + d, out.to(out_ptr.dtype.element_ty), d < D)


def decode(
    query: torch.Tensor, table: HeadTable, columns: torch.Tensor, scoring: Scoring, programs: int | None = None
) -> torch.Tensor:
    """Attention of one query per row and query head, over heads of every kind in one launch (and one to combine).

    With more than `ALONE` rows, pairs of a sequence and a KV head, another launch plans before.

    The packed tokens of all (row, KV head) pairs and then their slots lie in one line, in units of about as many bytes,
    of which each program takes an equal share (stream-K), so that heads of any length keep the device busy. Columns
    are counted on the device: a CUDA graph replays this as they grow.

    Floor: 2 * head_dim * itemsize bytes for each slot that holds a token which is not packed, and
    `quantization.tile_bytes(head_dim)` for each packed tile, summed over rows and KV heads, over the read bandwidth.

    Args:
        query: [batch, query_heads, head_dim] of each row's newest token, whose keys and values are stored already, as
            `append` returns them; the query heads of a KV head are adjacent.
        columns: int32 [1, 1], columns so far. Where a head skips them all, the result is zero.
        programs: how many share the units; default `PROGRAMS` on each multiprocessor.

    Returns:
        [batch, query_heads, head_dim], rotated back where values are stored rotated.
    """
    prepare, settings = lambda: _launches(query, table, scoring, programs), (scoring.scale, scoring.softcap, programs)
    plan, attend, combine = prepared(table, prepare, (query, scoring.sinks), *settings)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(query):
        if plan is not None:
            plan(columns)
        attend(query, columns)
        combine(out, scoring.sinks)
    return out


def _launches(query: torch.Tensor, table: HeadTable, scoring: Scoring, programs: int | None) -> tuple:
    """The launches of `decode` over a table for queries of this form, with memory for what they leave each other."""
    assert query.stride(2) == 1
    (batch, query_heads, head_dim), heads, device = query.shape, len(table.offsets), query.device
    group, rows, itemsize = query_heads // heads, batch * heads, query.element_size()
    storage = {**_slots(table), **_tiles(table, torch.int16)}
    tokens = min(max(TILE_BYTES // (_padded(head_dim) * itemsize), 16), 64)  # of a unit of slots
    max_units = batch * (table.keys.shape[1] // tokens + heads)
    segments, options = 1, dict.fromkeys(PACKED_OPTIONS)  # of a row's KV head: slots, and packed tokens before them
    if table.tiles is not None and table.quantization is not None:
        from . import kv_packed  # which only checkpoints with quantized caches carry

        segments, options = 2, kv_packed.options(head_dim, _power(group), table.quantization)
        max_units += batch * table.tiles.key_codes.shape[1] * (TILE // options["PACKED_N"])
    programs = min(programs or PROGRAMS * _multiprocessors(device), max_units)
    partial = torch.empty(programs + segments * rows, group, head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(programs + segments * rows, group, dtype=torch.float32, device=device)
    parts = {"partial_ptr": partial, "lse_ptr": lse, "G": group}
    ends = torch.empty(segments * rows, dtype=torch.int32, device=device)
    line = {"end_ptr": ends, "rows": rows, "heads": heads, "SEGMENTS": segments}
    units = {
        **{name: storage[name] for name in ("sink_ptr", "ring_ptr", "packed_ptr", "packed_batch", "packed_head")},
        "skipped_ptr": table.skipped,
        "count_ptr": table.counts,
        "start_ptr": torch.empty(programs, dtype=torch.int32, device=device) if rows > ALONE else None,
        **_strides(table.skipped, "skipped_batch", "skipped_head"),
        "N": tokens,
        "PACKED_N": options["PACKED_N"],
    }
    plan = Launch(
        _plan_kernel,
        (1,),
        **line,
        **units,
        programs=programs,
        steps=(segments * rows).bit_length(),
        LANES=PLANNED,
        num_warps=4,
        enable_fp_fusion=False,
    )
    attend = Launch(
        _decode_kernel,
        (programs,),
        **{**storage, **options, **parts, **line, **units},
        **_score_factors(scoring),
        recent_ptr=table.recents,
        **_strides(query, "q_batch", "q_head"),
        M=max(16, _power(group)),
        LANES=WARP if segments * rows <= WARP else ALONE * segments,
        ASM=torch.version.hip is None and itemsize == 2 and not triton.knobs.runtime.interpret,
        num_warps=4,
        # a stage of float32 tiles would have a scale and a zero of 4 bytes for every element, up to 400 KB
        num_stages=STAGES if itemsize == 2 or segments == 1 else 1,
        enable_fp_fusion=True,
        **_registers(),
    )
    combine = Launch(
        _combine_kernel,
        (rows, group),
        **parts,
        **line,
        **_matrix(table),
        programs=programs,
        rotated=table.rotated_values,
        D=head_dim,
        PARTS=PARTS // max(_padded(head_dim) // 128, 1),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return plan if rows > ALONE else None, attend, combine


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """How many a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
