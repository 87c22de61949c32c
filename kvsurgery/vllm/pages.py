"""What vLLM's pages hold of heads whose older tokens are quantized: tiles as bytes, and states as they are stored."""

from __future__ import annotations

import torch

from kvsurgery.templates.kv_codes import Tiles, rotated
from kvsurgery.templates.kv_layout import TILE, Quantization


def to_page(tiles: Tiles) -> torch.Tensor:
    """Concatenate the parts of packed tiles [tiles, heads, ...] as bytes: [tiles, heads, bytes]."""
    return torch.cat([part.contiguous().view(torch.uint8).flatten(2) for part in tiles], 2)


def from_page(page: torch.Tensor, head_dim: int, dtype: torch.dtype, quantization: Quantization) -> Tiles:
    """Read the tiles of pages [..., bytes] as views."""
    parts, begin = [], 0
    all_groups = quantization.key_groups(head_dim), quantization.value_groups(head_dim)
    for groups, width in zip(all_groups, quantization.code_bytes(head_dim), strict=True):
        for shape, kind in (((TILE, width), torch.uint8), ((2, *groups), dtype)):
            end = begin + torch.Size(shape).numel() * kind.itemsize
            parts.append(page[..., begin:end].view(kind).unflatten(-1, shape))
            begin = end
    return Tiles(*parts)


def rotated_query(quantization: Quantization, query: torch.Tensor) -> torch.Tensor:
    """Queries [tokens, query_heads, head_dim], rotated as the keys are that they meet."""
    return rotated(query, (quantization.rotate == "both") * query.shape[1])


def stored_form(
    quantization: Quantization, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [tokens, heads, head_dim], rotated as the cache stores them."""
    rotates_keys, rotates_values = quantization.rotate == "both", quantization.rotate != "none"
    return rotated(key, rotates_keys * key.shape[1]), rotated(value, rotates_values * value.shape[1])
