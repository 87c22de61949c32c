"""Attention of a budgeted head over vLLM's pages, by Triton: from a prompt to all before, later to what is kept of it.

What a head has kept of a prompt lies right before the prompt's last tokens, and later tokens follow. So a query sees a
range of slots, whose first one depends on the head. The kernel finds it, and all heads of a cache group share the rest.
Needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvsurgery.templates.kv_decode import PARTS, STAGES, _combine_kernel
from kvsurgery.templates.kv_kernels import (
    LOWEST,
    MATRIX_ELEMENTS,
    _accumulate,
    _padded,
    _power,
    _registers,
    _score_factors,
    _scores,
    _sink_score,
    _strides,
    tl,
    triton,
)
from kvsurgery.templates.kv_softmax import Scoring
from kvsurgery.vllm.paged_codes import ROWS, unit_tokens

QUERY_BYTES = 1 << 14  # of a block of queries, where requests have several new tokens
MOST_ROWS = 64  # of the same
MOST_PARTS = 64  # programs that share the keys of a query
FIELDS = tl.constexpr(5)  # of `Blocks.rows`


class Blocks(NamedTuple):
    """New tokens of a step, in blocks of one request each.

    Attributes:
        size: most tokens of a block.
        rows: int32 [blocks, 5], the request of a block, its first token in the batch, its number of tokens, the
            position of the first, and the length of its prompt, 0 while it is read.
        parts: programs that share the keys of a block.
        ends: int32 [blocks], such programs up to the end of each block.
    """

    size: int
    rows: torch.Tensor
    parts: int
    ends: torch.Tensor

    @classmethod
    def of(
        cls,
        firsts: torch.Tensor,
        counts: torch.Tensor,
        pasts: torch.Tensor,
        prompts: torch.Tensor,
        new: Sequence[int],
        size: int,
        programs: int,
    ) -> Blocks:
        """Divide new tokens of requests. Nothing here waits for the device.

        Args:
            firsts, counts: int [requests], the first new token of each request in the batch, and how many it has.
            pasts, prompts: int [requests], tokens before the first new one, and of the prompt.
            new: the counts, on the host.
            size: 1 where no request has several new tokens.
            programs: how many keep the device busy; 1 where other tokens of the batch are left out.
        """
        ends = ((counts + size - 1) // size).cumsum(0)
        number = torch.arange(sum(-(-count // size) for count in new), device=firsts.device)
        request = torch.searchsorted(ends, number, right=True)
        begin = (number - (ends - (counts + size - 1) // size)[request]) * size
        count = (counts[request] - begin).clamp(max=size)
        prompt = torch.where(pasts < prompts, 0, prompts)[request]
        rows = torch.stack((request, firsts[request] + begin, count, pasts[request] + begin, prompt), 1)
        parts = min(max(programs // max(len(number), 1), 1), MOST_PARTS) if size == 1 else 1
        return cls(size, rows.int(), parts, ((number + 1) * parts).int())


def block_size(group: int, longest: int, head_dim: int, dtype: torch.dtype) -> int:
    """Most tokens of a block, where a KV head has `group` query heads and no request more than `longest` new tokens."""
    if longest == 1:
        return 1
    rows = min(max(QUERY_BYTES // (_padded(head_dim) * dtype.itemsize), ROWS), MOST_ROWS)
    return max(rows // _power(group), 1)


@triton.jit(do_not_specialize=["columns", "kept"])
def _attend_pages_kernel(
    q_ptr,  # [tokens, G, D]
    cache_ptr,  # [pages, SIZE, 2 * D], keys and values side by side
    table_ptr,  # [requests, columns]
    block_ptr,  # [blocks, FIELDS]
    logit_ptr,  # [G] of learned sinks, or None: there are none, or they come when parts are combined
    out_ptr,  # [tokens, G, D]; or [programs + tokens, G, D] in fp32, of all programs in turn and a gap after a token's
    lse_ptr,  # [programs + tokens, G], or None
    q_token,
    kv_page,
    kv_slot,
    columns,
    kept,
    scale,
    cap,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attention of a block's queries to one of as many parts of its keys as there are programs: row m is query m % G of
    token m // G."""
    fields = block_ptr + tl.program_id(0) * FIELDS
    request = tl.load(fields).to(tl.int64)
    token = tl.load(fields + 1).to(tl.int64)
    count = tl.load(fields + 2)
    position = tl.load(fields + 3)
    begin = tl.maximum(tl.load(fields + 4) - kept, 0)
    stop = position + count
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    share = ((stop - begin + N - 1) // N + parts - 1) // parts * N
    begin += part * share
    end = tl.minimum(begin + share, stop)

    DP: tl.constexpr = _padded(D)
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    d = tl.arange(0, DP)
    in_head = (d < D)[None, :]
    in_block = m < count * G
    rows = token * G + m
    q_rows = q_ptr + (token + m // G) * q_token + m % G * D
    q = tl.load(q_rows[:, None] + d[None, :], in_block[:, None] & in_head, 0.0)
    pages = table_ptr + request * columns
    top = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    if logit_ptr is not None:
        top = _sink_score(logit_ptr + m % G)
        total += 1.0
    acc = tl.zeros([M, DP], tl.float32)
    for start in range(begin, end, N):
        key = start + n
        stored = key < end
        page = tl.load(pages + key // SIZE, stored, 0).to(tl.int64)
        states = cache_ptr + (page * kv_page + key % SIZE * kv_slot)[:, None] + d[None, :]
        k = tl.load(states, stored[:, None] & in_head, 0.0)
        v = tl.load(states + D, stored[:, None] & in_head, 0.0)
        visible = stored[None, :] & (key[None, :] <= (position + m // G)[:, None])
        scores = tl.where(visible, _scores(q, k, scale, cap, CAP), float("-inf"))
        top, total, acc = _accumulate(scores, v, top, total, acc)
    safe_total = tl.where(total > 0, total, 1.0)
    if lse_ptr is not None:
        rows = (token * (parts + 1) + part) * G + m
        tl.store(lse_ptr + rows, tl.where(total > 0, top + tl.log2(safe_total), LOWEST), in_block)
    out = (acc / safe_total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * D + d[None, :], out, in_block[:, None] & in_head)


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    blocks: Blocks,
    kept: int,
    scoring: Scoring,
    output: torch.Tensor,
) -> None:
    """Write the attention of new tokens, which are stored already.

    Floor: 2 * head_dim * itemsize bytes for each slot that a request's queries see, over the read bandwidth; or, for
    many new tokens, 4 * head_dim operations for each visible pair of a query and a key, over the rate of the matrix
    units.

    Args:
        query: [tokens, query_heads, head_dim], whose last two dimensions are contiguous.
        cache: [pages, 1, size, 2 * head_dim], keys and values side by side.
        table: int32 [requests, blocks of `size` tokens].
        kept: tokens of a prompt that the head has kept, if the prompt has as many.
        output: [tokens, query_heads, head_dim], contiguous; tokens that are in no block stay as they are.
    """
    group, head_dim = query.shape[1:]
    rows = len(blocks.rows)
    programs = rows * blocks.parts
    combined = blocks.parts > 1
    target, lse = output, None
    if combined:
        target = query.new_empty(programs + rows, group, head_dim, dtype=torch.float32)
        lse = query.new_empty(programs + rows, group, dtype=torch.float32)
    with torch.cuda.device_of(query):
        _attend_pages_kernel[(rows, blocks.parts)](
            **_score_factors(scoring),
            q_ptr=query,
            cache_ptr=cache,
            table_ptr=table,
            block_ptr=blocks.rows,
            logit_ptr=None if combined else scoring.sinks,
            out_ptr=target,
            lse_ptr=lse,
            **_strides(query, "q_token"),
            **_strides(cache[:, 0], "kv_page", "kv_slot"),
            **_strides(table, "columns"),
            kept=kept,
            G=group,
            D=head_dim,
            M=max(ROWS, _power(blocks.size * group)),
            N=unit_tokens(head_dim, query.dtype),
            SIZE=cache.shape[2],
            num_warps=4,
            num_stages=STAGES if query.element_size() == 2 else 1,
            enable_fp_fusion=True,
            **_registers(),
        )
        if combined:
            width = _padded(head_dim)
            _combine_kernel[(rows, group)](
                partial_ptr=target,
                lse_ptr=lse,
                end_ptr=blocks.ends,
                logit_ptr=scoring.sinks,
                matrix_ptr=None,
                out_ptr=output,
                rows=rows,
                heads=1,
                programs=programs,
                rotated=0,
                G=group,
                D=head_dim,
                PARTS=PARTS // max(width // 128, 1),
                MATRIX_N=min(MATRIX_ELEMENTS // width, width),
                SEGMENTS=1,
                num_warps=4,
                enable_fp_fusion=False,
            )
