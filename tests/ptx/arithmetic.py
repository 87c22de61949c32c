"""Instructions that only compute: by opcode, a function of arrays and the types of its operands.

`mul.lo.s32` and each of its kind stand in `OPERATIONS` under their whole name, so that no modifier is overlooked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .numbers import DTYPES, UNSIGNED, bf16, f16, floats, flushed, halves, joined, widened


class Operation(NamedTuple):
    """What an instruction computes of its sources; with several `results`, the function returns as many."""

    function: Callable
    sources: tuple[str, ...]  # PTX types
    results: tuple[str, ...]


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer quotient towards zero; all bits are set where the divisor is 0, as on NVIDIA's GPUs."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient += (a - quotient * safe != 0) & ((a < 0) != (b < 0))
    return np.where(b == 0, a.dtype.type(-1) if a.dtype.kind == "i" else np.iinfo(a.dtype).max, quotient)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a - _divided(a, b) * b


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c with one rounding, but for one time in 2 ** 29."""
    product = np.multiply(a, b, dtype=np.float64)
    return (product + c).astype(np.float32)


def _flushing(function: Callable) -> Callable:
    return lambda *values: flushed(function(*map(flushed, values)))


def _left(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    shifted = np.left_shift(a, np.minimum(by, bits - 1).astype(a.dtype))
    return np.where(by >= bits, a.dtype.type(0), shifted)


def _right(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Of a signed number, the sign fills; of an unsigned one, zeros do."""
    bits = 8 * a.dtype.itemsize
    shifted = np.right_shift(a, np.minimum(by, bits - 1).astype(a.dtype))
    return shifted if a.dtype.kind == "i" else np.where(by >= bits, a.dtype.type(0), shifted)


def _funnel_left(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
    """The high 32 bits of 64, shifted left by `by` modulo 32."""
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    return ((both << (by & np.uint32(31)).astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)


def _funnel_right(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    return (both >> (by & np.uint32(31)).astype(np.uint64)).astype(np.uint32)


def _field(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """`length` bits from `position` on; the highest of them is the sign of a signed number."""
    bits = a.dtype.type(8 * a.dtype.itemsize)
    position, length = position.astype(a.dtype), length.astype(a.dtype)
    at_top = np.left_shift(a, np.clip(bits - position - length, 0, bits - 1))
    return np.where(length == 0, a.dtype.type(0), np.right_shift(at_top, np.clip(bits - length, 0, bits - 1)))


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four of the eight bytes of b and a; bit 3 of a choice asks for the byte's sign eight times instead."""
    both, result = (b.astype(np.uint64) << np.uint64(32)) | a, np.uint64(0)
    for place in range(4):
        choice = (selector >> np.uint32(4 * place)).astype(np.uint64) & np.uint64(15)
        byte = (both >> ((choice & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        byte = np.where(choice & np.uint64(8), (byte >> np.uint64(7)) * np.uint64(255), byte)
        result = result | (byte << np.uint64(8 * place))
    return result.astype(np.uint32)


def _looked_up(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Bit by bit, the entry of an 8-bit truth table at 4 a + 2 b + c."""
    result = np.uint32(0)
    for entry in range(8):
        chosen = (table >> np.uint32(entry)) & np.uint32(1)
        terms = (x if entry & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1)))
        result = result | np.bitwise_and.reduce(np.broadcast_arrays(*terms)) * chosen
    return result


def _in_halves(function: Callable) -> Callable:
    """A function of 16-bit integers on both halves of 32 bits, without a carry between them."""
    return lambda *values: joined(*(function(*part) for part in zip(*map(halves, values), strict=True)))


def _packed(kind: str, function: Callable) -> Callable:
    """A function of float64 on both halves of 32 bits, each rounded once to 16."""
    to_bits = bf16 if kind == "bf16" else f16

    def apply(*values):
        parts = zip(*map(halves, values), strict=True)
        return joined(*(to_bits(function(*(floats(x, kind).astype(np.float64) for x in part))) for part in parts))

    return apply


def _in_float32(function: Callable) -> Callable:
    """A function of float32 on bfloat16, rounded."""
    return lambda *values: bf16(function(*map(widened, values)))


def _compared(function: Callable, unordered: bool) -> Callable:
    """A comparison of floats, with the given result where one of them is NaN."""

    def apply(a, b):
        nan = np.isnan(a) | np.isnan(b)
        return function(a, b) | nan if unordered else function(a, b) & ~nan

    return apply


def _to_integer(round_: Callable, to: np.dtype) -> Callable:
    """Conversion of a float that saturates; NaN becomes 0."""
    limits = np.iinfo(to)
    return lambda x: np.clip(np.nan_to_num(round_(x.astype(np.float64))), limits.min, limits.max).astype(to)


def _converted(to: np.dtype) -> Callable:
    return lambda x: x.astype(to)


COMPARISONS = {
    **{"eq": np.equal, "ne": np.not_equal},
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal},
}
LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
WORDS = ("s16", "u16", "s32", "u32", "s64", "u64")
OPERATIONS: dict[str, Operation] = {}


def _define(opcode: str, function: Callable, sources: str | tuple[str, ...], *results: str) -> None:
    """With no result named, it has the type of the first source."""
    sources = (sources,) if isinstance(sources, str) else sources
    OPERATIONS[opcode] = Operation(function, sources, results or sources[:1])


def _define_integers() -> None:
    for kind in WORDS:
        two = (kind, kind)
        for name, function in (("add", np.add), ("sub", np.subtract), ("mul.lo", np.multiply)):
            _define(f"{name}.{kind}", function, two)
        for name, function in (("min", np.minimum), ("max", np.maximum), ("div", _divided), ("rem", _remainder)):
            _define(f"{name}.{kind}", function, two)
        _define(f"mad.lo.{kind}", lambda a, b, c: a * b + c, (kind, kind, kind))
        _define(f"shr.{kind}", _right, (kind, "u32"))
        for name, function in COMPARISONS.items():
            _define(f"setp.{name}.{kind}", function, two, "pred")
        if kind[0] == "s":
            _define(f"neg.{kind}", np.negative, kind)
            _define(f"abs.{kind}", np.abs, kind)
    for kind, wide in (("s16", "s32"), ("u16", "u32"), ("s32", "s64"), ("u32", "u64")):
        to, bits = DTYPES[wide], 8 * DTYPES[kind].itemsize
        _define(f"mul.wide.{kind}", lambda a, b, to=to: a.astype(to) * b, (kind, kind), wide)
        _define(f"mad.wide.{kind}", lambda a, b, c, to=to: a.astype(to) * b + c, (kind, kind, wide), wide)
        _define(
            f"mul.hi.{kind}", lambda a, b, to=to, n=bits: (a.astype(to) * b >> to.type(n)).astype(a.dtype), (kind,) * 2
        )
    for kind in ("s16", "u16"):
        _define(f"add.{kind}x2", _in_halves(np.add), ("b32", "b32"))
    _define("min.relu.s32", lambda a, b: np.maximum(np.minimum(a, b), 0), ("s32", "s32"))
    for kind in ("s32", "u32", "s64", "u64"):
        _define(f"bfe.{kind}", _field, (kind, "u32", "u32"))


def _define_bits() -> None:
    for width in (16, 32, 64):
        kind = f"b{width}"
        for name, function in LOGIC.items():
            _define(f"{name}.{kind}", function, (kind, kind))
        _define(f"not.{kind}", np.invert, kind)
        _define(f"shl.{kind}", _left, (kind, "u32"))
        _define(f"shr.{kind}", _right, (kind, "u32"))
        _define(f"setp.eq.{kind}", np.equal, (kind, kind), "pred")
        _define(f"setp.ne.{kind}", np.not_equal, (kind, kind), "pred")
    for name, function in LOGIC.items():
        _define(f"{name}.pred", function, ("pred", "pred"))
    _define("not.pred", np.invert, "pred")
    for kind in ("pred", "b16", "u16", "b32", "u32", "f32", "b64", "u64"):
        _define(f"mov.{kind}", lambda x: x, kind)
    for kind in ("b16", "b32", "f32", "b64"):
        _define(f"selp.{kind}", lambda a, b, p: np.where(p, a, b), (kind, kind, "pred"))
    for kind in ("b32", "b64"):
        _define(f"popc.{kind}", lambda x: np.bitwise_count(x).astype(np.uint32), kind, "b32")
    _define("lop3.b32", _looked_up, ("b32",) * 4)
    _define("prmt.b32", _permuted, ("b32",) * 3)
    _define("shf.l.wrap.b32", _funnel_left, ("b32",) * 3)
    _define("shf.r.wrap.b32", _funnel_right, ("b32",) * 3)


def _define_floats() -> None:
    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        _define(f"{name}.f32", function, ("f32", "f32"))  # which ptxas may fuse, and with the rounding must not
        _define(f"{name}.rn.f32", function, ("f32", "f32"))
    _define("div.rn.f32", np.divide, ("f32", "f32"))
    _define("div.full.f32", np.divide, ("f32", "f32"))
    _define("sqrt.rn.f32", np.sqrt, "f32")
    _define("min.f32", np.fmin, ("f32", "f32"))  # of a number and NaN, the number
    _define("max.f32", np.fmax, ("f32", "f32"))
    _define("min.bf16", _in_float32(np.fmin), ("bf16", "bf16"))
    _define("max.bf16", _in_float32(np.fmax), ("bf16", "bf16"))
    _define("min.f16", np.fmin, ("f16", "f16"))
    _define("max.f16", np.fmax, ("f16", "f16"))
    _define("neg.f32", np.negative, "f32")
    _define("abs.f32", np.abs, "f32")
    _define("fma.rn.f32", _fused, ("f32",) * 3)
    _define("fma.rn.ftz.f32", _flushing(_fused), ("f32",) * 3)
    _define("ex2.approx.f32", np.exp2, "f32")
    _define("ex2.approx.ftz.f32", _flushing(np.exp2), "f32")
    _define("mul.bf16", _in_float32(np.multiply), ("bf16", "bf16"))
    _define("mul.f16", np.multiply, ("f16", "f16"))
    _define("fma.rn.bf16", _in_float32(lambda a, b, c: a * b + c), ("bf16",) * 3)
    for kind in ("bf16", "f16"):
        _define(f"mul.{kind}x2", _packed(kind, np.multiply), ("b32",) * 2)
        _define(f"fma.rn.{kind}x2", _packed(kind, lambda a, b, c: a * b + c), ("b32",) * 3)
    for name, function in COMPARISONS.items():
        _define(f"setp.{name}.f16", _compared(function, False), ("f16", "f16"), "pred")
        ordered = _compared(function, False)
        _define(f"setp.{name}.bf16", lambda a, b, f=ordered: f(widened(a), widened(b)), ("bf16", "bf16"), "pred")
        _define(f"setp.{name}.f32", _compared(function, False), ("f32", "f32"), "pred")
        _define(f"setp.{name}u.f32", _compared(function, True), ("f32", "f32"), "pred")


def _define_conversions() -> None:
    words = {kind: DTYPES[kind] for kind in WORDS}
    for source in WORDS:
        for result, to in words.items():
            _define(f"cvt.{result}.{source}", _converted(to), source, result)
        _define(f"cvt.rn.f32.{source}", _converted(DTYPES["f32"]), source, "f32")
    for result, to in words.items():
        for mode, round_ in (("rzi", np.trunc), ("rni", np.rint)):
            _define(f"cvt.{mode}.{result}.f32", _to_integer(round_, to), "f32", result)
    _define("cvt.f32.bf16", widened, "bf16", "f32")
    _define("cvt.f32.f16", _converted(DTYPES["f32"]), "f16", "f32")
    _define("cvt.rn.bf16.f32", bf16, "f32", "bf16")
    _define("cvt.rn.f16.f32", lambda x: x.astype(np.float16), "f32", "f16")
    # the first operand is the high half
    _define("cvt.rn.bf16x2.f32", lambda a, b: joined(bf16(b), bf16(a)), ("f32", "f32"), "b32")
    _define("cvt.rn.f16x2.f32", lambda a, b: joined(f16(b), f16(a)), ("f32", "f32"), "b32")


def unpacking(kind: str, count: int) -> Operation:
    """`mov.b32 {%rs1, %rs2}, %r1;`: the parts of a word, the lowest first."""
    part = 8 * DTYPES[kind].itemsize // count
    to = UNSIGNED[part // 8]
    return Operation(
        lambda x: [(x >> x.dtype.type(part * place)).astype(to) for place in range(count)],
        (kind,),
        (f"b{part}",) * count,
    )


def packing(kind: str, count: int) -> Operation:
    """`mov.b32 %r1, {%rs1, %rs2};`"""
    whole, part = DTYPES[kind], 8 * DTYPES[kind].itemsize // count

    def pack(*parts):
        return sum((x.astype(whole) << whole.type(part * place) for place, x in enumerate(parts)), whole.type(0))

    return Operation(pack, (f"b{part}",) * count, (kind,))


_define_integers()
_define_bits()
_define_floats()
_define_conversions()
