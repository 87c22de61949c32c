"""Triton kernels of attention over heads that keep different amounts, for CUDA; each with its reference in torch.

A head's tokens lie in slots. Slot s holds position s while s < sink; from there on positions go round a ring: position
p is in slot sink + (p - sink) % ring. A query at position i sees position p <= i when p < sink or i - p < recent. A
head that keeps every token has a sink that no position reaches (`EVERY`).

Floors below are the time that no implementation beats: bytes that must move over the device's read bandwidth, or
operations over the rate of its matrix units.
"""

import functools
import math

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # transformers demands whatever is imported outside of a try
    raise ImportError("the CUDA kernels of this checkpoint need triton") from error

EVERY = 2**30  # the sink of a full head, and more tokens than a row has
LOG2_E = math.log2(math.e)
TILE_BYTES = 8 * 1024  # keys of a decode tile; as much again for its values
PROGRAM_BYTES = 76 * 1024  # shared memory of a decode program: four tiles under way, and scratch
# a score lower than any real one: unlike -inf, its difference from a masked score is no NaN
LOWEST = tl.constexpr(-1.0e30)
EVERY_POSITION = tl.constexpr(EVERY)


@triton.jit
def _scores(q, k, scale, cap, CAP: tl.constexpr):
    """Scores in base 2 of q [M, D] over k [N, D]; `_score_factors` gives the factors."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAP:
        scores = cap * (1 - 2 / (tl.exp2(scores) + 1))  # tanh
    return scores


@triton.jit
def _accumulate(scores, v, top, total, acc):
    """A step of online softmax: scores [M, N] of values v [N, D]."""
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(top - higher)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(weights, 1), acc


@triton.jit
def _used_slots(length, sink, ring):
    """How many slots hold a token after `length` tokens."""
    return tl.maximum(tl.where(length > sink, sink + tl.minimum(length - sink, ring), length), 0)


@triton.jit(do_not_specialize=["length_batch", "length_head", "rows", "heads"])
def _decode_kernel(
    q_ptr,  # [batch, heads * G, D]
    k_ptr,  # [batch, slots of all heads, D]
    v_ptr,
    offset_ptr,  # [heads]
    length_ptr,  # [batch, heads]
    sink_ptr,  # [heads]
    ring_ptr,
    recent_ptr,
    partial_ptr,  # [programs + rows, G, D]
    lse_ptr,  # [programs + rows, G]
    end_ptr,  # [rows]
    q_batch,
    q_head,
    kv_batch,
    kv_slot,
    length_batch,
    length_head,
    rows,
    heads,
    scale,
    cap,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    DP: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    CAP: tl.constexpr,
):
    pid = tl.program_id(0)
    # every program plans for itself: tiles of each row, and where its own share of all tiles begins
    every = tl.arange(0, ROWS)
    head_of = every % heads
    real = every < rows
    lengths = tl.load(length_ptr + every // heads * length_batch + head_of * length_head, real, 0).to(tl.int32)
    used = _used_slots(lengths, tl.load(sink_ptr + head_of, real, 0), tl.load(ring_ptr + head_of, real, 0))
    ends = tl.cumsum((used + N - 1) // N, 0)
    if pid == 0:
        tl.store(end_ptr + every, ends, real)
    tiles = tl.max(ends, 0)
    programs = tl.minimum(tl.num_programs(0), tiles)
    if pid >= programs:
        return
    tile = (pid.to(tl.int64) * tiles // programs).to(tl.int32)
    stop = ((pid + 1).to(tl.int64) * tiles // programs).to(tl.int32)
    begin = tl.max(tl.where(ends <= tile, ends, 0), 0)
    row = tl.sum((ends <= tile).to(tl.int32), 0)

    m, d, n = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, N)
    in_head = (d < D)[None, :]
    while tile < stop:
        batch, head = row // heads, row % heads
        length = tl.load(length_ptr + batch * length_batch + head * length_head).to(tl.int32)
        sink, ring, recent = tl.load(sink_ptr + head), tl.load(ring_ptr + head), tl.load(recent_ptr + head)
        slots = _used_slots(length, sink, ring)
        end = begin + (slots + N - 1) // N
        newest = (length - 1 - sink) % tl.maximum(ring, 1)  # of the ring's slots, the one of the newest token
        q_rows = q_ptr + batch.to(tl.int64) * q_batch + (head * G + m)[:, None] * q_head + d[None, :]
        q = tl.load(q_rows, (m < G)[:, None] & in_head, 0.0)
        first = (tile - begin) * N
        at = batch.to(tl.int64) * kv_batch + (tl.load(offset_ptr + head).to(tl.int64) + first) * kv_slot
        k_tile, v_tile = k_ptr + at, v_ptr + at
        top = tl.full([M], LOWEST, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        for start in range(first, (tl.minimum(end, stop) - begin) * N, N):
            slot = start + n
            stored = slot < slots
            states = n[:, None] * kv_slot + d[None, :]
            k = tl.load(k_tile + states, stored[:, None] & in_head, 0.0)
            v = tl.load(v_tile + states, stored[:, None] & in_head, 0.0)
            age = newest - (slot - sink)
            age = tl.where(age < 0, age + ring, age)
            visible = stored & ((slot < sink) | (age < recent))
            scores = tl.where(visible[None, :], _scores(q, k, scale, cap, CAP), float("-inf"))
            top, total, acc = _accumulate(scores, v, top, total, acc)
            k_tile += N * kv_slot
            v_tile += N * kv_slot
        # a program's rows follow one another, and so do programs: pid + row is never taken twice
        part = (pid + row).to(tl.int64) * G + m
        safe = tl.where(total > 0, total, 1.0)
        tl.store(lse_ptr + part, tl.where(total > 0, top + tl.log2(safe), LOWEST), m < G)
        tl.store(partial_ptr + part[:, None] * D + d[None, :], acc / safe[:, None], (m < G)[:, None] & in_head)
        tile = tl.minimum(end, stop)
        begin = end
        row += 1


@triton.jit(do_not_specialize=["rows", "programs"])
def _combine_kernel(
    partial_ptr,  # [programs + rows, G, D]
    lse_ptr,  # [programs + rows, G]
    end_ptr,  # [rows]
    out_ptr,  # [rows, G, D]
    rows,
    programs,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PARTS: tl.constexpr,
):
    row, member = tl.program_id(0), tl.program_id(1)
    tiles = tl.load(end_ptr + rows - 1).to(tl.int64)
    end = tl.load(end_ptr + row)
    begin = tl.load(end_ptr + row - 1, row > 0, 0)
    programs = tl.minimum(programs, tiles)
    # the programs that had the row's first and last tile: inverse of floor(program * tiles / programs)
    first = (((begin + 1) * programs - 1) // tl.maximum(tiles, 1)).to(tl.int32)
    stop = tl.where(end > begin, ((end * programs - 1) // tl.maximum(tiles, 1)).to(tl.int32) + 1, first)
    d = tl.arange(0, DP)
    top = LOWEST
    total = 0.0
    acc = tl.zeros([DP], tl.float32)
    for start in range(first, stop, PARTS):
        program = start + tl.arange(0, PARTS)
        part = (program + row).to(tl.int64) * G + member
        lse = tl.load(lse_ptr + part, program < stop, float("-inf"))
        partial = tl.load(
            partial_ptr + part[:, None] * D + d[None, :], (program < stop)[:, None] & (d < D)[None, :], 0.0
        )
        higher = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - higher)
        fade = tl.exp2(top - higher)
        acc = acc * fade + tl.sum(partial * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        top = higher
    out = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (row.to(tl.int64) * G + member) * D + d, out.to(out_ptr.dtype.element_ty), d < D)


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    sinks: torch.Tensor,
    rings: torch.Tensor,
    recents: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """Attention of one query per row and query head, over heads of every kind in one launch (and one to combine).

    The tiles of all (row, KV head) pairs lie in one line, of which each program takes an equal share (stream-K), so
    that heads of any length keep the device busy. Lengths stay on the device: a CUDA graph replays this as they grow.

    Floor: 2 * head_dim * itemsize bytes for each slot that holds a token, summed over rows and KV heads, over the
    read bandwidth.

    Args:
        query: [batch, query_heads, head_dim] of each row's newest token, whose keys and values are stored already; the
            query heads of a KV head are adjacent.
        keys, values: [batch, slots, head_dim], the slots of a layer's heads one head after the other; equal strides.
        offsets: int [heads], the first slot of each KV head.
        lengths: int [batch, heads], tokens so far, also those that left a ring. Where it is 0, the result is zero.
        sinks, rings, recents: int32 [heads]: sink, slots of the ring (recent or more), window. Full: sink `EVERY`.
        scaling: factor of the scores; default head_dim ** -0.5.
        softcap: bound c of scores, c * tanh(score / c).
        programs: how many share the tiles; default as many as the device runs at once.

    Returns:
        [batch, query_heads, head_dim]
    """
    batch, query_heads, head_dim = query.shape
    heads = offsets.shape[0]
    group, rows = query_heads // heads, batch * heads
    assert keys.stride() == values.stride()
    assert keys.stride(2) == query.stride(2) == 1
    padded = _padded(head_dim)
    tile = min(max(TILE_BYTES // (padded * keys.element_size()), 16), 64)
    most = batch * (keys.shape[1] // tile + heads)  # tiles there can be
    programs = min(programs or _programs(query.device), most)
    partial = torch.empty(programs + rows, group, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(programs + rows, group, dtype=torch.float32, device=query.device)
    ends = torch.empty(rows, dtype=torch.int32, device=query.device)
    out = torch.empty(batch, query_heads, head_dim, dtype=query.dtype, device=query.device)
    with torch.cuda.device_of(query):
        _decode_kernel[(programs,)](
            *(query, keys, values, offsets, lengths, sinks, rings, recents, partial, lse, ends),
            *(*query.stride()[:2], *keys.stride()[:2], *lengths.stride(), rows, heads),
            *_score_factors(scaling, softcap, head_dim),
            G=group,
            D=head_dim,
            M=max(16, triton.next_power_of_2(group)),
            DP=padded,
            N=tile,
            ROWS=triton.next_power_of_2(rows),
            CAP=softcap is not None,
            num_warps=4,
            num_stages=5,
        )
        _combine_kernel[(rows, group)](
            *(partial, lse, ends, out, rows, programs), G=group, D=head_dim, DP=padded, PARTS=16, num_warps=4
        )
    return out


def decode_reference(query, keys, values, offsets, lengths, sinks, rings, recents, scaling=None, softcap=None):
    """What `decode` computes, row by row."""
    out = torch.zeros_like(query)
    group = query.shape[1] // len(offsets)
    for row, of_heads in enumerate(lengths.tolist()):
        for head, length in enumerate(of_heads):
            position = torch.arange(length, device=query.device)
            seen = position[(position < sinks[head]) | (length - 1 - position < recents[head])]
            slot = torch.where(seen < sinks[head], seen, sinks[head] + (seen - sinks[head]) % rings[head].clamp(min=1))
            at, here = offsets[head] + slot, slice(head * group, (head + 1) * group)
            if length:
                allowed = torch.ones_like(at, dtype=torch.bool)
                out[row, here] = _softmax(query[row, here], keys[row, at], values[row, at], allowed, scaling, softcap)
    return out


@triton.jit(do_not_specialize=["position_batch", "heads"])
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
    heads,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    position = tl.load(position_ptr + batch * position_batch).to(tl.int32)
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
        positions: int [batch].
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
    for row, position in enumerate(positions.tolist()):
        for head, (sink, ring) in enumerate(zip(sinks.tolist(), rings.tolist(), strict=True)):
            if position >= 0:
                slot = position if position < sink else sink + (position - sink) % ring
                keys[row, offsets[head] + slot] = new_keys[row, head, 0]
                values[row, offsets[head] + slot] = new_values[row, head, 0]


@triton.jit(do_not_specialize=["heads", "tokens", "past", "first", "sink", "recent"])
def _prefill_kernel(
    q_ptr,  # [batch, heads * G, tokens, D]
    k_ptr,  # [batch, heads, n, D]
    v_ptr,
    sink_k_ptr,  # [batch, heads, sink, D]
    sink_v_ptr,
    padding_ptr,  # [batch]
    out_ptr,  # [batch, heads * G, tokens, D]
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    sink_k_batch,
    sink_k_head,
    sink_k_token,
    sink_v_batch,
    sink_v_head,
    sink_v_token,
    out_batch,
    out_head,
    out_token,
    heads,
    tokens,
    past,
    first,
    sink,
    recent,
    scale,
    cap,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    STREAMING: tl.constexpr,
    SINKS_APART: tl.constexpr,
    CAP: tl.constexpr,
):
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    # the query heads of a KV head are further queries: row m is query m // G of query head m % G
    m = block * M + tl.arange(0, M)
    token, d = m // G, tl.arange(0, DP)
    written = (token < tokens)[:, None] & (d < D)[None, :]
    of_head = (head * G + m % G).to(tl.int64)
    q_rows = of_head * q_head + token.to(tl.int64) * q_token
    q = tl.load(q_ptr + batch * q_batch + q_rows[:, None] + d[None, :], written, 0.0)
    pad = 0
    if PADDED:
        pad = tl.load(padding_ptr + batch).to(tl.int32)
    position = past - pad + token
    low = past - pad + block * M // G
    high = past - pad + tl.minimum((block * M + M - 1) // G, tokens - 1)
    stop = high + 1

    k_row, v_row = k_ptr + batch * k_batch + head * k_head, v_ptr + batch * v_batch + head * v_head
    if BY_COLUMN:
        k_row += tl.cast(pad - first, tl.int64) * k_token
        v_row += tl.cast(pad - first, tl.int64) * v_token
    sink_k, sink_v = k_row, v_row
    if SINKS_APART:
        sink_k = sink_k_ptr + batch * sink_k_batch + head * sink_k_head
        sink_v = sink_v_ptr + batch * sink_v_batch + head * sink_v_head

    # tiles of sinks, then those of positions from `begin` to before `stop`
    n = tl.arange(0, N)
    sink_tiles = (tl.maximum(tl.minimum(sink, stop), 0) + N - 1) // N
    begin = tl.maximum(low - recent + 1, sink)
    top = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    for tile in range(0, sink_tiles + (tl.maximum(stop - begin, 0) + N - 1) // N):
        start, end, window = begin + (tile - sink_tiles) * N, stop, recent
        k_from, v_from, k_step, v_step = k_row, v_row, k_token, v_token
        if STREAMING:
            of_sinks = tile < sink_tiles
            start = tl.where(of_sinks, tile * N, start)
            end = tl.where(of_sinks, tl.minimum(sink, stop), stop)
            window = tl.where(of_sinks, EVERY_POSITION, recent)
            if SINKS_APART:
                k_from, v_from = tl.where(of_sinks, sink_k, k_row), tl.where(of_sinks, sink_v, v_row)
                k_step, v_step = tl.where(of_sinks, sink_k_token, k_token), tl.where(of_sinks, sink_v_token, v_token)
        there = start + n
        loaded = (there < end)[:, None] & (d < D)[None, :]
        k_from += tl.cast(start, tl.int64) * k_step
        v_from += tl.cast(start, tl.int64) * v_step
        k = tl.load(k_from + n[:, None] * k_step + d[None, :], loaded, 0.0)
        v = tl.load(v_from + n[:, None] * v_step + d[None, :], loaded, 0.0)
        scores = _scores(q, k, scale, cap, CAP)
        # most tiles of a long input are seen whole by every query of the block
        if (start + N > tl.minimum(low + 1, end)) | (start <= high - window):
            age = position[:, None] - there[None, :]
            scores = tl.where((age >= 0) & (age < window) & (there < end)[None, :], scores, float("-inf"))
        top, total, acc = _accumulate(scores, v, top, total, acc)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_rows = of_head * out_head + token.to(tl.int64) * out_token
    tl.store(out_ptr + batch * out_batch + out_rows[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), written)


def prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    past: int = 0,
    padding: torch.Tensor | None = None,
    sink: int = 0,
    recent: int | None = None,
    first: int | None = 0,
    sinks: tuple[torch.Tensor, torch.Tensor] | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of many queries per row, over heads of one kind; linear in the tokens for streaming heads.

    Three ways to hand keys and values:
      - an input without a past, or any keys by column from 0 on: as they are;
      - full heads after a past, stored by position, not by column: `first=None`;
      - streaming heads after a past: `sinks` by position, and keys from column `first` on, at most past - recent + 1.

    Floor: 4 * head_dim operations for each visible pair of a query and a key, over the rate of the matrix units.

    Args:
        query: [batch, query_heads, tokens, head_dim], at columns past, past + 1, ...; the query heads of a KV head are
            adjacent.
        keys, values: [batch, kv_heads, n, head_dim], at columns first, ..., past + tokens - 1; or with `first=None` at
            positions 0, 1, ...
        past: columns before the queries'.
        padding: int [batch], left padding of each row: position = column - padding. Queries in it get zero.
        sink, recent: see the module; recent None: full heads, whatever the sink.
        sinks: keys and values [batch, kv_heads, min(sink, positions) or more, head_dim] of positions 0, 1, ..., of this
            input too; None: they are among `keys`.
        scaling: factor of the scores; default head_dim ** -0.5.
        softcap: bound c of scores, c * tanh(score / c).

    Returns:
        [batch, query_heads, tokens, head_dim], the transpose of a contiguous [batch, tokens, query_heads, head_dim].
    """
    batch, query_heads, tokens, head_dim = query.shape
    heads = keys.shape[1]
    group = query_heads // heads
    sink_keys, sink_values = sinks or (keys, values)
    states = query, keys, values, sink_keys, sink_values
    assert all(part.stride(3) == 1 for part in states)
    assert first is None or first + keys.shape[2] == past + tokens
    assert not first or (sinks is not None and first <= max(past - recent + 1, 0))
    out = torch.empty(batch, tokens, query_heads, head_dim, dtype=query.dtype, device=query.device).transpose(1, 2)
    padded = _padded(head_dim)
    row_bytes = padded * query.element_size()
    most, tile = (128, 64) if row_bytes <= 256 else (64, 32) if row_bytes <= 512 else (32, 16)
    rows = 16 if tokens * group <= 16 else most
    with torch.cuda.device_of(query):
        _prefill_kernel[(triton.cdiv(tokens * group, rows), batch * heads)](
            *(*states, padding, out),
            *(stride for part in (*states, out) for stride in part.stride()[:3]),
            *(heads, tokens, past, first or 0, *((0, EVERY) if recent is None else (sink, recent))),
            *_score_factors(scaling, softcap, head_dim),
            G=group,
            D=head_dim,
            DP=padded,
            M=rows,
            N=tile,
            PADDED=padding is not None,
            BY_COLUMN=first is not None,
            STREAMING=recent is not None,
            SINKS_APART=sinks is not None,
            CAP=softcap is not None,
            num_warps=8 if rows == most else 4,
            num_stages=2,
        )
    return out


def prefill_reference(
    query, keys, values, past=0, padding=None, sink=0, recent=None, scaling=None, softcap=None
) -> torch.Tensor:
    """What `prefill` computes, with all keys and values by column from 0 on."""
    out = torch.zeros_like(query)
    group, tokens = query.shape[1] // keys.shape[1], query.shape[2]
    for row in range(len(query)):
        pad = 0 if padding is None else int(padding[row])
        column = torch.arange(past + tokens, device=query.device)
        own, age = column[past:, None] >= pad, column[past:, None] - column
        allowed = (age >= 0) & (column >= pad) & ((age < (recent or EVERY)) | (column - pad < sink))
        part = (states[row].repeat_interleave(group, 0) for states in (keys, values))
        # a query in the padding sees itself, for a softmax that is not empty, and is dropped
        result = _softmax(query[row], *part, allowed | (age == 0), scaling, softcap)
        out[row] = torch.where(own, result, 0)
    return out


@functools.cache
def _programs(device: torch.device) -> int:
    """Decode programs that a device runs at once."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count * max(properties.shared_memory_per_multiprocessor // PROGRAM_BYTES, 1)


def _padded(head_dim: int) -> int:
    """Elements of a row of a tile: a power of two, and enough for the matrix units."""
    return max(16, triton.next_power_of_2(head_dim))


def _score_factors(scaling: float | None, softcap: float | None, head_dim: int) -> tuple[float, float]:
    """What `_scores` multiplies the dot products and the capped scores by, so that exp2 is all it needs."""
    scaling = head_dim**-0.5 if scaling is None else scaling
    if softcap is None:
        return scaling * LOG2_E, 1.0
    return 2 * scaling / softcap * LOG2_E, softcap * LOG2_E


def _softmax(query, keys, values, allowed, scaling, softcap) -> torch.Tensor:
    """Attention of [..., m, head_dim] over [..., n, head_dim] in the inputs' precision; queries see something."""
    scores = query @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ values
