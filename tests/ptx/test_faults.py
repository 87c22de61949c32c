"""What the machine reports: each kind of fault by a kernel that has it, and not by its sound neighbor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ptx import faults
from tests.ptx.machine import Machine
from tests.ptx.parser import parse
from tests.ptx.small_kernels import execute, kernel

MINE = "shl.b32 %r1, %r0, 2;\nst.shared.b32 [%r1], %r0;\n"  # each thread's own word of shared memory
OTHERS = "xor.b32 %r2, %r1, 128;\nld.shared.b32 %r3, [%r2];\n"  # that of a thread of the other warp
COPY = """shl.b32 %r1, %r0, 4;
mul.wide.u32 %d9, %r0, 16;
add.s64 %d5, %d0, %d9;
cp.async.cg.shared.global [%r1], [%d5], 16;
cp.async.commit_group;
"""
PER_THREAD = "mul.wide.u32 %d9, %r0, 4;\nadd.s64 %d5, %d0, %d9;\n"
GLOBAL_OTHERS = """setp.eq.s32 %p1, %ctaid.x, 0;
@%p1 st.global.b32 [%d5], {%r0};
xor.b64 %d6, %d9, 128;
add.s64 %d6, %d0, %d6;
@%p1 ld.global.b32 {%r5}, [%d6];
"""
PER_CTA = "mov.u32 %r4, %ctaid.x;\nmul.wide.u32 %d9, %r4, 4;\nadd.s64 %d5, %d0, %d9;\nsetp.eq.s32 %p1, %r0, 0;\n"

FAULTS = {
    "beyond a tensor": (faults.OutOfBounds, f"{PER_THREAD}ld.global.b32 {{%r1}}, [%d5+4];", PER_THREAD),
    "before a tensor": (faults.OutOfBounds, "st.global.b32 [%d0+-4], {%r0};", ""),
    "beyond shared memory": (faults.OutOfBounds, "mov.b32 %r9, 1024;\nst.shared.b32 [%r9], %r0;", MINE),
    "global address": (faults.Misaligned, "ld.global.b32 {%r1}, [%d0+2];", "ld.global.b32 {%r1}, [%d0+4];"),
    "shared address": (faults.Misaligned, f"{MINE}ld.shared.v2.b32 {{%r2, %r3}}, [%r1];", MINE),
    "nothing written": (faults.Uninitialized, "mov.b32 %r9, 0;\nld.shared.b32 %r1, [%r9];", ""),
    "copy not waited for": (faults.Uninitialized, f"{COPY}ld.shared.b32 %r3, [%r1];", COPY),
    "newest copy not waited for": (
        faults.Uninitialized,
        f"{COPY}cp.async.wait_group 1;\nld.shared.b32 %r3, [%r1];",
        f"{COPY}cp.async.commit_group;\ncp.async.wait_group 1;\nld.shared.b32 %r3, [%r1];",
    ),
    "read after write": (faults.Race, MINE + OTHERS, f"{MINE}bar.sync 0;\n{OTHERS}"),
    "write after read": (
        faults.Race,
        f"{MINE}bar.sync 0;\n{OTHERS}st.shared.b32 [%r1], %r3;",
        f"{MINE}bar.sync 0;\n{OTHERS}bar.sync 0;\nst.shared.b32 [%r1], %r3;",
    ),
    "write after write": (
        faults.Race,
        "mov.b32 %r9, 0;\nst.shared.b32 [%r9], %r0;",
        "mov.b32 %r9, 0;\nst.shared.b32 [%r9], 7;",  # the same value
    ),
    "copy over what is read": (
        faults.Race,
        f"{MINE}bar.sync 0;\n{OTHERS}{COPY}",
        f"{MINE}bar.sync 0;\n{OTHERS}bar.sync 0;\n{COPY}",
    ),
    "copy read by another warp": (
        faults.Race,
        f"{COPY}cp.async.wait_group 0;\nxor.b32 %r2, %r1, 512;\nld.shared.b32 %r3, [%r2];",
        f"{COPY}cp.async.wait_group 0;\nbar.sync 0;\nxor.b32 %r2, %r1, 512;\nld.shared.b32 %r3, [%r2];",
    ),
    "global write read by another warp": (
        faults.Race,
        f"{PER_THREAD}{GLOBAL_OTHERS}",
        f"{PER_THREAD}{GLOBAL_OTHERS}".replace("xor", "bar.sync 0;\nxor"),
    ),
    "CTAs write to the same place": (
        faults.Race,
        f"{PER_CTA}@%p1 st.global.b32 [%d0], {{%r4}};",
        f"{PER_CTA}@%p1 st.global.b32 [%d5], {{%r4}};",
    ),
    "a CTA reads what another one writes": (
        faults.Race,
        f"{PER_CTA}@%p1 st.global.b32 [%d5], {{%r4}};\n@%p1 ld.global.b32 {{%r5}}, [%d0];",
        f"{PER_CTA}@%p1 st.global.b32 [%d5], {{%r4}};\n@%p1 ld.global.b32 {{%r5}}, [%d5];",
    ),
    "barrier of some threads": (
        faults.Divergence,
        "setp.lt.s32 %p1, %r0, 32;\n@%p1 bra over;\nbar.sync 0;\nover:",
        "setp.lt.s32 %p1, %r0, 32;\n@%p1 ret;\nbar.sync 0;",  # those that are left
    ),
    "shuffle in a part of a warp": (
        faults.Divergence,
        "setp.lt.s32 %p1, %r0, 7;\n@%p1 bra over;\nshfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;\nover:",
        "setp.lt.s32 %p1, %r0, 32;\n@%p1 bra over;\nshfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;\nover:",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str) -> None:
    kind, faulty, sound = FAULTS[name]
    source = np.zeros(256, np.uint32)
    with pytest.raises(kind):
        execute(kernel(faulty, 1, threads=64), source[:64] if "tensor" in name else source, ctas=2)
    execute(kernel(sound, 1, threads=64), source, ctas=2)


def test_elements_between_rows_are_out_of_bounds() -> None:
    """A kernel may touch the elements of a tensor, not those that its strides step over."""
    whole = torch.zeros(4, 8, dtype=torch.int32)
    for column, raises in ((5, False), (6, True)):
        text = kernel(f"st.global.b32 [%d0+{4 * column}], {{5}};", 1)
        machine = Machine(parse(text), (1, 1, 1), [whole.data_ptr()], {"x": whole[:, :6]}, 16)
        if raises:
            with pytest.raises(faults.OutOfBounds, match="x"):
                machine.run()
        else:
            machine.run()
            assert whole[0, column] == 5


@pytest.mark.parametrize(
    ("target", "shared", "directives", "raises"),
    [
        ("sm_80", 99 * 1024, "", False),
        ("sm_80", 99 * 1024 + 1, "", True),
        ("sm_90a", 227 * 1024, "", False),
        ("sm_90a", 227 * 1024 + 1, "", True),
        ("sm_80", 0, ".maxnreg 128", False),
        ("sm_80", 0, ".maxnreg 129", True),  # of which 512 threads have 65,536 together
    ],
)
def test_limits(target: str, shared: int, directives: str, raises: bool) -> None:
    text = kernel("", 1, threads=512, target=target, directives=directives)
    if raises:
        with pytest.raises(faults.OverLimit):
            execute(text, np.zeros(1, np.uint32), shared=shared)
    else:
        execute(text, np.zeros(1, np.uint32), shared=shared)


def test_a_message_says_where() -> None:
    text = kernel("mov.b32 %r9, 0;\n.loc 1 41 3\nld.shared.b32 %r1, [%r9];", 1) + '.file 1 "/a/kv_decode.py"'
    with pytest.raises(faults.Fault, match=r"kv_decode.py:41: ld.shared.b32 %r1, \[%r9\] of small"):
        execute(text, np.zeros(1, np.uint32))


@pytest.mark.parametrize("place", range(3))
def test_a_product_that_has_not_ended(place: int) -> None:
    """wgmma: its registers hold nothing before the wait, and its operands may not change."""
    results = "{%r10, %r11, %r12, %r13}"
    lines = [
        "shl.b32 %r1, %r0, 4;",
        "st.shared.v4.b32 [%r1], {%r0, %r0, %r0, %r0};",
        "bar.sync 0;",
        "mov.b64 %d5, 4611686293305294848;",
        "mov.b32 %r2, 0;",
        f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {results}, {{%r2, %r2, %r2, %r2}}, %d5, 0, 1, 1, 0;",
        "wgmma.commit_group.sync.aligned;",
        *(["bar.sync 0;", "st.shared.b32 [%r1], 7;"] if place == 2 else []),
        *(["wgmma.wait_group.sync.aligned 0;"] if place else []),
        *[PER_THREAD, "st.global.b32 [%d5], {%r10};"],
    ]
    text = kernel("\n".join(lines), 1, threads=128, target="sm_90a")
    if place == 2:
        with pytest.raises(faults.Race, match="overwritten"):
            execute(text, np.zeros(128, np.float32), shared=4096)
    else:
        found = execute(text, np.zeros(128, np.float32), shared=4096)[0]
        assert np.isnan(found).all() if place == 0 else (found == 0).all()
