"""What the Triton kernels share: attention over heads that keep different amounts, for CUDA.

A head's tokens lie in slots. Slot s holds position s while s < sink; from there on positions go round a ring: position
p is in slot sink + (p - sink) % ring. A query at position i sees position p <= i when p < sink or i - p < recent. A
head that keeps every token has a sink that no position reaches (`EVERY`).

Each kernel has its reference in torch beside it. Floors in their docstrings are the time that no implementation beats:
bytes that must move over the device's read bandwidth, or operations over the rate of its matrix units.
"""

import math

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # transformers demands whatever is imported outside of a try
    raise ImportError("the CUDA kernels of this checkpoint need triton") from error

EVERY = 2**30  # the sink of a full head, and more tokens than a row has
LOG2_E = math.log2(math.e)
# a score lower than any real one: unlike -inf, its difference from a masked score is no NaN
LOWEST = tl.constexpr(-1.0e30)
LN_2 = tl.constexpr(math.log(2))
EVERY_POSITION = tl.constexpr(EVERY)


@triton.jit
def _scores(q, k, scale, cap, CAP: tl.constexpr):
    """Scores in base 2 of q [M, D] over k [N, D]; `_score_factors` gives the factors."""
    return _capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, cap, CAP)


@triton.jit
def _capped(scores, cap, CAP: tl.constexpr):
    """Scores that `_score_factors` has scaled, in base 2."""
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
