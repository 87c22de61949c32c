"""Comparison of the attention over vLLM's pages with a dense softmax over what tiles stand for, on any device."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from kvsurgery.templates.kv_codes import Rounding, Tiles, dequantize, quantize, rotated
from kvsurgery.templates.kv_layout import TILE, Quantization
from kvsurgery.templates.kv_softmax import Scoring
from kvsurgery.vllm import paged_budgets
from kvsurgery.vllm.paged_codes import Pages, QueryBlocks, attend, block_size, lines
from kvsurgery.vllm.paged_pack import DueTiles, most_due, pack
from kvsurgery.vllm.pages import from_page, to_page
from kvsurgery.vllm.tiles import Tiling
from tests.helpers.kernel_cases import check
from tests.helpers.kernel_reference import softmax

HEADS, PAGE = 2, 16
LAYERS = 3  # of a block of pages, of which the middle one is used


class Paged(NamedTuple):
    """A step of requests with so many tokens before it and so many new ones, without those that a head has dropped."""

    quantization: Quantization
    group: int
    head_dim: int
    requests: list[tuple[int, int]]
    programs: int
    softcap: float | None = None
    learned: bool = False  # sinks that are logits
    dropped: tuple[int, ...] = ()  # tokens of each request; none

    def __str__(self) -> str:
        how = self.quantization
        parts = f"{how.scheme}{how.bits}", how.group_size, f"s{how.sink}r{how.residual}"
        steps = ".".join(f"{past}+{new}" for past, new in self.requests)
        options = [name for name, given in (("capped", self.softcap), ("sunk", self.learned)) if given]
        options += [f"dropped{'.'.join(map(str, self.dropped))}"] if self.dropped else []
        return "-".join(map(str, (*parts, f"g{self.group}d{self.head_dim}", steps, f"p{self.programs}", *options)))


PAGED = [
    Paged(Quantization(4), 4, 64, [(700, 1), (3, 1), (0, 1), (387, 1)], 5),
    Paged(Quantization(8, residual=0), 1, 80, [(511, 1), (128, 1)], 24),
    Paged(Quantization(2, residual=64, sink=0), 4, 128, [(300, 1), (600, 1)], 3, learned=True),
    Paged(Quantization(3, "per-token", sink=150), 7, 32, [(900, 1)], 7, softcap=20.0),
    Paged(Quantization("k3v2", residual=0), 2, 64, [(420, 1), (20, 1)], 6),
    Paged(Quantization("k8v4", "per-token", 16, residual=40), 1, 96, [(470, 1)], 1),
    Paged(Quantization(4, group_size=32), 8, 64, [(650, 1)], 9),
    Paged(Quantization(4, residual=64), 4, 64, [(0, 2), (255, 1), (185, 20)], 5),
    Paged(Quantization(2, "per-token", residual=0, sink=0), 16, 32, [(126, 5), (0, 5)], 5, learned=True),
    Paged(Quantization("k4v3", group_size=16, residual=30), 7, 48, [(286, 7)], 11, softcap=30.0),
    Paged(Quantization(4), 24, 32, [(263, 2)], 3),
    Paged(Quantization(4, residual=0), 4, 64, [(300, 1), (128, 1), (3, 1), (140, 1)], 7, dropped=(77, 128, 0, 1000)),
    Paged(Quantization(3, residual=9, sink=40), 2, 32, [(179, 7), (400, 1)], 5, learned=True, dropped=(90, 5)),
]


def check_paged(case: Paged, dtype: torch.dtype, device: str) -> None:
    """`attend` is as near to exact attention as torch in the same precision.

    Slots and pages that no query of a request reads hold NaN, and codes with all bits set.
    """
    torch.manual_seed(0)
    how, head_dim, tiling = case.quantization, case.head_dim, Tiling.of(case.quantization)
    totals = [past + new for past, new in case.requests]
    dropped = case.dropped or (0,) * len(totals)
    longest = max(total + gap for total, gap in zip(totals, dropped, strict=True))
    page_bytes = how.tile_bytes(head_dim, dtype.itemsize)
    # the slots of a gap may begin and end amid a page
    blocks, tile_blocks = (sum(-(-total // size) + 1 for total in totals) + 3 for size in (PAGE, TILE))
    newest = torch.full((blocks, LAYERS, HEADS, PAGE, 2 * head_dim), torch.nan, dtype=dtype)[:, 1]
    tiled = torch.full((tile_blocks, LAYERS, HEADS, page_bytes), 255, dtype=torch.uint8)[:, 1]
    free, free_tiles = iter(torch.randperm(blocks).tolist()), iter(torch.randperm(tile_blocks).tolist())
    unused = next(free), next(free_tiles)
    newest_table = torch.full((len(totals), longest // PAGE + 2), unused[0], dtype=torch.int32)
    tile_table = torch.full((len(totals), longest // TILE + 2), unused[1], dtype=torch.int32)
    raw, packed = [], []
    for row, (past, new) in enumerate(case.requests):
        states = torch.randn(2, HEADS, past + new, head_dim).to(dtype)
        end = how.sink + TILE * how.tiles(past + 1 - how.sink)  # of tiles that all new tokens read
        for token in range(past + new):
            if token < how.sink or token >= end:
                column, slot = divmod(token + dropped[row] * (token >= how.sink), PAGE)
                if newest_table[row, column] == unused[0]:
                    newest_table[row, column] = next(free)
                newest[newest_table[row, column], :, slot] = torch.cat([*states[:, :, token]], -1)
        tiles = max(past + new - how.sink, 0) // TILE
        made = quantize(*states[:, :, how.sink : how.sink + tiles * TILE].unflatten(2, (tiles, TILE)), how)
        for tile, page in enumerate(to_page(made.map(lambda part: part.transpose(0, 1)))):
            column = (dropped[row] + how.sink + (tile + 1) * TILE - 1) // TILE
            tile_table[row, column] = next(free_tiles)
            tiled[tile_table[row, column]] = page
        raw.append(states)
        packed.append(made)
    new = [count for _, count in case.requests]
    query = torch.randn(sum(new), HEADS * case.group, head_dim).to(dtype)
    sinks = torch.randn(HEADS * case.group).mul(3).to(dtype) if case.learned else None
    scoring = Scoring(head_dim**-0.5, case.softcap, sinks=sinks)

    def moved(states: torch.Tensor) -> torch.Tensor:
        return states.to(device)

    starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32, device=device)
    lengths = torch.tensor(totals, dtype=torch.int32, device=device)
    divided = QueryBlocks.of(starts, lengths, new, block_size(case.group, max(new)), tiling)
    gaps = torch.tensor(dropped, dtype=torch.int32, device=device)[divided.rows[:, 0].long()]
    divided.rows[:, 3] += gaps
    divided.rows[:, 5] = gaps
    in_lines = lines(divided, HEADS, case.group, head_dim, dtype, case.programs)
    tiles = from_page(moved(tiled), head_dim, dtype, how)
    pages = Pages(tiles, moved(tile_table), moved(newest), moved(newest_table))
    output = torch.full_like(query, torch.nan, device=device)
    moved_scoring = scoring._replace(sinks=None if sinks is None else moved(sinks))
    attend(moved(query), pages, divided, in_lines, moved_scoring, how, output)

    def reference(query: torch.Tensor, *raw: torch.Tensor) -> torch.Tensor:
        result = []
        position = [past + index for past, count in case.requests for index in range(count)]
        owner = [row for row, count in enumerate(new) for _ in range(count)]
        unpacked = [dequantized(made, how, query.dtype) for made in packed]
        for token, (place, row) in enumerate(zip(position, owner, strict=True)):
            end = max(how.sink + TILE * how.tiles(place + 1 - how.sink), how.sink)
            parts = raw[row][:, :, : how.sink], unpacked[row][:, :, : end - how.sink], raw[row][:, :, end : place + 1]
            keys, values = torch.cat(parts, 2)[:, :, : place + 1].repeat_interleave(case.group, 1)
            allowed = torch.ones(keys.shape[1], dtype=torch.bool)
            result.append(softmax(query[token][:, None], keys, values, allowed, scoring)[:, 0])
        return rotated(torch.stack(result), (how.rotate != "none") * query.shape[1], back=True)

    def turned(error: torch.Tensor) -> torch.Tensor:
        return rotated(error, (how.rotate != "none") * error.shape[1])

    check(output.cpu(), reference, [query, *raw], of_error=turned)


PACK = [
    (Quantization(4), 64),
    (Quantization(2, "per-token", 16, clip=True), 32),
    (Quantization("k3v2", sink=0), 80),
    (Quantization("k8v3", group_size=32, residual=3, clip=True), 48),
]


def check_pack(how: Quantization, head_dim: int, dtype: torch.dtype, device: str, round_keys: Rounding) -> None:
    """The tiles that a step completes are packed as `quantize` makes them, to the bit, and nothing else is written.

    Requests complete none, one and two tiles; there is room for one more.
    """
    torch.manual_seed(0)
    tiling, sink = Tiling.of(how), how.sink
    past, new = [sink, sink + 2 * TILE - 1, sink + 5], [TILE - 1, 1, 2 * TILE]
    table = torch.randperm(90).view(3, 30)
    newest = torch.randn(90, LAYERS, HEADS, PAGE, 2 * head_dim).to(dtype)[:, 1]
    tiled = torch.full((7, LAYERS, HEADS, how.tile_bytes(head_dim, dtype.itemsize)), 77, dtype=torch.uint8)[:, 1]
    expected = tiled.clone()
    for page, (row, tile) in enumerate([(1, 1), (2, 0), (2, 1)]):
        tokens = sink + tile * TILE + torch.arange(TILE)
        states = newest[table[row, tokens // PAGE], :, tokens % PAGE].transpose(0, 1)[None]
        expected[page + 2] = to_page(quantize(*states.split(head_dim, -1), how, round_keys))[0]
    starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
    lengths = torch.tensor(past, dtype=torch.int32) + starts.diff()
    assert most_due(new) == 4
    before, after = (tiling.packed(tokens.to(device)) for tokens in (lengths - starts.diff(), lengths))
    due = DueTiles.of(before, after, most_due(new))
    assert due.requests[due.valid].tolist() == [1, 2, 2]
    assert due.tiles[due.valid].tolist() == [1, 0, 1]
    tokens = due.tokens(tiling)
    pages = table.to(device)[due.requests[:, None], tokens // PAGE]
    found, cache = tiled.to(device), newest.to(device)
    tile_pages = torch.where(due.valid, torch.arange(4, device=device) + 2, -1)
    tiles = from_page(found, head_dim, dtype, how)
    pack(cache, pages, tokens % PAGE, tile_pages, tiles, how, round_keys)
    assert found.cpu().equal(expected)


class Kept(NamedTuple):
    """A step of requests with so many tokens in the prompt, before the step and new, of a head that keeps some."""

    kept: int
    group: int
    head_dim: int
    requests: list[tuple[int, int, int]]
    programs: int
    softcap: float | None = None
    learned: bool = False  # sinks that are logits

    def __str__(self) -> str:
        steps = ".".join("+".join(map(str, request)) for request in self.requests)
        options = [name for name, given in (("capped", self.softcap), ("sunk", self.learned)) if given]
        return "-".join((f"k{self.kept}g{self.group}d{self.head_dim}", steps, f"p{self.programs}", *options))


KEPT = [
    Kept(50, 4, 64, [(300, 320, 1), (70, 70, 1), (20, 33, 1), (64, 200, 1)], 13),
    Kept(37, 1, 80, [(150, 171, 1)], 24, learned=True),
    Kept(64, 7, 32, [(64, 64, 1), (65, 65, 1)], 1, softcap=20.0, learned=True),
    Kept(30, 4, 32, [(90, 100, 1), (120, 40, 60), (77, 0, 77), (50, 60, 37)], 30, learned=True),
    Kept(33, 24, 128, [(70, 66, 3), (40, 40, 5)], 9, softcap=30.0),
]


def check_kept(case: Kept, dtype: torch.dtype, device: str) -> None:
    """Attention to what a head has kept, or to all of a prompt, is as near to exact attention as torch is.

    Slots that no query of a request sees hold NaN.
    """
    torch.manual_seed(0)
    prompts, pasts, new = zip(*case.requests, strict=True)
    totals = [past + count for past, count in zip(pasts, new, strict=True)]
    firsts = [0 if past < prompt else max(prompt - case.kept, 0) for prompt, past in zip(prompts, pasts, strict=True)]
    blocks = sum(-(-total // PAGE) for total in totals) + 3
    cache = torch.full((blocks, LAYERS, 1, PAGE, 2 * case.head_dim), torch.nan, dtype=dtype)[:, 1]
    free = iter(torch.randperm(blocks).tolist())
    table = torch.full((len(totals), max(totals) // PAGE + 2), next(free), dtype=torch.int32)
    raw = []
    for row, (first, total) in enumerate(zip(firsts, totals, strict=True)):
        states = torch.randn(2, total, case.head_dim).to(dtype)
        for column in range(first // PAGE, -(-total // PAGE)):
            table[row, column] = next(free)
        position = torch.arange(first, total)
        cache[table[row, position // PAGE].long(), 0, position % PAGE] = torch.cat([*states[:, first:]], -1)
        raw.append(states)
    query = torch.randn(sum(new), case.group, case.head_dim).to(dtype)
    sinks = torch.randn(case.group).mul(3).to(dtype) if case.learned else None
    scoring = Scoring(case.head_dim**-0.5, case.softcap, sinks=sinks)
    size = paged_budgets.block_size(case.group, max(new), case.head_dim, dtype)
    starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32, device=device)
    of_requests = (torch.tensor(part, dtype=torch.int32, device=device) for part in (pasts, prompts))
    divided = paged_budgets.Blocks.of(starts[:-1], starts.diff(), *of_requests, new, size, case.programs)
    assert (divided.parts > 1) == (max(new) == 1 and case.programs > len(new))
    output = torch.full_like(query, torch.nan, device=device)
    moved_scoring = scoring._replace(sinks=None if sinks is None else sinks.to(device))
    states = query.to(device), cache.to(device), table.to(device)
    paged_budgets.attend(*states, divided, case.kept, moved_scoring, output)

    def reference(query: torch.Tensor, *raw: torch.Tensor) -> torch.Tensor:
        result = []
        for (past, count), first, states in zip(zip(pasts, new, strict=True), firsts, raw, strict=True):
            for place in range(past, past + count):
                keys, values = states[:, None, first : place + 1].expand(-1, case.group, -1, -1)
                allowed = torch.ones(keys.shape[1], dtype=torch.bool)
                asked = query[len(result)][:, None]
                result.append(softmax(asked, keys, values, allowed, scoring)[:, 0])
        return torch.stack(result)

    check(output.cpu(), reference, [query, *raw])


def dequantized(tiles: Tiles, how: Quantization, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values [2, heads, tokens, head_dim] that tiles [heads, tiles, ...] stand for."""
    key_codes, key_scales, value_codes, value_scales = tiles
    parts = Tiles(key_codes, key_scales.to(dtype), value_codes, value_scales.to(dtype))
    return torch.stack([states.flatten(1, 2) for states in dequantize(parts, how.widths)])
