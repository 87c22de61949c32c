"""Rotation of states within a head before they are quantized: it spreads channels that stand out over all others."""

import functools
import math

import torch


@functools.cache
@torch.inference_mode(False)  # it may be used where gradients are wanted
def rotation(head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An orthonormal matrix [head_dim, head_dim] whose elements are all of about the same size.

    Sylvester's Hadamard matrix of the largest power of two that divides head_dim, times (Kronecker) the orthonormal
    discrete cosine transform (DCT-II) of the odd rest: a Hadamard matrix alone for 128, those of 16 and 5 for 80.
    QuaRot (Ashkboos et al. 2024, arXiv 2404.00456) builds its rotations from such products.
    """
    power = head_dim & -head_dim
    rest = torch.arange(head_dim // power, dtype=torch.float64)
    size = len(rest)
    matrix = torch.cos(math.pi / size * (rest + 0.5) * rest[:, None]) * (2 / size) ** 0.5
    matrix[0] = size**-0.5
    for _ in range(power.bit_length() - 1):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) * 0.5**0.5
    return matrix.to(device, dtype)


def rotated(states: torch.Tensor, heads: int, back: bool = False) -> torch.Tensor:
    """States [batch, heads, tokens, head_dim] of which the first `heads` heads are rotated, or rotated back.

    The product is in float32, so that states are rounded once.
    """
    dtype = torch.promote_types(states.dtype, torch.float32)
    matrix = rotation(states.shape[-1], dtype, states.device)
    turned = (states[:, :heads].to(dtype) @ (matrix if back else matrix.mT)).to(states.dtype)
    return turned if heads == states.shape[1] else torch.cat([turned, states[:, heads:]], 1)
