"""The kernels without one of their barriers or waits: each removal is noticed, or `HARMLESS` says why it is not.

A reason holds only for what a case executes: there, the emulator has found that no warp touches what it should not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from kvsurgery.templates import kv_decode  # noqa: E402
from tests.helpers import kernel_cases  # noqa: E402
from tests.helpers.kernel_cases import FULL, Compact, Decode, Packed, Prefill, Quantization  # noqa: E402
from tests.ptx.faults import Fault  # noqa: E402
from tests.ptx.launches import install  # noqa: E402
from tests.ptx.parser import Kernel  # noqa: E402

OLDEST = triton.__version__.startswith("3.6.")
ALL = os.environ.get("PTX_CASES") == "all"
SYNCHRONIZES = re.compile(r"bar\.sync|cp\.async\.wait_group|wgmma\.wait_group\.sync\.aligned")
SHARED = re.compile(r"(ld|st)\.shared.*|(ld|st)matrix.*|cp\.async\.c[ag].*|wgmma\.mma_async.*|ret|bra.*")
KINDS = [FULL, (4, 60, 60)]

# a case in which every loop of its kernels runs twice or more; the second one has more rows than a warp counts
CASES = [
    (80, "check_decode", (Decode(KINDS, 4, 128, [1400, 33, 40], 24),)),
    (80, "check_decode", (Decode([*KINDS, (4, 9, 9)], 1, 16, [5300, 33] + [0, 5] * 21, 60),)),
    (90, "check_prefill", (Prefill(100, 140, 4, 64),)),
    (80, "check_flush", (Quantization(4), 128)),
    (80, "check_append", (2, 2)),
]
REST = [
    # with 32 programs some have slots of two rows, with 40 a row's parts take two rounds of the kernel that combines
    (
        80,
        "check_packed",
        *((Packed(Quantization(4), 2, KINDS[1:], 4, 128, [5300], programs),) for programs in (32, 40)),
    ),
    (
        80,
        "check_packed",
        (Packed(Quantization(2, "per-token", 32), 1, KINDS, 4, 128, [900, 600], 2),),
        # whose row's parts take several rounds of the kernel that combines
        (Packed(Quantization(2, "per-token", 32), 1, [], 4, 128, [2900], 40),),
    ),
    (80, "check_flush", (Quantization(4, "per-token", residual=10), 96)),
    (80, "check_compact", (Compact((400, 100), 523, 128, [0], Quantization(8)),)),
    (80, "check_prefill", (Prefill(100, 140, 4, 64),)),
    (90, "check_prefill", (Prefill(500, 130, 1, 64, sink=4, recent=65),)),
    (90, "check_decode", (Decode(KINDS, 4, 128, [1400, 33, 40], 24),)),
    (80, "check_packed", (Packed(Quantization(4), 2, [FULL], 1, 16, [5300, 130] + [0, 300] * 22, 200),)),
]


def _between(kernel: Kernel, number: int, before: str, after: str) -> bool:
    """Whether the accesses to shared memory next to an instruction are of these kinds, without a branch in between."""
    kinds = [each.opcode for each in kernel.instructions]
    earlier = next((kind for kind in reversed(kinds[:number]) if SHARED.fullmatch(kind)), "")
    later = next((kind for kind in kinds[number + 1 :] if SHARED.fullmatch(kind)), "")
    return bool(re.match(before, earlier) and re.match(after, later))


HARMLESS: dict[str, Callable[[Kernel, int], bool]] = {
    "copies before and after it: the first stages of a pipeline are filled one after the other, each its own buffer": (
        lambda kernel, number: _between(kernel, number, r"cp\.async", r"cp\.async")
    ),
    "before copies to a buffer that was read a round ago: the barrier after this round's wait lies in between": (
        lambda kernel, number: (
            kernel.instructions[number].opcode == "bar.sync" and _between(kernel, number, r"wgmma", r"cp\.async|bra")
        )
    ),
    "a warp stores where it alone has loaded: lanes exchange what they hold, those of one warp among themselves": (
        lambda kernel, number: _between(kernel, number, r"ld\.shared", r"st\.shared")
    ),
    "a warp copies to where it alone has loaded: a row's result is exchanged in the first buffer of the next row": (
        lambda kernel, number: kernel.name == "_decode_kernel" and _between(kernel, number, r"bra", r"cp\.async")
    ),
    "between the two halves of planning: the largest of all ends takes a barrier after they were stored": (
        lambda kernel, number: (
            kernel.name == "_plan_kernel" and kernel.instructions[number].source.startswith("kv_decode.py")
        )
    ),
    "the wait after a loop whose last round starts no copy, and its barrier: what is written next lies elsewhere": (
        lambda kernel, number: (
            any(each.opcode == "cp.async.wait_group" for each in kernel.instructions[number - 1 : number + 1])
            and _between(kernel, number, "", r"st|ret")
        )
    ),
}


def without(kernel: Kernel, number: int) -> Kernel:
    """A kernel that lacks one of its instructions."""
    instructions = kernel.instructions[:number] + kernel.instructions[number + 1 :]
    labels = {label: start - (start > number) for label, start in kernel.labels.items()}
    return replace(kernel, instructions=instructions, labels=labels)


@pytest.mark.skipif(not (OLDEST or ALL), reason="the oldest Triton's code has its barriers removed")
@pytest.mark.parametrize(
    ("target", "check", "cases"),
    [pytest.param(*of[:2], of[2:], id=f"sm{of[0]}-{of[1]}-{of[2][0]}"[:80]) for of in CASES + REST * ALL],
)
def test_every_barrier_and_wait_counts(target: int, check: str, cases: tuple, monkeypatch, tmp_path) -> None:
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(kv_decode, "PLANNED", 128)  # segments of a round: many rows take two
    emulator, kernels = install(monkeypatch, str(tmp_path), target), {}

    def run() -> None:
        for case in cases:  # which run the same code
            getattr(kernel_cases, check)(*case, torch.bfloat16, "cpu")

    def keep(kernel: Kernel) -> Kernel:
        return kernels.setdefault(kernel.name, kernel)

    emulator.changed = keep
    run()
    executed = set(emulator.executed)
    unnoticed, noticed = [], 0
    if check == "check_append":  # which attends too
        kernels = {name: kernel for name, kernel in kernels.items() if name == "_append_kernel"}
    for name, kernel in kernels.items():
        for number, instruction in enumerate(kernel.instructions):
            if not SYNCHRONIZES.fullmatch(instruction.opcode):
                continue
            mutant = without(kernel, number)
            emulator.changed = lambda own, mutant=mutant: mutant if own.name == mutant.name else own
            try:
                run()
            except (Fault, AssertionError):
                noticed += 1
                continue
            reasons = (reason for reason, holds in HARMLESS.items() if holds(kernel, number))
            reason = next(reasons, None) if id(instruction) in executed else None
            print(f"{name} {instruction.source} {instruction.text}: {reason or 'unnoticed'}")
            if reason is None:
                unnoticed.append(f"{name}, instruction {number} at {instruction.source}: {instruction.text}")
    torch.use_deterministic_algorithms(False)
    print(f"{noticed} removals noticed")
    assert noticed
    assert not unnoticed, "\n".join(unnoticed)
