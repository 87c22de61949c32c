"""Quantized tiles of keys and values: asymmetric codes of 8, 4, 3 or 2 bits each, packed in tiles.

States may be rotated within a head first, which spreads channels that stand out over all others. The scheme is KIVI's
(Liu et al. 2024, arXiv 2402.02750), or per token as in the quantized cache of transformers.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .kv_layout import CLIPPED, TILE, Quantization, Widths

# codes in float32 of states, by the scales and minima of their groups and the bits of a code
Rounding = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
TRIED = 2**17  # states at once, in all ranges that are tried: a CPU spends more time on pages of new memory


class Tiles(NamedTuple):
    """Packed tiles of one layer's heads, head after head; `S` is a tile's `key_groups` or `value_groups`.

    A token's codes of `bits` bits are `width = head_dim * bits / 8` bytes, for its keys and its values each; byte w
    holds channels w, width + w, 2 * width + w, ... from the low bits on. With 3 bits, the two low bits of all tokens
    come first, as codes of 2 bits, then the third bits: byte w of a token has those of bytes 2 * w and 2 * w + 1, again
    from the low bits on. A byte thus goes with a 16-bit word, and kernels work on as many channels at once as with 2
    bits. Scales and minima are in the model's dtype: first all scales of a tile, then all minima.
    """

    key_codes: torch.Tensor  # uint8 [batch, tiles, TILE, width]
    key_scales: torch.Tensor  # [batch, tiles, 2, *S]
    value_codes: torch.Tensor
    value_scales: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(part.nbytes for part in self)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Tiles":
        """Change every part alike: other rows, or some of the tiles."""
        return Tiles(*map(change, self))


def empty_tiles(states: torch.Tensor, tiles: int, quantization: Quantization) -> Tiles:
    """Room for `tiles` tiles of heads like `states` [batch, ..., head_dim]."""
    batch, head_dim = states.shape[0], states.shape[-1]
    parts = []
    all_groups = quantization.key_groups(head_dim), quantization.value_groups(head_dim)
    for groups, width in zip(all_groups, quantization.code_bytes(head_dim), strict=True):
        parts.append(states.new_zeros(batch, tiles, TILE, width, dtype=torch.uint8))
        parts.append(states.new_zeros(batch, tiles, 2, *groups))
    return Tiles(*parts)


def nearest(states: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes in float32 of states, each rounded by itself."""
    return ((states - low) / scale.where(scale > 0, 1)).round_().clamp_(0, 2**bits - 1)


def quantize(
    keys: torch.Tensor, values: torch.Tensor, quantization: Quantization, round_keys: Rounding = nearest
) -> Tiles:
    """Whole tiles [..., TILE, head_dim] of keys and values as codes, scales and minima [..., :, :]."""
    head_dim, (key_bits, value_bits) = keys.shape[-1], quantization.widths
    key_parts = quantize_groups(keys, quantization.key_groups(head_dim), key_bits, quantization, round_keys)
    return Tiles(*key_parts, *quantize_groups(values, quantization.value_groups(head_dim), value_bits, quantization))


def dequantize(tiles: Tiles, widths: Widths) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [..., TILE, head_dim] that packed tiles stand for."""
    return (
        _dequantize(tiles.key_codes, tiles.key_scales, widths.keys),
        _dequantize(tiles.value_codes, tiles.value_scales, widths.values),
    )


def key_products(query: torch.Tensor, tiles: Tiles, bits: int, room: torch.Tensor) -> torch.Tensor:
    """Dot products of queries and the keys of packed tiles. Scales and minima are applied to queries or products.

    Args:
        query: [batch, heads, n, head_dim].
        tiles: of all heads, [batch, heads, tiles, ...].
        bits: of the keys.
        room: memory for the codes of some tiles at a time, of the queries' dtype. A CPU spends much of a step on pages
            of new memory, so all tiles use the same.

    Returns:
        [batch, heads, n, tiles * TILE].
    """
    scale, low = tiles.key_scales.to(query.dtype).unbind(3)
    batch, heads, count, rows, columns = scale.shape
    products = query.new_empty(batch, heads, query.shape[2], count, TILE)
    factors = _inverse_shifts(bits, query.dtype, query.device)
    planes = len(factors)
    plane_query = query.unflatten(3, (planes, -1)).movedim(3, 0) * factors
    per_token = rows == TILE  # scales of a token and a run of channels; else of a channel and a run of tokens
    scales = _by_plane(scale, query.shape[3], planes) if per_token else scale.unflatten(4, (planes, -1)).movedim(4, 0)
    runs = scales.shape[4] if per_token else 1
    for tile_slice, codes in _codes_in(tiles.key_codes, bits, runs, room):
        if per_token:
            tile_products = plane_query.unflatten(4, (runs, -1)).transpose(3, 4)[:, :, :, None] @ codes.mT
            tile_products = (tile_products * scales[:, :, :, tile_slice, :, None]).sum((0, 4))
        else:
            scaled_query = plane_query[:, :, :, None, None] * scales[:, :, :, tile_slice, :, None]
            tile_products = (
                (scaled_query @ codes[:, :, :, :, 0].unflatten(4, (rows, -1)).mT).sum(0).transpose(3, 4).flatten(4)
            )
        products[:, :, :, tile_slice] = tile_products.transpose(2, 3)
    minimum_products = query.unflatten(3, (columns, -1)).sum(4) @ low.flatten(2, 3).mT
    products.view(batch, heads, -1, count * rows, TILE // rows).add_(minimum_products[..., None])
    return products.flatten(3)


def weighted_values(weights: torch.Tensor, tiles: Tiles, bits: int, room: torch.Tensor) -> torch.Tensor:
    """Sums of the values of packed tiles by weights: [batch, heads, n, tiles * TILE] -> [batch, heads, n, head_dim]."""
    scale, low = tiles.value_scales.to(weights.dtype).unbind(3)
    factors, head_dim = _inverse_shifts(bits, weights.dtype, weights.device), tiles.value_codes.shape[4] * 8 // bits
    scales = _by_plane(scale, head_dim, len(factors))
    tile_weights, sums = weights.unflatten(3, (-1, TILE)).transpose(2, 3)[:, :, :, None], []
    for tile_slice, codes in _codes_in(tiles.value_codes, bits, scales.shape[4], room):
        sums.append((tile_weights[:, :, tile_slice] * scales[:, :, :, tile_slice, :, None] @ codes).sum(3))
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)  # [planes, batch, heads, runs, n, channels of one]
    output = total.mul_(factors[..., None]).permute(1, 2, 4, 0, 3, 5).flatten(3)
    output.unflatten(3, (scale.shape[4], -1)).add_((weights @ low.flatten(2, 3))[..., None])
    return output


def _by_plane(scale: torch.Tensor, head_dim: int, planes: int) -> torch.Tensor:
    """Scales [..., TILE, columns] of runs of channels as [planes, ..., runs, TILE] of runs that lie in one plane."""
    column = head_dim // scale.shape[-1]
    run = math.gcd(head_dim // planes, column)
    # of one column, nothing is copied
    parts = scale.mT[..., None, :].expand(*scale.shape[:-2], -1, column // run, TILE)
    return parts.flatten(-3, -2).unflatten(-2, (planes, -1)).movedim(-3, 0)


def _codes_in(packed: torch.Tensor, bits: int, runs: int, room: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Codes of some tiles of [batch, heads, tiles, TILE, width] at a time, of each plane's channels in so many runs.

    Yields:
        The tiles, and codes [planes, batch, heads, n, runs, TILE, channels], by plane as `_planes` has them, in the
        dtype of `room`, which are written into it. Those of 4 and 2 bits are not shifted: `_inverse_shifts` has the
        factors.
    """
    planes = 4 if bits == 3 else 8 // bits
    max_tiles = max(1, room.numel() // (packed[:, :, 0].numel() * 8 // bits))
    for first_tile in range(0, packed.shape[2], max_tiles):
        tile_slice = slice(first_tile, first_tile + max_tiles)
        part = packed[:, :, tile_slice]
        codes = room[: part.numel() * 8 // bits].view(planes, *part.shape[:3], runs, TILE, -1)
        if bits in (3, 8):
            for plane, states in enumerate(_planes(part, bits)):
                codes[plane] = _by_run(states, runs)
        else:
            codes.copy_(_by_run(part, runs) & _masks(bits, part.device))
        yield tile_slice, codes


def _by_run(codes: torch.Tensor, runs: int) -> torch.Tensor:
    """Codes [..., tokens, channels] as [..., runs, tokens, channels of a run]."""
    return codes.unflatten(-1, (runs, -1)).transpose(-3, -2)


@functools.cache
@torch.inference_mode(False)
def _masks(bits: int, device: torch.device) -> torch.Tensor:
    """Which bits of a byte each plane has: uint8 [planes, 1, 1, 1, 1, 1, 1]."""
    masks = [2**bits - 1 << shift for shift in range(0, 8, bits)]
    return torch.tensor(masks, dtype=torch.uint8, device=device).view(-1, 1, 1, 1, 1, 1, 1)


@functools.cache
@torch.inference_mode(False)
def _inverse_shifts(bits: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """By plane, what makes a code of what `_codes_in` yields: less work than to shift it. [planes, 1, 1, 1, 1]"""
    shifts = torch.zeros(4) if bits == 3 else torch.arange(0, 8, bits)
    return (2.0**-shifts).to(device, dtype).view(-1, 1, 1, 1, 1)


def quantize_groups(
    states: torch.Tensor,
    groups: tuple[int, int],
    bits: int,
    quantization: Quantization,
    rounding: Rounding = nearest,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes of states, and the scales that groups of them share."""
    codes, scales = _encode(states, groups, bits, quantization, rounding)
    return _pack(codes, bits), scales


def _encode(
    states: torch.Tensor, groups: tuple[int, int], bits: int, quantization: Quantization, rounding: Rounding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [..., tokens, head_dim], scales and minima [..., 2, *groups]."""
    *outer, tokens, head_dim = states.shape
    rows, columns = groups
    grouped = states.float().reshape(*outer, rows, tokens // rows, columns, head_dim // columns)
    scale, low = _ranges(grouped, bits, states.dtype, CLIPPED if quantization.clip else 1)
    codes = rounding(grouped, scale, low, bits).to(torch.uint8).reshape(states.shape)
    return codes, torch.stack([scale, low], len(outer)).to(states.dtype).view(*outer, 2, rows, columns)


def _ranges(grouped: torch.Tensor, bits: int, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum of each group: of the first `count` ranges, the one with the least squared error.

    Both are rounded as they are stored, so that codes fit what dequantizing will see.
    """
    low = grouped.amin((-3, -1), keepdim=True)
    high = grouped.amax((-3, -1), keepdim=True)
    if count == 1:
        return _quotient(high - low, 2**bits - 1).to(dtype).float(), low  # a state, thus exact
    fractions = _quotient(torch.arange(20, 20 - count, -1, dtype=torch.float32, device=low.device), 20)
    spans = (high - low) * fractions.view(-1, *[1] * low.dim())
    scales = _quotient(spans, 2**bits - 1).to(dtype).float()
    starts = ((low + high) * 0.5 - spans * 0.5).to(dtype).float()
    starts[0] = low
    at_once = max(1, TRIED // max(grouped.numel(), 1))
    ranges = zip(scales.split(at_once), starts.split(at_once), strict=True)
    errors = torch.cat([_squared_error(grouped, *chunk, bits) for chunk in ranges])
    best_range = errors.argmin(0, keepdim=True)  # the first of equal ones
    return scales.gather(0, best_range)[0], starts.gather(0, best_range)[0]


def _quotient(states: torch.Tensor, divisor: int) -> torch.Tensor:
    """Correctly rounded, as on a CPU and in kernels: on a GPU torch multiplies by the inverse of a plain number."""
    return states / states.new_full((), divisor)


def _squared_error(grouped: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, bits: int) -> torch.Tensor:
    return (nearest(grouped, scale, low, bits).mul_(scale).add_(low) - grouped).square_().sum((-3, -1), keepdim=True)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [..., tokens, head_dim] as bytes [..., tokens, width]."""
    if bits == 3:
        # where a byte has the third bits of the channels in a 16-bit word, [4, 1, 2]
        shift = torch.arange(8, dtype=torch.uint8, device=codes.device).view(2, 4).T[:, None]
        third = (codes >> 2).unflatten(-1, (4, -1, 2))
        parts = _pack(codes & 3, 2), (third << shift).sum((-3, -1), dtype=torch.uint8)
        return torch.cat([part.flatten(-2) for part in parts], -1).unflatten(-1, (codes.shape[-2], -1))
    planes = codes.unflatten(-1, (8 // bits, -1))
    packed = planes[..., 0, :].clone()
    for plane in range(1, 8 // bits):
        packed |= planes[..., plane, :] << (bits * plane)
    return packed


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The reverse of `_pack`."""
    return packed if bits == 8 else torch.cat([*_planes(packed, bits)], -1)


def _planes(packed: torch.Tensor, bits: int) -> Iterator[torch.Tensor]:
    """Codes uint8 [..., tokens, n] of the channels that the same bits of bytes hold, from the low bits on."""
    if bits == 3:
        low, third = split_thirds(packed)
        pairs = third.to(torch.int16)  # a byte for both bytes of a word: of each plane, two bits that are eight apart
        pairs = (pairs << 6).bitwise_or_(pairs.bitwise_left_shift_(2))
        for place, plane in enumerate(_planes(low, 2)):
            yield plane.bitwise_or_((pairs >> place).bitwise_and_(0x0404).view(torch.uint8))
        return
    last_plane = 8 // bits - 1
    for plane in range(last_plane + 1):  # in place where it can be, since a CPU spends much time on pages of new memory
        if plane == 0:
            yield packed & (2**bits - 1) if last_plane else packed
        else:
            shifted = packed >> bits * plane
            yield shifted if plane == last_plane else shifted.bitwise_and_(2**bits - 1)


def split_thirds(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of codes of 3 bits, packed as [..., tokens, width], those of the two low bits and of the third, by token."""
    tokens, width = packed.shape[-2:]
    parts = packed.flatten(-2).split([tokens * width * 2 // 3, tokens * width // 3], -1)
    low, third = (part.unflatten(-1, (tokens, -1)) for part in parts)
    return low, third


def _dequantize(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    *outer, tokens, width = codes.shape
    rows, columns = scales.shape[-2:]
    states = unpack(codes, bits).to(scales.dtype)
    grouped = states.view(*outer, rows, tokens // rows, columns, width * 8 // bits // columns)
    scale, low = (part[..., :, None, :, None] for part in scales.unbind(-3))
    return scale_codes(grouped, scale, low).view_as(states)


def scale_codes(codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """What codes stand for: `codes * scale + low`. Codes in float32 are overwritten."""
    if codes.dtype == torch.float32:  # several times faster where a scale is for the innermost states
        return codes.mul_(scale).add_(low)
    return torch.addcmul(low, codes, scale)  # rounds once


@functools.cache
@torch.inference_mode(False)  # it may be used where gradients are wanted
def rotation(head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An orthonormal matrix [head_dim, head_dim] whose elements are all of about the same size.

    Sylvester's Hadamard matrix of the largest power of two that divides head_dim, times (Kronecker) the orthonormal
    discrete cosine transform (DCT-II) of the odd rest: a Hadamard matrix alone for 128, those of 16 and 5 for 80.
    QuaRot (Ashkboos et al. 2024, arXiv 2404.00456) builds its rotations from such products.
    """
    power = head_dim & -head_dim
    index = torch.arange(head_dim // power, dtype=torch.float64)
    size = len(index)
    matrix = torch.cos(math.pi / size * (index + 0.5) * index[:, None]) * (2 / size) ** 0.5
    matrix[0] = size**-0.5
    for _ in range(power.bit_length() - 1):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) * 0.5**0.5
    return matrix.to(device, dtype)


def rotated(states: torch.Tensor, heads: int, back: bool = False) -> torch.Tensor:
    """States [batch, heads, tokens, head_dim] of which the first `heads` heads are rotated, or rotated back.

    The product is in float32, so that states are rounded once.
    """
    if not heads:
        return states
    dtype = torch.promote_types(states.dtype, torch.float32)
    matrix = rotation(states.shape[-1], dtype, states.device)
    rotated_heads = (states[:, :heads].to(dtype) @ (matrix if back else matrix.mT)).to(states.dtype)
    return rotated_heads if heads == states.shape[1] else torch.cat([rotated_heads, states[:, heads:]], 1)
