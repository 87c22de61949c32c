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
from tests.helpers.cases import ALL  # noqa: E402
from tests.helpers.kernel_cases import (  # noqa: E402
    FULL,
    VALUE_NORM,
    Compact,
    Decode,
    Packed,
    Prefill,
    Quantization,
    Renew,
    Selection,
)
from tests.ptx.faults import Fault  # noqa: E402
from tests.ptx.launches import install  # noqa: E402
from tests.ptx.parser import Kernel  # noqa: E402

OLDEST = triton.__version__.startswith("3.6.")
SYNCHRONIZES = re.compile(r"bar\.sync|cp\.async\.wait_group|wgmma\.wait_group\.sync\.aligned")
SHARED = re.compile(r"(ld|st)\.shared.*|(ld|st)matrix.*|cp\.async\.c[ag].*|wgmma\.mma_async.*|ret|bra.*")
KINDS = [FULL, (4, 60, 60)]
TOKENS = Quantization(4, "per-token", 16, residual=0)

# a case in which every loop of its kernels runs twice or more; the second one has more rows than a warp counts
CASES = [
    (80, "check_decode", (Decode(KINDS, 4, 128, [1400, 33, 40], 24),)),
    (80, "check_decode", (Decode([*KINDS, (4, 9, 9)], 1, 16, [5300, 33] + [0, 5] * 21, 60),)),
    (90, "check_prefill", (Prefill(100, 140, 4, 64),)),
    (80, "check_flush", (Quantization(4), 128)),
    (80, "check_append", (2, 2)),
    (80, "check_renew", (Renew((100,), 200, 4, 80, [0, 190], Selection(20, 3, "max", 70)),)),
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
    (
        80,
        "check_packed",
        (Packed(Quantization(4, group_size=32), 1, KINDS, 8, 128, [900, 600], 2),),
        (Packed(Quantization(4, group_size=32), 1, [], 8, 128, [2900], 40),),
    ),
    (80, "check_flush", (Quantization(4, "per-token", residual=10), 96)),
    (80, "check_compact", (Compact((400, 100), 523, 128, [0], Quantization(8)),)),
    (80, "check_prefill", (Prefill(100, 140, 4, 64),)),
    (90, "check_prefill", (Prefill(500, 130, 1, 64, sink=4, recent=65),)),
    (90, "check_decode", (Decode(KINDS, 4, 128, [1400, 33, 40], 24),)),
    (80, "check_packed", (Packed(Quantization(4), 2, [FULL], 1, 16, [5300, 130] + [0, 300] * 22, 200),)),
    (
        *(80, "check_renew"),
        (Renew((300, 20), 420, 2, 128, [0], Selection(8, 3, "max", 40, VALUE_NORM), quantization=TOKENS),),
    ),
]


def _between(kernel: Kernel, number: int, before: str, after: str) -> bool:
    """Whether the accesses to shared memory next to an instruction are of these kinds, without a branch in between."""
    kinds = [each.opcode for each in kernel.instructions]
    earlier = next((kind for kind in reversed(kinds[:number]) if SHARED.fullmatch(kind)), "")
    later = next((kind for kind in kinds[number + 1 :] if SHARED.fullmatch(kind)), "")
    return bool(re.match(before, earlier) and re.match(after, later))


USES = {  # opcodes, by what they do to memory; what a copy or a product of matrices does ends with the wait for it
    "read shared": re.compile(r"ld\.shared.*|ldmatrix.*|wgmma.*"),
    "write shared": re.compile(r"st\.shared.*|stmatrix.*|cp\.async.*"),
    "read global": re.compile(r"(ld|atom|red)\.global.*|cp\.async\.c[ag].*"),
    "write global": re.compile(r"(st|atom|red)\.global.*"),
}


def _neighbors(kernel: Kernel) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Which instructions may come right before each, and right after it."""
    before, after = {}, {}
    for number, instruction in enumerate(kernel.instructions):
        jumps = instruction.opcode in ("bra", "bra.uni")
        goes_on = instruction.guard is not None or not (jumps or instruction.opcode == "ret")
        after[number] = [number + 1] * goes_on
        if jumps:
            after[number].append(kernel.labels[instruction.operands[0]])
        for each in after[number]:
            before.setdefault(each, []).append(number)
    return before, after


def _uses(kernel: Kernel, number: int, neighbors: dict[int, list[int]]) -> set[str]:
    """What is done to memory from an instruction on, in the direction of the neighbors, as far as the next barrier."""
    found, seen, left = set(), set(), [*neighbors.get(number, ())]
    while left:
        each = left.pop()
        if each in seen or each >= len(kernel.instructions):
            continue
        seen.add(each)
        opcode = kernel.instructions[each].opcode
        if opcode != "bar.sync":
            found |= {use for use, opcodes in USES.items() if opcodes.fullmatch(opcode)}
            left += neighbors.get(each, ())
    return found


def _between_barriers(kernel: Kernel, number: int) -> bool:
    """Whether no memory is used before and after a barrier, up to the next ones on every path, and written there."""
    if kernel.instructions[number].opcode != "bar.sync":
        return False
    before, after = (_uses(kernel, number, neighbors) for neighbors in _neighbors(kernel))
    return not any(
        {f"write {memory}"} & (before | after) and all(any(memory in use for use in uses) for uses in (before, after))
        for memory in ("shared", "global")
    )


HARMLESS: dict[str, Callable[[Kernel, int], bool]] = {
    "what is used before it and what is used after it lie in other memory, up to other barriers on every path": (
        _between_barriers
    ),
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
    "selection goes on with what a warp has stored itself, or after sums of all tokens, which take barriers": (
        lambda kernel, number: (
            kernel.name == "_select_kernel"
            and kernel.instructions[number - 1].opcode != "cp.async.wait_group"
            and _between(kernel, number, r"bra", r"bra")
        )
    ),
    "before tiles are filled: up to the next barrier only the places of tokens are read, and nothing is written": (
        lambda kernel, number: (
            kernel.name == "_move_codes_kernel"
            and "write global" not in _uses(kernel, number, _neighbors(kernel)[1])
            and "write global" in _uses(kernel, number, _neighbors(kernel)[0])
        )
    ),
    "a warp reads the scales that it has stored itself, in the layout that this shape has": (
        lambda kernel, number: (
            kernel.name == "_move_codes_kernel"
            and kernel.instructions[number].source.startswith("kv_pack.py")
            and kernel.instructions[number - 1].opcode.startswith("st.global")
        )
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
            and _between(kernel, number, "", r"st|ret|bra")
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
    # rounds: many rows are planned in two, and the parts of a row combined in several
    monkeypatch.setattr(kv_decode, "PLANNED", 128)
    monkeypatch.setattr(kv_decode, "PARTS", 16)
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
