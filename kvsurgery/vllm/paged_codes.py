"""Attention over codes in vLLM's pages, by Triton: older tokens from tiles, sinks and newest tokens as they came.

The tiles that a query reads depend on its position only, and change every `TILE` positions. So new tokens are attended
to in blocks that end where this number changes: all queries of a block read the same tiles, and nothing masks them.
Blocks of all requests and KV heads lie in one line of units, tiles first, of which each program takes an equal share.
Needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvsurgery.templates.kv_codes import Tiles, rotation
from kvsurgery.templates.kv_decode import PARTS, PROGRAMS, STAGES, _combine_kernel, _multiprocessors, _share
from kvsurgery.templates.kv_kernels import (
    LOWEST,
    MATRIX_ELEMENTS,
    TILE_BYTES,
    TILE_TOKENS,
    _accumulate,
    _padded,
    _power,
    _registers,
    _score_factors,
    _scores,
    _strides,
    tl,
    triton,
)
from kvsurgery.templates.kv_layout import TILE, Quantization
from kvsurgery.templates.kv_packed import options
from kvsurgery.templates.kv_softmax import Scoring
from kvsurgery.vllm.tiles import Tiling

ROWS = 16  # of the dots of a block of queries
SCRATCH = 1 << 26  # bytes of partial results at a time
FIELDS = tl.constexpr(7)  # of `QueryBlocks.rows`


class QueryBlocks(NamedTuple):
    """New tokens of a step in blocks whose queries read the same tiles.

    The last blocks may have no tokens: how many blocks there are follows from positions, which only the device knows.

    Attributes:
        size: most tokens of a block.
        rows: int32 [..., blocks, 7], the request of a block, its first token in the batch, its number of tokens, the
            position of the first, the number of tiles that they read, the number of tokens between the sinks and the
            first tile that the head has dropped, and the place of the first sink.
        places: [tokens], place of each new token in the blocks: block * size + its place in the block.
    """

    size: int
    rows: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(
        cls, starts: torch.Tensor, lengths: torch.Tensor, new: Sequence[int], size: int, tiling: Tiling
    ) -> QueryBlocks:
        """Divide the new tokens of a batch, for heads that drop none. Nothing here waits for the device.

        Args:
            starts: int32 [requests + 1], index of each request's first new token in the batch, then the end.
            lengths: int32 [requests], tokens of each request, new ones included.
            new: number of new tokens of each request, or at least the room for them.
            size: a power of two, at most `TILE`.
        """
        firsts, ends = starts[:-1], starts[1:]
        counts = ends - firsts
        pasts = lengths - counts
        missing = (pasts - tiling.sink - tiling.residual) % size  # tokens that a request's first block has fewer
        last_blocks = torch.where(counts > 0, -(-(missing + counts) // size), 0).cumsum(0)
        first_blocks = torch.cat((last_blocks[:1] * 0, last_blocks[:-1]))
        number = torch.arange(sum(most_blocks(count, size) for count in new), device=starts.device)
        request = torch.searchsorted(last_blocks, number, right=True).clamp(max=len(counts) - 1)
        end = (number - first_blocks[request] + 1) * size - missing[request]
        begin = (end - size).clamp(min=0)
        count = (torch.minimum(end, counts[request]) - begin).clamp(min=0)
        position = pasts[request] + begin
        tiles = torch.where(count > 0, tiling.read(position), 0)
        none = torch.zeros_like(tiles)
        rows = torch.stack((request, firsts[request] + begin, count, position, tiles, none, none), 1).int()
        token = torch.arange(sum(new), device=starts.device)
        owner = torch.searchsorted(ends, token.int(), right=True).clamp(max=len(counts) - 1)
        block = first_blocks[owner] + (token - firsts[owner] + missing[owner]) // size
        return cls(size, rows, block * size + token - rows[block, 1])


def most_blocks(new: int, size: int) -> int:
    """Most blocks that so many new tokens of a request are divided into."""
    return (new - 2) // size + 2 if new else 0


def block_size(group: int, longest: int) -> int:
    """Most tokens of a block, where a KV head has `group` query heads and no request more than `longest` new tokens."""
    fitting = max(ROWS // group, 1)
    return 1 if longest == 1 else 1 << fitting.bit_length() - 1


class Line(NamedTuple):
    """Units of some blocks for all KV heads: tiles, then unpacked tokens; and the share of each program.

    Attributes:
        rows: int32 [..., blocks, 7], as `QueryBlocks` has them.
        ends: int32 [..., 2 * blocks * heads], units up to the end of each block and head, of tiles and then of tokens.
        starts: int32 [..., programs], which of these has the first unit of each program.
    """

    rows: torch.Tensor
    ends: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, heads: int, tokens: int, programs: int) -> Line:
        """Line up blocks, for units of so many unpacked tokens."""
        _, _, count, position, tiles, dropped, _ = rows.unbind(-1)
        unpacked = torch.where(count > 0, position + count - tiles * TILE - dropped, 0)
        units = torch.cat((tiles, (unpacked + tokens - 1) // tokens), -1)
        ends = units.repeat_interleave(heads, -1).cumsum(-1)
        all_units = ends[..., -1:]
        busy_programs = all_units.clamp(1, programs)  # a line may have no tokens
        program = torch.minimum(torch.arange(programs, device=rows.device), busy_programs - 1)
        starts = torch.searchsorted(ends, program * all_units // busy_programs, right=True)
        return cls(rows, ends.int(), starts.int())


def lines(blocks: QueryBlocks, heads: int, group: int, head_dim: int, dtype: torch.dtype, programs: int) -> list[Line]:
    """The lines of a step's blocks, one after the other, each with at most `SCRATCH` bytes of partial results."""
    at_once = max(1, SCRATCH // (2 * heads * blocks.size * group * head_dim * 4))
    tokens = unit_tokens(head_dim, dtype)
    return [Line.of(rows, heads, tokens, programs) for rows in blocks.rows.split(at_once, -2)]


def unit_tokens(head_dim: int, dtype: torch.dtype) -> int:
    """Unpacked tokens of a unit."""
    return min(max(TILE_BYTES // (_padded(head_dim) * dtype.itemsize), 16), 64)


def programs_of(device: torch.device) -> int:
    """How many programs share the units of a line."""
    return PROGRAMS * _multiprocessors(device)


@triton.jit(
    do_not_specialize=["tile_columns", "newest_columns", "rows", "heads", "sink"],
    do_not_specialize_on_alignment=["block_ptr", "end_ptr", "start_ptr"],  # parts of larger tensors
)
def _attend_kernel(
    q_ptr,  # [heads, tokens, G, D]
    newest_ptr,  # [pages, heads, SIZE, 2 * D], keys and values side by side
    newest_table_ptr,  # [requests, newest_columns]
    k_codes_ptr,  # int16 words [pages, heads, TILE, D * K_BITS / 16]
    k_scales_ptr,  # [pages, heads, 2, ...]
    v_codes_ptr,
    v_scales_ptr,
    tile_table_ptr,  # [requests, tile_columns]
    block_ptr,  # [blocks, FIELDS]
    end_ptr,  # [2 * rows]
    start_ptr,  # [programs]
    partial_ptr,  # [programs + 2 * rows, ROWS, D]
    lse_ptr,  # [programs + 2 * rows, ROWS]
    q_kv_head,
    q_token,
    newest_page,
    newest_head,
    newest_slot,
    newest_columns,
    code_page,
    code_head,
    scale_page,
    scale_head,
    tile_columns,
    rows,  # pairs of a block and a KV head
    heads,
    sink,
    scale,
    cap,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SIZE: tl.constexpr,
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
    """Partial attention of a program's share of units, of each block and head in it: row m is query m % G of token
    m // G."""
    pid = tl.program_id(0)
    all_units = tl.load(end_ptr + 2 * rows - 1)
    programs = tl.minimum(tl.num_programs(0), all_units)
    if pid >= programs:
        return
    share = _share(pid, all_units, programs)
    stop = _share(pid + 1, all_units, programs)
    m = tl.arange(0, M)

    packed_stop = tl.minimum(stop, tl.load(end_ptr + rows - 1))
    row = tl.load(start_ptr + pid)
    begin = tl.load(end_ptr + row - 1, row > 0, 0)
    unit = share
    while unit < packed_stop:
        head = (row % heads).to(tl.int64)
        fields = block_ptr + row // heads * FIELDS
        request = tl.load(fields).to(tl.int64)
        end = begin + tl.load(fields + 4)
        # a tile lies in the block of its last token
        first_block = (sink + tl.load(fields + 5) + TILE_TOKENS - 1) // TILE_TOKENS
        for query in tl.static_range(0, ROWS, PACKED_M):
            OVER_TILES(
                q_ptr=q_ptr + head * q_kv_head + tl.load(fields + 1).to(tl.int64) * q_token + query * D,
                k_codes=k_codes_ptr + head * code_head,
                k_scales=k_scales_ptr + head * scale_head,
                v_codes=v_codes_ptr + head * code_head,
                v_scales=v_scales_ptr + head * scale_head,
                partial_ptr=partial_ptr,
                lse_ptr=lse_ptr,
                part_number=(pid + row).to(tl.int64) * ROWS + query,
                q_head=D,
                begin=(unit - begin) * (TILE_TOKENS // PACKED_N),
                end=(tl.minimum(end, packed_stop) - begin) * (TILE_TOKENS // PACKED_N),
                scale=scale,
                cap=cap,
                packed=0,
                newest=0,
                recent=0,
                count=0,
                page_ptr=tile_table_ptr + request * tile_columns + first_block,
                code_page=code_page,
                scale_page=scale_page,
                G=min(PACKED_M, ROWS - query),
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
                RING=False,
            )
        unit = tl.minimum(end, packed_stop)
        begin = end
        row += 1

    DP: tl.constexpr = _padded(D)
    d = tl.arange(0, DP)
    n = tl.arange(0, N)
    in_head = (d < D)[None, :]
    segment = tl.maximum(tl.load(start_ptr + pid), rows)
    begin = tl.load(end_ptr + segment - 1)
    unit = tl.maximum(share, packed_stop)
    while unit < stop:
        head = (segment % heads).to(tl.int64)
        fields = block_ptr + (segment - rows) // heads * FIELDS
        request = tl.load(fields).to(tl.int64)
        position = tl.load(fields + 3)
        packed = tl.load(fields + 4) * TILE_TOKENS + tl.load(fields + 5)
        first_sink = tl.load(fields + 6)
        unpacked = position + tl.load(fields + 2) - packed
        end = begin + (unpacked + N - 1) // N
        q_block = q_ptr + head * q_kv_head + tl.load(fields + 1).to(tl.int64) * q_token
        q = tl.load(q_block + m[:, None] * D + d[None, :], (m < ROWS)[:, None] & in_head, 0.0)
        newest = newest_ptr + head * newest_head
        pages = newest_table_ptr + request * newest_columns
        top = tl.full([M], LOWEST, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        for start in range((unit - begin) * N, (tl.minimum(end, stop) - begin) * N, N):
            token = start + n
            stored = token < unpacked
            token += tl.where(token < sink, first_sink, packed)
            page = tl.load(pages + token // SIZE, stored, 0).to(tl.int64)
            states = (page * newest_page + token % SIZE * newest_slot)[:, None] + d[None, :]
            k = tl.load(newest + states, stored[:, None] & in_head, 0.0)
            v = tl.load(newest + D + states, stored[:, None] & in_head, 0.0)
            visible = stored[None, :] & (token[None, :] <= (position + m // G)[:, None])
            scores = tl.where(visible, _scores(q, k, scale, cap, CAP), float("-inf"))
            top, total, acc = _accumulate(scores, v, top, total, acc)
        part = (pid + segment).to(tl.int64) * ROWS + m
        safe_total = tl.where(total > 0, total, 1.0)
        tl.store(lse_ptr + part, tl.where(total > 0, top + tl.log2(safe_total), LOWEST), m < ROWS)
        tl.store(partial_ptr + part[:, None] * D + d[None, :], acc / safe_total[:, None], (m < ROWS)[:, None] & in_head)
        unit = tl.minimum(end, stop)
        begin = end
        segment += 1


class Pages(NamedTuple):
    """The caches of a layer's heads.

    Attributes:
        tiles: views of the pages of tiles, [pages, heads, ...] each.
        tile_table: int32 [requests, blocks of `TILE` tokens], the page of each block.
        newest: [pages, heads, size, 2 * head_dim], keys and values of the sinks and newest tokens.
        newest_table: int32 [requests, blocks of `size` tokens].
    """

    tiles: Tiles
    tile_table: torch.Tensor
    newest: torch.Tensor
    newest_table: torch.Tensor


def attend(
    query: torch.Tensor,
    pages: Pages,
    blocks: QueryBlocks,
    in_lines: Sequence[Line],
    scoring: Scoring,
    quantization: Quantization,
    output: torch.Tensor,
) -> None:
    """Write the attention of new tokens, which are stored already, and whose tiles are packed.

    Floor: `quantization.tile_bytes(head_dim)` for each tile and 2 * head_dim * itemsize bytes for each unpacked token
    that a request's queries read, summed over requests and KV heads, over the read bandwidth; or, for many new tokens,
    4 * head_dim operations for each visible pair of a query and a key, over the rate of the matrix units. Every block
    of queries unpacks what it reads.

    Args:
        query: [tokens, query_heads, head_dim], rotated as the keys are stored.
        in_lines: `lines` of the blocks.
        output: [tokens, query_heads, head_dim], contiguous; rotated back where values are stored rotated.
    """
    tokens, query_heads, head_dim = query.shape
    heads, size = pages.newest.shape[1:3]
    group, device = query_heads // heads, query.device
    query_rows = _power(blocks.size * group)
    by_head = query.unflatten(1, (heads, group)).transpose(0, 1)  # [heads, tokens, group, head_dim]
    result, sinks = output, scoring.sinks
    if blocks.size > 1:  # the queries of a block follow one another; the last one may end beyond the tokens
        padded = query.new_zeros(heads, tokens + blocks.size - 1, group, head_dim)
        padded[:, :tokens] = by_head
        by_head = padded
        result = query.new_empty(len(blocks.rows) * blocks.size, query_heads, head_dim)
        if sinks is not None:
            sinks = sinks.view(heads, 1, group).expand(-1, blocks.size, -1).flatten()
    tiles = pages.tiles
    codes = {"k_codes_ptr": tiles.key_codes.view(torch.int16), "v_codes_ptr": tiles.value_codes.view(torch.int16)}
    width = _padded(head_dim)
    rotates = quantization.rotate != "none"
    matrix = rotation(head_dim, torch.float32, device) if rotates else None
    first = 0
    for line in in_lines:
        rows = len(line.rows) * heads
        programs = len(line.starts)
        parts = {
            "partial_ptr": query.new_empty(programs + 2 * rows, blocks.size * group, head_dim, dtype=torch.float32),
            "lse_ptr": query.new_empty(programs + 2 * rows, blocks.size * group, dtype=torch.float32),
            "end_ptr": line.ends,
            "rows": rows,
            "heads": heads,
            "D": head_dim,
        }
        with torch.cuda.device_of(query):
            _attend_kernel[(programs,)](
                **parts,
                **codes,
                **options(head_dim, query_rows, quantization),
                **_score_factors(scoring),
                q_ptr=by_head,
                newest_ptr=pages.newest,
                newest_table_ptr=pages.newest_table,
                k_scales_ptr=tiles.key_scales,
                v_scales_ptr=tiles.value_scales,
                tile_table_ptr=pages.tile_table,
                block_ptr=line.rows,
                start_ptr=line.starts,
                **_strides(by_head, "q_kv_head", "q_token"),
                **_strides(pages.newest, "newest_page", "newest_head", "newest_slot"),
                **_strides(pages.newest_table, "newest_columns"),
                **_strides(codes["k_codes_ptr"], "code_page", "code_head"),
                **_strides(tiles.key_scales, "scale_page", "scale_head"),
                **_strides(pages.tile_table, "tile_columns"),
                sink=quantization.sink,
                G=group,
                ROWS=blocks.size * group,
                M=max(ROWS, query_rows),
                N=unit_tokens(head_dim, query.dtype),
                SIZE=size,
                ASM=torch.version.hip is None and query.element_size() == 2 and not triton.knobs.runtime.interpret,
                num_warps=4,
                num_stages=STAGES if query.element_size() == 2 else 1,
                enable_fp_fusion=True,
                **_registers(),
            )
            _combine_kernel[(rows, blocks.size * group)](
                **parts,
                logit_ptr=sinks,
                matrix_ptr=matrix,
                out_ptr=result[first * blocks.size :],
                programs=programs,
                rotated=heads * rotates,
                G=blocks.size * group,
                PARTS=PARTS // max(width // 128, 1),
                MATRIX_N=min(MATRIX_ELEMENTS // width, width),
                SEGMENTS=2,
                num_warps=4,
                enable_fp_fusion=False,
            )
        first += len(line.rows)
    if blocks.size > 1:
        in_blocks = result.view(-1, heads, blocks.size, group, head_dim)
        output.view(tokens, heads, group, head_dim).copy_(
            in_blocks[blocks.places // blocks.size, :, blocks.places % blocks.size]
        )
