"""Tiles that a step completes, packed into vLLM's pages by Triton. Needs no vLLM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvsurgery.templates.kv_codes import Rounding, Tiles, nearest, quantize
from kvsurgery.templates.kv_kernels import TILE_TOKENS, _strides, tl, triton
from kvsurgery.templates.kv_layout import TILE, Quantization
from kvsurgery.templates.kv_pack import _pack, options
from kvsurgery.vllm.tiles import Tiling


class DueTiles(NamedTuple):
    """Tiles of a step whose last tokens are new; fewer than there is room for, as only the device knows positions.

    Attributes:
        requests: int64 [..., due], the request of each tile.
        tiles: int64 [..., due], its index there.
        valid: bool [..., due], whether there is such a tile; those that there are come first.
    """

    requests: torch.Tensor
    tiles: torch.Tensor
    valid: torch.Tensor

    @classmethod
    def of(cls, before: torch.Tensor, after: torch.Tensor, most: int) -> DueTiles:
        """Find at most `most` tiles. Nothing here waits for the device.

        Args:
            before, after: int [..., requests], tiles of each request that are packed before a step and after it.
        """
        counts = after - before
        ends = counts.cumsum(-1)
        number = torch.arange(most, device=ends.device).expand(*ends.shape[:-1], most).contiguous()
        requests = torch.searchsorted(ends, number, right=True).clamp(max=ends.shape[-1] - 1)
        valid = number < ends[..., -1:]
        tiles = number + (before + counts - ends).gather(-1, requests)
        return cls(requests, torch.where(valid, tiles, 0), valid)

    def tokens(self, tiling: Tiling) -> torch.Tensor:
        """Positions of their tokens: [..., due, TILE]."""
        return tiling.sink + self.tiles[..., None] * TILE + torch.arange(TILE, device=self.tiles.device)


def most_due(new: Sequence[int]) -> int:
    """Most tiles that requests complete with so many new tokens, wherever these lie."""
    return sum(-(-count // TILE) for count in new)


@triton.jit(do_not_specialize_on_alignment=["page_ptr"])  # part of a larger tensor
def _pack_due_kernel(
    newest_ptr,  # [pages, heads, size, 2 * D], keys and values side by side
    row_ptr,  # [due, TILE], where a head's tokens lie, in units of `step` elements from its first one
    page_ptr,  # [due], -1: there is none
    k_codes_ptr,  # bytes [pages, heads, TILE, D * K_BITS / 8]
    k_scales_ptr,  # [pages, heads, 2, ...]
    v_codes_ptr,
    v_scales_ptr,
    step,
    newest_head,
    code_page,
    code_head,
    scale_page,
    scale_head,
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
    due = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    page = tl.load(page_ptr + due)
    if page >= 0:
        codes = page * code_page + head * code_head
        scales = page * scale_page + head * scale_head
        for values in tl.static_range(2):
            _pack(
                state_ptr=newest_ptr + head * newest_head + values * D,
                code_ptr=(v_codes_ptr if values else k_codes_ptr) + codes,
                scale_ptr=(v_scales_ptr if values else k_scales_ptr) + scales,
                first=row_ptr + due * TILE_TOKENS,
                ring=1,
                step=step,
                D=D,
                BITS=V_BITS if values else K_BITS,
                ROWS=TILE_TOKENS if values else K_ROWS,
                COLUMNS=V_COLUMNS if values else K_COLUMNS,
                N=V_N if values else K_N,
                RANGES=RANGES,
                LISTED=True,
            )


def pack(
    newest: torch.Tensor,
    token_pages: torch.Tensor,
    token_slots: torch.Tensor,
    pages: torch.Tensor,
    tiles: Tiles,
    quantization: Quantization,
    round_keys: Rounding = nearest,
) -> None:
    """Pack tiles as `kv_codes.quantize` makes them.

    Floor: 4 * `TILE` * head_dim * itemsize bytes to read and `quantization.tile_bytes(head_dim)` to write for each tile
    and head, every `TILE` tokens of a request; else a launch. The kernel knows one rounding only, the nearest code.

    Args:
        newest: [pages, heads, size, 2 * head_dim], keys and values of unpacked tokens side by side.
        token_pages, token_slots: int64 [due, TILE], where the tokens of each tile lie.
        pages: int64 [due], the page of each tile; -1: there is none.
        tiles: views of the pages of tiles, [pages, heads, ...] each.
    """
    head_dim = newest.shape[3] // 2
    if round_keys is not nearest:
        states = newest.transpose(1, 2)[token_pages, token_slots].transpose(1, 2)
        packed = quantize(*states.split(head_dim, 3), quantization, round_keys)
        written = pages.clamp(min=0)
        for part, new_part in zip(tiles, packed, strict=True):
            valid = (pages >= 0).view(-1, *[1] * (part.dim() - 1))
            part[written] = torch.where(valid, new_part, part[written])
        return
    page = newest.stride(0)
    slot = newest.stride(2)
    step = math.gcd(page, slot)
    with torch.cuda.device_of(newest):
        _pack_due_kernel[(len(pages), newest.shape[1])](
            newest_ptr=newest,
            row_ptr=torch.add(token_slots * (slot // step), token_pages, alpha=page // step),
            page_ptr=pages,
            k_codes_ptr=tiles.key_codes,
            k_scales_ptr=tiles.key_scales,
            v_codes_ptr=tiles.value_codes,
            v_scales_ptr=tiles.value_scales,
            step=step,
            newest_head=newest.stride(1),
            **_strides(tiles.key_codes, "code_page", "code_head"),
            **_strides(tiles.key_scales, "scale_page", "scale_head"),
            **options(head_dim, quantization),
            D=head_dim,
            num_warps=8,
            enable_fp_fusion=False,
        )
