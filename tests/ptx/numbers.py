"""PTX types as numpy arrays, and the 16-bit floats."""

from __future__ import annotations

import re

import numpy as np

from .faults import Unknown

INTEGERS = {
    **{f"u{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
}
DTYPES = {
    **INTEGERS,
    **{f"b{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    "pred": np.dtype(bool),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),  # numpy has none: `widened` and `bf16` convert
    "bf16x2": np.dtype(np.uint32),
    "f16x2": np.dtype(np.uint32),
}
UNSIGNED = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
LEAST_NORMAL = np.float32(2.0**-126)


def dtype(name: str) -> np.dtype:
    """The dtype of a PTX type."""
    if name not in DTYPES:
        raise Unknown(f"type .{name}")
    return DTYPES[name]


def literal(text: str, to: np.dtype) -> np.ndarray | None:
    """An immediate operand of a type, as an array of no dimensions; None for what is no number."""
    if floating := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return np.array(int(floating[1], 16), np.uint32).view(to)
    if not re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return None
    value = int(text.rstrip("U"), 0)
    if to.kind == "b":
        return np.array(value != 0)
    return np.array(value % (1 << 8 * to.itemsize), UNSIGNED[to.itemsize]).view(to)


def widened(x: np.ndarray) -> np.ndarray:
    """float32 of the bits of bfloat16."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16(x: np.ndarray) -> np.ndarray:
    """Bits of the bfloat16 nearest to float32, halves to the even one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def f16(x: np.ndarray) -> np.ndarray:
    """Bits of the float16 nearest to a float."""
    return np.asarray(x).astype(np.float16).view(np.uint16)


def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The low and the high 16 bits of 32."""
    return x.astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)


def joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """32 bits of two times 16."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def floats(bits: np.ndarray, kind: str) -> np.ndarray:
    """float32 of the bits of `bf16` or `f16`."""
    return widened(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 as zeros of their sign (.ftz)."""
    return np.where(np.abs(x) < LEAST_NORMAL, np.copysign(np.float32(0), x), x)
