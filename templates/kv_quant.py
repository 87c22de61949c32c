"""Quantised tiles of keys and values: asymmetric codes of 8, 4 or 2 bits, packed, each tile written once.

The scheme is KIVI's (Liu et al. 2024, arXiv 2402.02750), or per token as in the quantised cache of transformers.
"""

from typing import NamedTuple

import torch

from .kv_layout import TILE, Quantisation


class Tiles(NamedTuple):
    """Packed tiles of one layer's heads, head after head; `S` is a tile's `key_groups` or `value_groups`.

    A token's codes are `width = head_dim * bits / 8` bytes; byte w holds channels w, width + w, 2 * width + w, ... from
    the low bits on. Scales and minima are in the model's dtype: first all scales of a tile, then all minima.
    """

    key_codes: torch.Tensor  # uint8 [batch, tiles, TILE, width]
    key_scales: torch.Tensor  # [batch, tiles, 2, *S]
    value_codes: torch.Tensor
    value_scales: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(part.nbytes for part in self)

    def map(self, change) -> "Tiles":
        """The same change of every part: other rows, or some of the tiles."""
        return Tiles(*map(change, self))


def empty_tiles(states: torch.Tensor, tiles: int, quantisation: Quantisation) -> Tiles:
    """Room for `tiles` tiles of heads like `states` [batch, ..., head_dim]."""
    batch, head_dim = states.shape[0], states.shape[-1]
    parts = []
    for groups in (quantisation.key_groups(head_dim), quantisation.value_groups(head_dim)):
        shape = batch, tiles, TILE, quantisation.code_bytes(head_dim)
        parts.append(states.new_zeros(shape, dtype=torch.uint8))
        parts.append(states.new_zeros(batch, tiles, 2, *groups))
    return Tiles(*parts)


def quantise(keys: torch.Tensor, values: torch.Tensor, quantisation: Quantisation) -> Tiles:
    """Whole tiles [..., TILE, head_dim] of keys and values as codes, scales and minima [..., :, :]."""
    head_dim, bits = keys.shape[-1], quantisation.bits
    key_groups, value_groups = quantisation.key_groups(head_dim), quantisation.value_groups(head_dim)
    return Tiles(*_quantise(keys, key_groups, bits), *_quantise(values, value_groups, bits))


def dequantise(tiles: Tiles, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [..., TILE, head_dim] that packed tiles stand for."""
    return (
        _dequantise(tiles.key_codes, tiles.key_scales, bits),
        _dequantise(tiles.value_codes, tiles.value_scales, bits),
    )


def _quantise(states: torch.Tensor, groups: tuple[int, int], bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    *outer, tokens, head_dim = states.shape
    rows, columns = groups
    grouped = states.float().reshape(*outer, rows, tokens // rows, columns, head_dim // columns)
    low, high = grouped.amin((-3, -1), keepdim=True), grouped.amax((-3, -1), keepdim=True)
    # rounded as they are stored, so that codes fit what dequantising will see; the minimum is a state, thus exact
    scale = ((high - low) / (2**bits - 1)).to(states.dtype).float()
    codes = ((grouped - low) / scale.where(scale > 0, 1)).round().clamp(0, 2**bits - 1)
    planes = codes.to(torch.uint8).view(*outer, tokens, 8 // bits, head_dim * bits // 8)
    packed = planes[..., 0, :].clone()
    for plane in range(1, 8 // bits):
        packed |= planes[..., plane, :] << (bits * plane)
    scales = torch.stack([scale, low], len(outer)).to(states.dtype)
    return packed, scales.view(*outer, 2, rows, columns)


def _dequantise(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    *outer, tokens, width = codes.shape
    rows, columns = scales.shape[-2:]
    planes = [codes >> (bits * plane) & (2**bits - 1) for plane in range(8 // bits)] if bits < 8 else [codes]
    states = torch.cat(planes, -1).to(scales.dtype)
    grouped = states.view(*outer, rows, tokens // rows, columns, width * 8 // bits // columns)
    scale, low = (part[..., :, None, :, None] for part in scales.unbind(-3))
    if states.dtype == torch.float32:  # several times faster where a scale is for the innermost states
        return grouped.mul_(scale).add_(low).view_as(states)
    return torch.addcmul(low, grouped, scale).view_as(states)  # rounds once
