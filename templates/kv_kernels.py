"""Functions that the Triton kernels share, for attention over heads of different lengths.

A head's tokens lie in slots. Slot s holds position s while s < sink; from there on positions go round a ring: position
p is in slot sink + (p - sink) % ring. A query at position i sees position p <= i when p < sink or i - p < recent. A
head that keeps every token has a sink that no position reaches (`EVERY`).

Every launch says whether the compiler may fuse a product into a sum, as the default depends on Triton's version. Where
lanes add up products of their own by exchanging them, it must not: each would round another product, so lanes that
share a sum would hold sums that differ in the last bit, and write both to the same place.

The reference of the kernels is `kv_softmax`. Floors in their docstrings are the time that no implementation beats:
bytes that must move over the device's read bandwidth, or operations over the rate of its matrix units.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton import constexpr_function  # older versions have none
except ImportError as error:  # transformers demands whatever is imported outside of a try
    raise ImportError("the CUDA kernels of this checkpoint need triton") from error

from .kv_layout import EVERY, TILE
from .kv_softmax import Scoring
from .kv_storage import HeadTable

TILE_BYTES = 8 * 1024  # keys of a unit of work; as much again for its values
MATRIX_ELEMENTS = 4096  # of a matrix that a program multiplies by at once
REGISTERS = 255  # of a thread; ptxas may stop at fewer by itself, and spill
LOG2_E = math.log2(math.e)
# a score lower than any real one: unlike -inf, its difference from a masked score is no NaN
LOWEST = tl.constexpr(-1.0e30)
LN_2 = tl.constexpr(math.log(2))
TILE_TOKENS = tl.constexpr(TILE)
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
def _sink_score(logit):
    """The score in base 2 of a learned sink: online softmax begins with it, at a weight of 1 and no value."""
    return tl.load(logit).to(tl.float32) * (1 / LN_2)  # which a division would only approximate


@triton.jit
def _accumulate(scores, v, top, total, acc):
    """A step of online softmax: scores [M, N] of values v [N, D]."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    fade = tl.exp2(top - new_top)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new_top, total * fade + tl.sum(weights, 1), acc


@triton.jit
def _times_matrix(x, matrix_ptr, to_ptr, step, sum_step, D: tl.constexpr, N: tl.constexpr):
    """Store x [D] times a matrix [D, D] in fp32, N elements at once: at d, the sum of x[e] * matrix[d * step + e *
    sum_step]."""
    e = tl.arange(0, x.shape[0])[:, None]
    for first in range(0, D, N):
        d = first + tl.arange(0, N)
        pointers = matrix_ptr + d[None, :] * step + e * sum_step
        product = tl.sum(x[:, None] * tl.load(pointers, (e < D) & (d < D)[None, :], 0.0), 0)
        tl.store(to_ptr + d, product.to(to_ptr.dtype.element_ty), d < D)


def _matrix(table: HeadTable) -> dict:
    """Arguments of kernels that rotate states of a head: the matrix, None where nothing is rotated."""
    width = _padded(table.keys.shape[2])
    return {"matrix_ptr": table.matrix, "MATRIX_N": min(MATRIX_ELEMENTS // width, width)}


def _registers() -> dict[str, int]:
    """The launch option that lets a thread have all registers; other compilers than ptxas do not know it."""
    return {"maxnreg": REGISTERS} if torch.version.hip is None else {}


@constexpr_function
def _power(count: int) -> int:
    """The least power of two that is no less."""
    return 1 << (count - 1).bit_length()


@constexpr_function
def _padded(head_dim: int) -> int:
    """Elements of a row of a tile: a power of two, and enough for the matrix units."""
    return max(16, _power(head_dim))


def _score_factors(scoring: Scoring) -> dict:
    """What `_scores` multiplies the dot products and the capped scores by, so that exp2 is all it needs."""
    if scoring.softcap is None:
        return {"scale": scoring.scale * LOG2_E, "cap": 1.0, "CAP": False}
    return {"scale": 2 * scoring.scale / scoring.softcap * LOG2_E, "cap": scoring.softcap * LOG2_E, "CAP": True}


class Launch:
    """A kernel's launch that is repeated with other tensors, which come first in the kernel's signature.

    Triton takes far longer to bind arguments by name than to launch what it has compiled, which takes them in order.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **arguments):
        self.kernel, self.grid, self.arguments = kernel, (*grid, 1, 1)[:3], arguments
        self.values = [arguments[name] for name in kernel.arg_names if name in arguments]
        self.compiled: Any = None

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        if self.compiled is None:  # the interpreter never compiles
            self.compiled = self.kernel[self.grid](*tensors, **self.arguments)
        else:
            self.compiled[self.grid](*tensors, *self.values)


def prepared(table: HeadTable, prepare: Callable[[], Any], tensors: Sequence[torch.Tensor | None], *settings) -> Any:
    """Launches over a table, as they were prepared for the first tensors of the same form."""
    launches = {} if table.launches is None else table.launches
    # Triton compiles other kernels for pointers that are no multiples of 16 bytes
    forms = [x if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16) for x in tensors]
    key = *forms, *settings
    if key not in launches:
        launches[key] = prepare()
    return launches[key]


def _strides(states: torch.Tensor, *names: str) -> dict[str, int]:
    """A tensor's strides along its first dimensions, by the names that a kernel has for them."""
    return dict(zip(names, states.stride(), strict=False))


def _slots(table: HeadTable) -> dict:
    """Arguments of every kernel that works on the slots of a layer's heads."""
    assert table.keys.stride() == table.values.stride()
    assert table.keys.stride(2) == 1
    return {
        "k_ptr": table.keys,
        "v_ptr": table.values,
        "offset_ptr": table.offsets,
        "sink_ptr": table.sinks,
        "ring_ptr": table.rings,
        **_strides(table.keys, "kv_batch", "kv_slot"),
        "heads": len(table.offsets),
        "D": table.keys.shape[2],
    }


def _tiles(table: HeadTable, word: torch.dtype) -> dict:
    """Arguments of every kernel that works on packed tiles, whose codes it takes in such words."""
    pointers = "k_codes_ptr", "k_scales_ptr", "v_codes_ptr", "v_scales_ptr", "packed_ptr", "first_ptr"
    sizes = "packed_batch", "packed_head", "tiles"
    if table.tiles is None or table.packed is None:
        return dict.fromkeys(pointers) | dict.fromkeys(sizes, 0)
    key_codes, key_scales, value_codes, value_scales = table.tiles
    assert all(part.is_contiguous() for part in table.tiles)
    key_codes = key_codes.view(word)
    value_codes = value_codes.view(word)
    parts = key_codes, key_scales, value_codes, value_scales, table.packed, table.first_tiles
    return dict(zip((*pointers, *sizes), (*parts, *table.packed.stride(), key_codes.shape[1]), strict=True))
