"""Prefill: causal attention of many queries per row, over heads of one kind."""

import torch

from .kv_kernels import (
    EVERY_POSITION,
    LN_2,
    LOWEST,
    _accumulate,
    _padded,
    _score_factors,
    _scores,
    _sink_score,
    _strides,
    tl,
    triton,
)
from .kv_layout import EVERY
from .kv_softmax import Scoring, Skipped, Span, Window


@triton.jit(do_not_specialize=["heads", "tokens", "past", "first", "sink", "recent", "limit"])
def _prefill_kernel(
    q_ptr,  # [batch, heads * G, tokens, D]
    k_ptr,  # [batch, heads, n, D]
    v_ptr,
    sink_k_ptr,  # [batch, heads, sink, D]
    sink_v_ptr,
    padding_ptr,  # [batch]
    logit_ptr,  # [heads * G] of learned sinks, or None
    out_ptr,  # [batch, heads * G, tokens, D]
    lse_ptr,  # [batch, heads * G, tokens]
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
    limit,
    scale,
    cap,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    STREAMING: tl.constexpr,
    SINKS_APART: tl.constexpr,
    LIMITED: tl.constexpr,
    LSE: tl.constexpr,
    CAP: tl.constexpr,
):
    DP: tl.constexpr = _padded(D)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    # the query heads of a KV head are further queries: row m is query m // G of query head m % G
    m = block * M + tl.arange(0, M)
    token, d = m // G, tl.arange(0, DP)
    q_mask = (token < tokens)[:, None] & (d < D)[None, :]
    query_head = (head * G + m % G).to(tl.int64)
    q_rows = query_head * q_head + token.to(tl.int64) * q_token
    q = tl.load(q_ptr + batch * q_batch + q_rows[:, None] + d[None, :], q_mask, 0.0)
    pad = 0
    if PADDED:
        pad = tl.load(padding_ptr + batch).to(tl.int32)
    position = past - pad + token
    first_position = past - pad + block * M // G
    last_position = past - pad + tl.minimum((block * M + M - 1) // G, tokens - 1)
    stop = last_position + 1
    if LIMITED:
        stop = tl.minimum(stop, limit)

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
    begin = tl.maximum(first_position - recent + 1, sink)
    top = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    if logit_ptr is not None:
        top = _sink_score(logit_ptr + query_head)
        total += 1.0
    acc = tl.zeros([M, DP], tl.float32)
    for tile in range(0, sink_tiles + (tl.maximum(stop - begin, 0) + N - 1) // N):
        start, end, window = begin + (tile - sink_tiles) * N, stop, recent
        k_from, v_from, k_step, v_step = k_row, v_row, k_token, v_token
        if STREAMING:
            in_sinks = tile < sink_tiles
            start = tl.where(in_sinks, tile * N, start)
            end = tl.where(in_sinks, tl.minimum(sink, stop), stop)
            window = tl.where(in_sinks, EVERY_POSITION, recent)
            if SINKS_APART:
                k_from = tl.where(in_sinks, sink_k, k_row)
                v_from = tl.where(in_sinks, sink_v, v_row)
                k_step = tl.where(in_sinks, sink_k_token, k_token)
                v_step = tl.where(in_sinks, sink_v_token, v_token)
        key_position = start + n
        kv_mask = (key_position < end)[:, None] & (d < D)[None, :]
        k_from += tl.cast(start, tl.int64) * k_step
        v_from += tl.cast(start, tl.int64) * v_step
        k = tl.load(k_from + n[:, None] * k_step + d[None, :], kv_mask, 0.0)
        v = tl.load(v_from + n[:, None] * v_step + d[None, :], kv_mask, 0.0)
        scores = _scores(q, k, scale, cap, CAP)
        # most tiles of a long input are seen whole by every query of the block
        if (start + N > tl.minimum(first_position + 1, end)) | (start <= last_position - window):
            age = position[:, None] - key_position[None, :]
            scores = tl.where((age >= 0) & (age < window) & (key_position < end)[None, :], scores, float("-inf"))
        top, total, acc = _accumulate(scores, v, top, total, acc)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_rows = query_head * out_head + token.to(tl.int64) * out_token
    tl.store(out_ptr + batch * out_batch + out_rows[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), q_mask)
    if LSE:
        lse = tl.where(total > 0, (top + tl.log2(total)) * LN_2, float("-inf"))
        lse_rows = (batch * heads * G + query_head) * tokens + token
        tl.store(lse_ptr + lse_rows, lse, token < tokens)


def prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    span: Span,
    scoring: Scoring,
    window: Window | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of many queries per row, over heads of one kind; linear in the tokens for streaming heads.

    Floor: 4 * head_dim operations for each visible pair of a query and a key, over the rate of the matrix units.

    Args:
        query: [batch, query_heads, tokens, head_dim], at columns past, past + 1, ...; the query heads of a KV head are
            adjacent. Queries in the padding get zero.
        keys, values: [batch, kv_heads, n, head_dim], at columns first, ..., past + tokens - 1; or by position.
        window: of streaming heads; None: full heads.
        lse: takes the log-sum-exp of the scores, as `prefill_with_lse` returns it.

    Returns:
        [batch, query_heads, tokens, head_dim], the transpose of a contiguous [batch, tokens, query_heads, head_dim].
    """
    batch, query_heads, tokens, head_dim = query.shape
    heads, first = keys.shape[1], span.first
    group = query_heads // heads
    sink, recent, sinks = (window.sink, window.recent, window.sinks) if window else (0, EVERY, None)
    sink_keys, sink_values = sinks or (keys, values)
    assert all(part.stride(3) == 1 for part in (query, keys, values, sink_keys, sink_values))
    assert first is None or first + keys.shape[2] == span.past + tokens
    padding = _padding(span.padding, query)
    assert not first or (sinks is not None and first <= max(span.past - recent + 1, 0))
    out = torch.empty(batch, tokens, query_heads, head_dim, dtype=query.dtype, device=query.device).transpose(1, 2)
    row_bytes = _padded(head_dim) * query.element_size()
    max_rows, tile = (128, 64) if row_bytes <= 256 else (64, 32) if row_bytes <= 512 else (32, 16)
    rows = 16 if tokens * group <= 16 else max_rows
    states = {"q": query, "k": keys, "v": values, "sink_k": sink_keys, "sink_v": sink_values, "out": out}
    arguments: dict[str, torch.Tensor | int] = {f"{name}_ptr": part for name, part in states.items()}
    for name, part in states.items():
        arguments |= _strides(part, f"{name}_batch", f"{name}_head", f"{name}_token")
    with torch.cuda.device_of(query):
        _prefill_kernel[(triton.cdiv(tokens * group, rows), batch * heads)](
            **arguments,
            **_score_factors(scoring),
            padding_ptr=padding,
            logit_ptr=scoring.sinks,
            lse_ptr=lse,
            heads=heads,
            tokens=tokens,
            past=span.past,
            first=first or 0,
            sink=sink,
            recent=recent,
            limit=span.limit or 0,
            G=group,
            D=head_dim,
            M=rows,
            N=tile,
            PADDED=padding is not None,
            BY_COLUMN=first is not None,
            STREAMING=window is not None,
            SINKS_APART=sinks is not None,
            LIMITED=span.limit is not None,
            LSE=lse is not None,
            num_warps=8 if rows == max_rows else 4,
            num_stages=2,
            enable_fp_fusion=True,
        )
    return out


def prefill_with_lse(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """`prefill` of full heads, and the log-sum-exp of the scores, by which results over several blocks are merged.

    Learned sinks are left out: they come once, after all blocks.

    Returns:
        As `prefill`; and float32 [batch, query_heads, tokens], -inf where a query saw nothing.
    """
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    return prefill(query, keys, values, span, scoring._replace(sinks=None), lse=lse), lse


def _padding(skipped: Skipped, query: torch.Tensor) -> torch.Tensor | None:
    """Columns that each row skips, int [batch], or None where none does."""
    if torch.is_tensor(skipped):
        return skipped
    return torch.full((len(query),), skipped, device=query.device) if skipped else None
