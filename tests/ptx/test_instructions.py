"""Each instruction against values that were computed by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.ptx.arithmetic import COMPARISONS, OPERATIONS, WORDS
from tests.ptx.effects import EFFECTS
from tests.ptx.faults import OutOfBounds, Unknown
from tests.ptx.lanes import WARP
from tests.ptx.small_kernels import execute, kernel, on_lanes

INF, NAN = np.inf, np.nan
SIGNED = [kind for kind in WORDS if kind[0] == "s"]
BITS = ("b16", "b32", "b64")
HOLDS = {"eq": (0, 1, 0), "ne": (1, 0, 1), "lt": (1, 0, 0), "le": (1, 1, 0), "gt": (0, 0, 1), "ge": (0, 1, 1)}
ONE, TWO, THREE = 0x3F80, 0x4000, 0x4040  # of bfloat16
HALF_ONE, HALF_TWO, HALF_THREE = 0x3C00, 0x4000, 0x4200  # of float16

CASES: list[tuple[str, list[list], list]] = []


def case(opcode: str, *sources: list, gives: list) -> None:
    CASES.append((opcode, list(sources), gives))


for kind in WORDS:  # what does not depend on signs and widths
    case(f"add.{kind}", [7, 40], [2, 3], gives=[9, 43])
    case(f"sub.{kind}", [7, 40], [2, 3], gives=[5, 37])
    case(f"mul.lo.{kind}", [7, 40], [2, 3], gives=[14, 120])
    case(f"div.{kind}", [7, 40], [2, 3], gives=[3, 13])
    case(f"rem.{kind}", [7, 40], [2, 3], gives=[1, 1])
    case(f"min.{kind}", [7, 2], [2, 7], gives=[2, 2])
    case(f"max.{kind}", [7, 2], [2, 7], gives=[7, 7])
    case(f"mad.lo.{kind}", [7], [2], [5], gives=[19])
    case(f"shr.{kind}", [40, 40, 40], [3, 1, 200], gives=[5, 20, 0])
    for other in WORDS:
        case(f"cvt.{other}.{kind}", [7, 100], gives=[7, 100])
    case(f"cvt.rn.f32.{kind}", [7, 100], gives=[7.0, 100.0])
    case(f"cvt.rzi.{kind}.f32", [7.9, 0.5, NAN], gives=[7, 0, 0])
    case(f"cvt.rni.{kind}.f32", [7.9, 0.5, 1.5, 2.5], gives=[8, 0, 2, 2])
    for name in COMPARISONS:
        case(f"setp.{name}.{kind}", [1, 2, 3], [2, 2, 2], gives=list(HOLDS[name]))
for kind in SIGNED:
    case(f"neg.{kind}", [7, -3], gives=[-7, 3])
    case(f"abs.{kind}", [7, -3], gives=[7, 3])
    case(f"div.{kind}", [-7, 7, -7], [2, -2, -2], gives=[-3, -3, 3])
    case(f"rem.{kind}", [-7, 7, -7], [2, -2, -2], gives=[-1, 1, -1])
    case(f"shr.{kind}", [-40, -40], [3, 200], gives=[-5, -1])
    case(f"min.{kind}", [-1], [1], gives=[-1])
    case(f"setp.lt.{kind}", [-1], [1], gives=[1])
for kind in BITS:
    case(f"and.{kind}", [0b1100], [0b1010], gives=[0b1000])
    case(f"or.{kind}", [0b1100], [0b1010], gives=[0b1110])
    case(f"xor.{kind}", [0b1100], [0b1010], gives=[0b0110])
    case(f"not.{kind}", [0], gives=[2 ** int(kind[1:]) - 1])
    case(f"shl.{kind}", [5, 5, 5], [3, int(kind[1:]), 200], gives=[40, 0, 0])
    case(f"shr.{kind}", [40, 40], [3, 200], gives=[5, 0])
    case(f"setp.eq.{kind}", [3, 4], [3, 3], gives=[1, 0])
    case(f"setp.ne.{kind}", [3, 4], [3, 3], gives=[0, 1])
    case(f"mov.{kind}", [3, 4], gives=[3, 4])
    case(f"mov.u{kind[1:]}", [3, 4], gives=[3, 4])
    case(f"selp.{kind}", [3, 4], [5, 6], [1, 0], gives=[3, 6])
case("mov.f32", [1.5], gives=[1.5])
case("mov.pred", [1, 0], gives=[1, 0])
case("selp.f32", [1.5, 2.5], [3.0, 4.0], [1, 0], gives=[1.5, 4.0])
case("and.pred", [1, 1, 0], [1, 0, 0], gives=[1, 0, 0])
case("or.pred", [1, 1, 0], [1, 0, 0], gives=[1, 1, 0])
case("xor.pred", [1, 1, 0], [1, 0, 0], gives=[0, 1, 0])
case("not.pred", [1, 0], gives=[0, 1])

case("add.s32", [2**31 - 1], [1], gives=[-(2**31)])
case("sub.u32", [0], [1], gives=[2**32 - 1])
case("mul.lo.s32", [65537], [65537], gives=[131073])
case("div.u32", [5], [0], gives=[2**32 - 1])
case("div.s32", [5], [0], gives=[-1])
case("setp.lt.u32", [2**32 - 1], [1], gives=[0])
case("mul.wide.s16", [-300], [300], gives=[-90000])
case("mul.wide.u16", [300], [300], gives=[90000])
case("mul.wide.s32", [-(2**20)], [2**20], gives=[-(2**40)])
case("mul.wide.u32", [2**31], [4], gives=[2**33])
case("mad.wide.s16", [-300], [300], [1], gives=[-89999])
case("mad.wide.u16", [300], [300], [1], gives=[90001])
case("mad.wide.s32", [-(2**20)], [2**20], [1], gives=[1 - 2**40])
case("mad.wide.u32", [2**31], [4], [1], gives=[2**33 + 1])
case("mul.hi.s16", [-300], [300], gives=[-2])  # -90000 / 65536 = -1.4
case("mul.hi.u16", [300], [300], gives=[1])
case("mul.hi.s32", [-(2**20)], [2**20], gives=[-256])
case("mul.hi.u32", [2**31], [4], gives=[2])
case("min.relu.s32", [-5, 3, 9], [7, 7, 7], gives=[0, 3, 7])
for kind in ("s32", "u32", "s64", "u64"):
    case(f"bfe.{kind}", [0b110100], [2], [3], gives=[0b101 - 8 if kind[0] == "s" else 0b101])
    case(f"bfe.{kind}", [0b110100], [2], [0], gives=[0])
for kind in ("b32", "b64"):
    case(f"popc.{kind}", [0, 0b1011, 2**31 + 1], gives=[0, 3, 2])
case("popc.b64", [2**63 + 2**40], gives=[2])
case("lop3.b32", [0xF0], [0xCC], [0xAA], [0xEA], gives=[0xEA])  # the table is what a, b and c of these make
case("lop3.b32", [0xF0], [0xCC], [0xAA], [0x6A], gives=[0x6A])
case("prmt.b32", [0x33221100], [0x77665544], [0x7410], gives=[0x77441100])
case("prmt.b32", [0x33221180], [0x77665544], [0x88F0], gives=[0xFFFF0080])
case("shf.l.wrap.b32", [0x80000001], [1], [1], gives=[3])
case("shf.r.wrap.b32", [2], [1], [33], gives=[0x80000001])

for kind in ("s16x2", "u16x2"):
    case(f"add.{kind}", [0x0001FFFF, 0x7FFF0002], [0x00030002, 0x00010005], gives=[0x00040001, 0x80000007])

for rounding in ("", ".rn"):
    case(f"add{rounding}.f32", [1.5], [2.25], gives=[3.75])
    case(f"sub{rounding}.f32", [1.5], [2.25], gives=[-0.75])
    case(f"mul{rounding}.f32", [1.5], [-2.0], gives=[-3.0])
case("mul.f32", [1.5], [2.5], gives=[3.75])
case("div.rn.f32", [1.0, 1.0], [4.0, 0.0], gives=[0.25, INF])
case("div.full.f32", [1.0], [4.0], gives=[0.25])
case("sqrt.rn.f32", [2.25, 0.0, -1.0], gives=[1.5, 0.0, NAN])
case("min.f32", [1.0, NAN], [2.0, 2.0], gives=[1.0, 2.0])
case("max.f32", [1.0, NAN], [2.0, 2.0], gives=[2.0, 2.0])
case("neg.f32", [1.5, 0.0], gives=[-1.5, -0.0])
case("abs.f32", [-1.5], gives=[1.5])
# (1 + 2^-12)^2 - (1 + 2^-11) is 2^-24: none of it is left where the product is rounded first
case("fma.rn.f32", [1 + 2.0**-12], [1 + 2.0**-12], [-(1 + 2.0**-11)], gives=[2.0**-24])
case("fma.rn.ftz.f32", [2.0**-100, 2.0**-130], [2.0**-30, 1.0], [0.0, 0.0], gives=[0.0, 0.0])
case("ex2.approx.f32", [3.0, -1.0, -INF], gives=[8.0, 0.5, 0.0])
case("ex2.approx.ftz.f32", [3.0, -140.0, -INF], gives=[8.0, 0.0, 0.0])
case("min.bf16", [ONE, 0x7FC0], [TWO, TWO], gives=[ONE, TWO])
case("max.bf16", [ONE, 0x7FC0], [TWO, TWO], gives=[TWO, TWO])
case("min.f16", [1.0, NAN], [2.0, 2.0], gives=[1.0, 2.0])
case("max.f16", [1.0, NAN], [2.0, 2.0], gives=[2.0, 2.0])
case("mul.bf16", [THREE], [TWO], gives=[0x40C0])
case("mul.f16", [3.0, 255.0], [2.0, 3e-5], gives=[6.0, np.float16(255.0) * np.float16(3e-5)])
case("mul.bf16x2", [TWO << 16 | THREE], [THREE << 16 | TWO], gives=[0x40C0 << 16 | 0x40C0])
case("mul.f16x2", [HALF_TWO << 16 | HALF_ONE], [HALF_THREE << 16 | HALF_TWO], gives=[0x4600 << 16 | HALF_TWO])
case("fma.rn.bf16", [THREE, 0x00FF], [TWO, 0x6000], [ONE, 0], gives=[0x40E0, 0x217F])  # 255 * 2 ** (65 - 133)
case("fma.rn.bf16x2", [TWO << 16 | ONE], [THREE << 16 | TWO], [ONE << 16 | ONE], gives=[0x40E0 << 16 | THREE])
case("fma.rn.f16x2", [HALF_TWO << 16 | HALF_ONE], [HALF_THREE << 16 | HALF_TWO], [0], gives=[0x4600 << 16 | HALF_TWO])
for name in COMPARISONS:
    case(f"setp.{name}.f32", [1, 2, 3, NAN], [2, 2, 2, 2], gives=[*HOLDS[name], 0])
    case(f"setp.{name}u.f32", [1, 2, 3, NAN], [2, 2, 2, 2], gives=[*HOLDS[name], 1])
    case(f"setp.{name}.f16", [1, 2, 3, NAN], [2, 2, 2, 2], gives=[*HOLDS[name], 0])
    case(f"setp.{name}.bf16", [ONE, TWO, THREE, 0x7FC0], [TWO] * 4, gives=[*HOLDS[name], 0])
case("cvt.s64.s32", [-1], gives=[-1])
case("cvt.u64.u32", [2**32 - 1], gives=[2**32 - 1])
case("cvt.u32.u64", [2**40 + 5], gives=[5])
case("cvt.rzi.s32.f32", [-7.9, 1e20], gives=[-7, 2**31 - 1])
case("cvt.rzi.u32.f32", [-7.9], gives=[0])
case("cvt.f32.bf16", [ONE, 0xC040], gives=[1.0, -3.0])
case("cvt.f32.f16", [1.5], gives=[1.5])
# halfway between two neighbors the even one: 1 + 2^-8 becomes 1, and 1 + 3 * 2^-8 becomes 1 + 2^-6
case("cvt.rn.bf16.f32", [1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, INF], gives=[ONE, ONE, ONE + 2, 0x7F80])
case("cvt.rn.f16.f32", [1.0, 1 + 2.0**-11, 65536.0], gives=[1.0, 1.0, INF])
case("cvt.rn.bf16x2.f32", [1.0], [2.0], gives=[ONE << 16 | TWO])
case("cvt.rn.f16x2.f32", [1.0], [2.0], gives=[HALF_ONE << 16 | HALF_TWO])


@pytest.mark.parametrize("opcode", sorted(OPERATIONS))
def test_operation(opcode: str) -> None:
    """Alone, and repeated so that equal instructions run together."""
    operation = OPERATIONS[opcode]
    own = [(sources, gives) for name, sources, gives in CASES if name == opcode]
    assert own, "no case"
    for sources, gives in own:
        typed = list(zip(operation.sources, sources, strict=True))
        operands = ", ".join(f"${letter}" for letter in "abcd"[: len(typed)])
        twice = {"pred": "%p70", "16": "%h70", "32": "%r70", "64": "%d70"}
        kind = operation.results[0]
        other = twice[kind if kind == "pred" else {"bf16": "16", "bf16x2": "32"}.get(kind, kind[1:])]
        for code in (f"{opcode} $x, {operands};", f"{opcode} {other}, {operands};\n{opcode} $x, {operands};"):
            found = on_lanes(code, typed, kind)
            np.testing.assert_array_equal(found[: len(gives)], np.array(gives, found.dtype))


def test_packing_and_unpacking() -> None:
    code = "mov.b32 {%h1, %h2}, $a;\nmov.b32 $x, {%h2, %h1};"
    assert on_lanes(code, [("b32", [0x00020001])], "b32")[0] == 0x00010002
    code = "mov.b64 {%r1, %r2}, $a;\nmov.b64 $x, {%r2, %r1};"
    assert on_lanes(code, [("b64", [5 << 32 | 7])], "b64")[0] == 7 << 32 | 5


def test_operands() -> None:
    """Immediates, special registers, and a guard that keeps what a register held."""
    assert on_lanes("mov.b32 $x, 0f3FC00000;", [], "f32")[0] == 1.5
    assert on_lanes("add.s32 $x, %laneid, -1;", [], "s32").tolist() == list(range(-1, 31))
    assert on_lanes("mov.u32 $x, %tid.x;", [], "u32")[31] == 31
    assert on_lanes("mov.u32 $x, %ctaid.x;", [], "u32")[31] == 0
    assert on_lanes("add.s32 $x, %nctaid.x, %ntid.x;", [], "u32")[0] == 33
    code = "mov.b32 $x, 5;\nsetp.lt.u32 %p1, $a, 2;\n@%p1 add.s32 $x, $x, $a;\n@!%p1 mov.b32 $x, 9;"
    assert on_lanes(code, [("b32", [0, 1, 2, 3])], "u32")[:4].tolist() == [5, 6, 9, 9]
    code = "{ .reg .b32 t; mov.b32 t, 3; { .reg .b32 t; mov.b32 t, 4; } add.s32 $x, t, 1; }"
    assert on_lanes(code, [], "u32")[0] == 4


def test_branches() -> None:
    """Lanes go round a loop by as many times as their number, and meet again."""
    code = """mov.b32 $x, 0;
    mov.b32 %r1, 0;
    again:
    setp.ge.u32 %p1, %r1, %r0;
    @%p1 bra done;
    add.s32 $x, $x, 2;
    add.s32 %r1, %r1, 1;
    bra.uni again;
    done:
    add.s32 $x, $x, 1;"""
    assert on_lanes(code, [], "u32").tolist() == [2 * lane + 1 for lane in range(WARP)]


LANES = [("u32", list(range(100, 132)))]
SHUFFLES = [
    ("shfl.sync.bfly.b32 $x, $a, 1, 31, -1;", [101, 100, 103, 102]),
    ("shfl.sync.up.b32 $x, $a, 2, 0, -1;", [100, 101, 100, 101]),
    ("shfl.sync.down.b32 $x, $a, 3, 31, -1;", [103, 104, 105, 106]),
    ("shfl.sync.idx.b32 $x, $a, 7, 31, -1;", [107] * 4),
    ("shfl.sync.bfly.b32 $x, $a, 2, 7199, -1;", [102, 103, 100, 101]),  # in parts of 4 lanes
    ("shfl.sync.up.b32 %r9|%p1, $a, 2, 0, -1;\nselp.b32 $x, 1, 0, %p1;", [0, 0, 1, 1]),
    ("redux.sync.add.s32 $x, $a, -1;", [sum(range(100, 132))] * 4),
    ("redux.sync.min.u32 $x, $a, -1;", [100] * 4),
    ("redux.sync.max.s32 $x, $a, -1;", [131] * 4),
    ("redux.sync.or.b32 $x, $a, -1;", [0xFF] * 4),
    ("redux.sync.and.b32 $x, $a, -1;", [0] * 4),
    ("redux.sync.xor.b32 $x, $a, -1;", [0] * 4),
]


@pytest.mark.parametrize(
    ("code", "gives"), SHUFFLES, ids=[code.split()[0] + str(at) for at, (code, _) in enumerate(SHUFFLES)]
)
def test_exchanges_in_a_warp(code: str, gives: list[int]) -> None:
    assert on_lanes(code, LANES, "u32")[:4].tolist() == gives
    if ".up" in code:
        assert on_lanes(code.replace("2, 0,", "40, 0,"), LANES, "u32")[31] in (131, 0)


def test_loads_and_stores() -> None:
    """Vectors, widths and offsets; what is 8 bit wide is extended by zeros."""
    source = np.arange(16, dtype=np.uint32) + 7
    body = """setp.ne.b32 %p1, %r0, 0;
    @%p1 ret;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d0+16];
    ld.global.v2.b32 {%r5, %r6}, [ %d0 + 8 ];
    ld.global.b64 {%d9}, [%d0];
    ld.global.b16 {%h1}, [%d0+4];
    st.shared.v2.b32 [%r0], {%r1, %r2};
    st.shared.b8 [%r0+8], %h1;
    st.shared.b16 [%r0+10], %h1;
    st.shared.b64 [%r0+16], %d9;
    ld.shared.v2.b32 {%r7, %r8}, [%r0];
    ld.shared.u8 %r9, [%r0+8];
    ld.shared.b16 %h2, [%r0+10];
    ld.shared.b64 %d10, [%r0+16];
    st.global.v4.b32 [%d1], {%r4, %r6, %r8, %r9};
    st.global.b64 [%d1+16], {%d10};
    st.global.b16 [%d1+24], {%h2};"""
    found = execute(kernel(body, 2), source, np.zeros(16, np.uint32))[1]
    assert found[:7].tolist() == [14, 10, 12, 8, 7, 8, 8]


def test_lanes_choose_a_parameter_by_its_address() -> None:
    body = """and.b32 %r1, %r0, 1;
    setp.eq.b32 %p1, %r1, 0;
    mov.b32 %r2, small_param_0;
    mov.b32 %r3, small_param_1;
    selp.b32 %r4, %r2, %r3, %p1;
    ld.param.b64 %d5, [%r4];
    mul.wide.u32 %d6, %r0, 4;
    add.s64 %d7, %d5, %d6;
    st.global.b32 [%d7], {%r0};"""
    even, odd = execute(kernel(body, 2), *np.full((2, 32), 99, np.uint32))
    assert even[:4].tolist() == [0, 99, 2, 99]
    assert odd[:4].tolist() == [99, 1, 99, 3]
    with pytest.raises(OutOfBounds, match="no parameter"):
        execute(kernel(body.replace("%r3, small_param_1", "%r3, 16"), 2), *np.full((2, 32), 99, np.uint32))


def test_a_copy_arrives_with_its_zeros() -> None:
    source = np.arange(256, dtype=np.uint32) + 1
    body = """shl.b32 %r1, %r0, 4;
    mul.wide.u32 %d9, %r0, 16;
    add.s64 %d5, %d0, %d9;
    cp.async.cg.shared.global [%r1], [%d5], 16, 8;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r1+512], [%d5], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1];
    ld.shared.b32 %r6, [%r1+512];
    add.s32 %r5, %r5, %r6;
    add.s64 %d6, %d1, %d9;
    st.global.v4.b32 [%d6], {%r2, %r3, %r4, %r5};"""
    found = execute(kernel(body, 2), source, np.zeros(256, np.uint32))[1].reshape(-1, 4)[:WARP]
    assert found.tolist() == [[4 * lane + 1, 4 * lane + 2, 0, 4 * lane + 1] for lane in range(WARP)]


def test_a_barrier_orders_two_warps() -> None:
    body = """shl.b32 %r1, %r0, 2;
    st.shared.b32 [%r1], %r0;
    bar.sync 0;
    xor.b32 %r2, %r1, 128;
    bar.warp.sync -1;
    ld.shared.b32 %r3, [%r2];
    mul.wide.u32 %d9, %r0, 4;
    add.s64 %d5, %d0, %d9;
    st.global.b32 [%d5], {%r3};"""
    found = execute(kernel(body, 1, threads=64), np.zeros(64, np.uint32))[0]
    assert found.tolist() == [*range(32, 64), *range(32)]


def _matrix_kernel(instructions: str) -> str:
    """Matrices of 16 bit from tensor 0 through shared memory; lane l's four registers go to tensor 1."""
    return kernel(
        f"""shl.b32 %r1, %r0, 4;
    mul.wide.u32 %d9, %r0, 16;
    add.s64 %d5, %d0, %d9;
    ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d5];
    st.shared.v4.b32 [%r1], {{%r2, %r3, %r4, %r5}};
    mov.b32 %r10, 0;
    mov.b32 %r11, 0;
    mov.b32 %r12, 0;
    mov.b32 %r13, 0;
    {instructions}
    add.s64 %d6, %d1, %d9;
    st.global.v4.b32 [%d6], {{%r10, %r11, %r12, %r13}};""",
        2,
    )


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_ldmatrix(count: int, transposed: str) -> None:
    """Matrix i's element (r, c) is 64 i + 8 r + c; lane 5 holds row 1, columns 2 and 3."""
    names = ", ".join(f"%r{10 + number}" for number in range(count))
    code = f"ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{names}}}, [%r1];"
    found = execute(_matrix_kernel(code), np.arange(256, dtype=np.uint16), np.zeros(256, np.uint16))[1]
    expected = [17, 25] if transposed else [10, 11]
    for number in range(4):
        values = [64 * number + value for value in expected] if number < count else [0, 0]
        assert found[8 * 5 + 2 * number : 8 * 5 + 2 * number + 2].tolist() == values


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_stmatrix(count: int, transposed: str) -> None:
    """The inverse: stored and read by rows, what lanes held is where `ldmatrix` takes it from."""
    names = ", ".join(f"%r{2 + number}" for number in range(count))
    code = f"""bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [%r1], {{{names}}};
    ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r1];"""
    source = np.zeros(256, np.uint16)
    source[8 * 5] = 77  # the low half of lane 5's first register: row 1, column 2 of matrix 0
    found = execute(_matrix_kernel(code), source, np.zeros(256, np.uint16))[1].reshape(32, 8)
    row, column = (2, 1) if transposed else (1, 2)
    assert found[row, column] == 77
    assert (found == 77).sum() == (1 if count == 4 or row * 8 + column >= 0 else 2) + (found[5, 0] == 77)


@pytest.mark.parametrize(("kind", "one"), [("bf16", ONE), ("f16", HALF_ONE)])
def test_mma(kind: str, one: int) -> None:
    """a[r, k] is 1 where r == k, b[k, n] is 1 where k == n + 8 and 2 where k == n, c is 10: d[r, n] = b[r, n] + 10."""
    two = TWO
    body = f"""shr.u32 %r1, %r0, 2;
    and.b32 %r2, %r0, 3;
    shl.b32 %r2, %r2, 1;
    setp.eq.s32 %p1, %r1, %r2;
    add.s32 %r3, %r2, 1;
    setp.eq.s32 %p2, %r1, %r3;
    selp.b32 %r4, {one}, 0, %p1;
    selp.b32 %r4, {one << 16}, %r4, %p2;
    selp.b32 %r5, {two}, 0, %p1;
    selp.b32 %r5, {two << 16}, %r5, %p2;
    mov.b32 %r7, 0;
    mov.b32 %r8, 0f41200000;
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r10, %r11, %r12, %r13}}, {{%r4, %r7, %r7, %r4}}, \
{{%r5, %r4}}, {{%r8, %r8, %r8, %r8}};
    mul.wide.u32 %d9, %r0, 16;
    add.s64 %d5, %d0, %d9;
    st.global.v4.b32 [%d5], {{%r10, %r11, %r12, %r13}};"""
    lanes = execute(kernel(body, 1), np.zeros(128, np.float32))[0].reshape(32, 4)
    for lane, values in enumerate(lanes.tolist()):
        row, column = lane // 4, lane % 4 * 2
        assert values == [
            10 + 2 * (row == column), 10 + 2 * (row == column + 1), 10 + (row == column), 10 + (row == column + 1)
        ]  # fmt: skip


def test_wgmma() -> None:
    """A column of b in shared memory, in blocks of 8 rows of 128 bytes that are swizzled; a in registers is 1.

    b[k, n] is 1 in the block of columns 8 to 15 where k is 0, so that d[r, n] is 1 there, and 2 after a second one.
    """
    body = """shl.b32 %r1, %r0, 5;
    mov.b32 %r2, 0;
    st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2};
    st.shared.v4.b32 [%r1+16], {%r2, %r2, %r2, %r2};
    bar.sync 0;
    setp.lt.u32 %p1, %r0, 8;
    shl.b32 %r3, %r0, 7;
    shl.b32 %r4, %r0, 4;
    add.s32 %r3, %r3, %r4;
    mov.b32 %r5, 16256;
    mov.b32 {%h1, %h2}, %r5;
    @%p1 st.shared.b16 [%r3+1024], %h1;
    bar.sync 0;
    fence.proxy.async.shared::cta;
    wgmma.fence.sync.aligned;
    mov.b32 %r6, 1065369472;
    mov.b64 %d5, 4611686293305294848;
    setp.ne.b32 %p2, %r0, %r0;
    MULTIPLY %p2, 1, 1, 0;
    MULTIPLY 1, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mul.wide.u32 %d9, %r0, 32;
    add.s64 %d6, %d0, %d9;
    st.global.v4.b32 [%d6], {%r10, %r11, %r12, %r13};
    st.global.v4.b32 [%d6+16], {%r14, %r15, %r16, %r17};"""
    results = "{%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}"
    multiply = f"wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {results}, {{%r6, %r6, %r6, %r6}}, %d5,"
    text = kernel(body.replace("MULTIPLY", multiply), 1, threads=128, target="sm_90a")
    found = execute(text, np.zeros(1024, np.float32), shared=4096)[0].reshape(128, 2, 4)
    assert (found[:, 0] == 0).all()  # columns 0 to 7
    assert (found[:, 1] == 2).all()


KNOWN_BY = {  # effects, and an instruction of a test here that each one runs
    "ld.param.b64", "ld.global.v4.b32", "st.global.v4.b32", "cp.async.cg.shared.global", "cp.async.commit_group",
    "cp.async.wait_group", "bar.sync", "bar.warp.sync", "shfl.sync.bfly.b32", "redux.sync.add.s32",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16", "stmatrix.sync.aligned.m8n8.x4.shared.b16",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16",
    "wgmma.commit_group.sync.aligned", "wgmma.wait_group.sync.aligned", "wgmma.fence.sync.aligned",
    "fence.proxy.async.shared::cta",
}  # fmt: skip


def test_every_effect_has_a_case() -> None:
    for pattern in EFFECTS:
        assert any(re.fullmatch(pattern, opcode) for opcode in KNOWN_BY), pattern


@pytest.mark.parametrize(
    "text", ["tan.approx.f32 %r1, %r0;", "add.sat.s32 %r1, %r0, %r0;", "ld.global.nc.b32 {%r1}, [%d0];"]
)
def test_an_unknown_instruction_is_named(text: str) -> None:
    with pytest.raises(Unknown, match=re.escape(text.split()[0])):
        execute(kernel(text, 1), np.zeros(32, np.uint32))
