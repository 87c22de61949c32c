"""A kernel as blocks without branches, in which equal instructions that do not need each other run at once.

Compiled kernels repeat an instruction on many registers: an unrolled product of float32 matrices has thousands of
`fma`. Numpy takes as long for one of them on some hundred lanes as for dozens. Instructions that only compute
therefore get the earliest step at which what they read is there, and those of one opcode and step form a bundle.
Everything else (memory, barriers, shuffles) keeps its order, each in a step of its own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from .arithmetic import OPERATIONS, Operation, packing, unpacking
from .faults import Unknown
from .lanes import Registers
from .parser import Instruction, Kernel, listed

BRANCHES = ("bra", "bra.uni", "ret")


@dataclass
class Bundle:
    """Instructions of one opcode that run together; several only where an operation has one result."""

    instructions: list[Instruction]
    operation: Operation | None  # None: one instruction that does more than compute
    read: list = field(default_factory=list)
    written: tuple | None = None

    def compute(self, registers: Registers, lanes: np.ndarray | None) -> None:
        """Run an operation in all lanes, or in some."""
        values = [fetch(lanes) for fetch in self.read]
        result = self.operation.function(*values)
        if len(self.operation.results) > 1:
            for name, value in zip(listed(self.instructions[0].operands[0]), result, strict=True):
                registers.write(name, value, lanes)
            return
        bank, rows = self.written
        if result.dtype.kind == "f":
            result = result.view(bank.dtype)
        if lanes is None:
            bank[rows] = result
        else:
            bank[rows if isinstance(rows, int) else rows[:, None], lanes] = result


@dataclass
class Block:
    """Instructions from a label or branch to the next; what ends it, and the block after it."""

    bundles: list[Bundle]
    branch: Instruction | None
    next: int


def operation(instruction: Instruction) -> Operation | None:
    """What an instruction computes; None if it does something else."""
    if found := OPERATIONS.get(instruction.opcode):
        if found.results == found.sources[:1] and len(found.sources) == 1 and instruction.opcode.startswith("mov."):
            first, second = (operand.startswith("{") for operand in instruction.operands)
            kind = instruction.opcode.split(".")[1]
            if first:
                return unpacking(kind, len(listed(instruction.operands[0])))
            if second:
                return packing(kind, len(listed(instruction.operands[1])))
        return found
    return None


def blocks(kernel: Kernel, registers: Registers) -> tuple[list[Block], dict[str, int]]:
    """The blocks of a kernel in order, and the number of the block at each label."""
    starts = {0, *kernel.labels.values()}
    starts |= {number + 1 for number, each in enumerate(kernel.instructions) if each.opcode in BRANCHES}
    ordered = sorted(start for start in starts if start < len(kernel.instructions))
    products = {each.operands[0] for each in kernel.instructions if each.opcode.startswith("wgmma.mma")}
    late = [name for operand in sorted(products) for name in listed(operand)]
    found = []
    for number, (start, stop) in enumerate(zip(ordered, [*ordered[1:], len(kernel.instructions)], strict=True)):
        own = kernel.instructions[start:stop]
        branch = own.pop() if own[-1].opcode in BRANCHES else None
        found.append(Block(_bundles(own, registers, late), branch, number + 1))
    number_of = {start: number for number, start in enumerate(ordered)}
    return found, {label: number_of.get(start, len(found)) for label, start in kernel.labels.items()}


def _names(operand: str, registers: Registers) -> list[str]:
    """Registers in an operand of any form."""
    for mark in "{}[],+|!":
        operand = operand.replace(mark, " ")
    return [name for name in operand.split() if name in registers.place]


def _bundles(instructions: list[Instruction], registers: Registers, late: list[str]) -> list[Bundle]:
    """Instructions by the earliest step that they can take; `late` are registers that a wait for products sets."""
    writer, reader, ordered, steps = {}, {}, 0, defaultdict(dict)
    for place, each in enumerate(instructions):
        computes = operation(each)
        if each.guard is not None:
            computes = None
        operands = [_names(operand, registers) for operand in each.operands]
        stores = each.opcode.split(".")[0] in ("st", "stmatrix", "cp", "bar", "wgmma", "fence")
        results = [] if stores and not each.opcode.startswith("wgmma.mma") else operands[0] if operands else []
        if each.opcode.startswith("wgmma.wait"):
            results = late
        # what a guarded or a collective instruction does not set, it keeps
        sources = [name for own in (operands[1:] if computes else operands) for name in own]
        sources += [each.guard] if each.guard else []
        step = max((writer.get(name, 0) for name in sources), default=0)
        step = max([step, *(writer.get(name, 0) for name in results), *(reader.get(name, 0) for name in results)])
        step += 1
        if computes is None:
            step = ordered = max(step, ordered + 1)
        for name in sources:
            reader[name] = max(reader.get(name, 0), step)
        for name in results:
            writer[name] = step
        key = (each.opcode, _form(each, computes, registers)) if computes and len(computes.results) == 1 else place
        steps[step].setdefault(key, Bundle([], computes)).instructions.append(each)
    found = [bundle for step in sorted(steps) for bundle in steps[step].values()]
    for bundle in found:
        if bundle.operation:
            _link(bundle, registers)
    return found


def _form(instruction: Instruction, computes: Operation, registers: Registers) -> tuple:
    """Which operands are registers: a bundle's instructions agree in it."""
    if any(operand.startswith("{") for operand in instruction.operands):
        return instruction.operands
    return len(instruction.operands), *(operand in registers.place for operand in instruction.operands)


def _link(bundle: Bundle, registers: Registers) -> None:
    """Find the rows of a bundle's operands, so that running it only reads and writes."""
    first, many = bundle.instructions[0], len(bundle.instructions) > 1
    packs = first.opcode.startswith("mov.") and len(bundle.operation.sources) > 1
    operands = [listed(first.operands[1])] if packs else [[name] for name in first.operands[1:]]
    names = [name for own in operands for name in own]
    if len(names) != len(bundle.operation.sources):
        raise Unknown(f"{len(names)} source operands of {first.text}")
    for position, kind in enumerate(bundle.operation.sources):
        if many:
            every = [registers.operand(each.operands[1 + position], kind) for each in bundle.instructions]
        else:
            every = [registers.operand(names[position], kind)]
        bundle.read.append(_reader(every, many))
    if len(bundle.operation.results) == 1:
        every = [registers.operand(each.operands[0], bundle.operation.results[0]) for each in bundle.instructions]
        if any(isinstance(each, np.ndarray) for each in every):
            raise Unknown(f"result of {first.text}")
        width, _ = registers.place[first.operands[0]]
        rows = np.array([row for _, row in every])
        bundle.written = registers.banks[width], rows if many else int(rows[0])


def _reader(every: list, many: bool):
    """A function of lanes that gives one operand's values: [lanes], or [instructions, lanes] where there are many."""
    if isinstance(every[0], np.ndarray):
        value = np.stack(every)[:, None] if many else every[0]
        return lambda lanes: value
    bank = every[0][0]
    if many:
        rows = np.array([row for _, row in every])
        return lambda lanes: bank[rows] if lanes is None else bank[rows[:, None], lanes]
    row = every[0][1]
    return lambda lanes: bank[row] if lanes is None else bank[row, lanes]
