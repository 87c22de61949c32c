"""Kernels of a few instructions, written as PTX, for tests of what executes them."""

from __future__ import annotations

import numpy as np
import torch

from .lanes import WARP
from .machine import Machine
from .numbers import UNSIGNED, dtype
from .parser import parse

KINDS = {"pred": "p", "b16": "h", "b32": "r", "b64": "d"}


def kernel(body: str, tensors: int, threads: int = WARP, target: str = "sm_80", directives: str = "") -> str:
    """PTX of a body, with addresses of tensors in %d0 and on, and in %r0 the thread."""
    parameters = ",\n".join(f"\t.param .u64 .ptr .global .align 1 small_param_{number}" for number in range(tensors))
    declared = "\n".join(f".reg .{kind} %{letter}<99>;" for kind, letter in KINDS.items())
    loads = "\n".join(f"ld.param.b64 %d{number}, [small_param_{number}];" for number in range(tensors))
    return f"""
.version 8.7
.target {target}
.visible .entry small(
{parameters}
)
.reqntid {threads}
{directives}
{{
{declared}
{loads}
mov.u32 %r0, %tid.x;
{body}
ret;
}}
"""


def execute(text: str, *tensors: np.ndarray, ctas: int = 1, shared: int = 1024) -> list[np.ndarray]:
    """What a kernel leaves in copies of these arrays."""
    copies = [torch.from_numpy(each.copy().view(np.uint8)) for each in tensors]
    arguments = [each.data_ptr() for each in copies]
    names = {f"tensor{number}": each for number, each in enumerate(copies)}
    Machine(parse(text), (ctas, 1, 1), arguments, names, shared).run()
    return [copy.numpy().view(each.dtype) for copy, each in zip(copies, tensors, strict=True)]


def on_lanes(code: str, sources: list[tuple[str, list]], result: str) -> np.ndarray:
    """Run code of one warp that computes x (of a PTX type) of a, b, c, ...; a lane's own values, or everyone's one."""
    lines, arrays = [], []
    for number, (kind, values) in enumerate(sources):
        stored = dtype("b32") if kind == "pred" else dtype(kind)
        values = np.array(values).astype(stored) if kind != "pred" else np.array(values, np.uint32)
        arrays.append(np.resize(values, WARP))
        lines += _loaded(number, kind, stored.itemsize)
        code = _named(code, "abcdef"[number], f"%{KINDS[_bits(kind)]}{40 + number}")
    code = _named(code, "x", f"%{KINDS[_bits(result)]}50")
    size = 4 if result == "pred" else dtype(result).itemsize
    lines += [code]
    if result == "pred":
        lines.append("selp.b32 %r50, 1, 0, %p50;")
    place = len(sources)
    lines += [f"mul.wide.u32 %d60, %r0, {size};", f"add.s64 %d60, %d60, %d{place};"]
    lines.append(f"st.global.b{8 * size} [%d60], {{%{KINDS[f'b{8 * size}']}50}};")
    out = np.zeros(WARP, UNSIGNED[size])
    found = execute(kernel("\n".join(lines), place + 1), *arrays, out)[-1]
    return found != 0 if result == "pred" else found.view(dtype(result))


def _bits(kind: str) -> str:
    return kind if kind == "pred" else f"b{8 * dtype(kind).itemsize}"


def _loaded(number: int, kind: str, size: int) -> list[str]:
    bits = f"b{8 * size}"
    lines = [f"mul.wide.u32 %d60, %r0, {size};", f"add.s64 %d60, %d60, %d{number};"]
    lines.append(f"ld.global.{bits} {{%{KINDS[bits]}{40 + number}}}, [%d60];")
    if kind == "pred":
        lines.append(f"setp.ne.b32 %p{40 + number}, %r{40 + number}, 0;")
    return lines


def _named(code: str, letter: str, register: str) -> str:
    return code.replace(f"${letter}", register)
