"""Runs a kernel on all lanes of all CTAs of a launch together.

Lanes at the same block of instructions run it at once; of those that have parted, the ones furthest back go first. So
all CTAs advance in step, which a GPU does not promise: what would depend on it is reported as a race.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from .copies import Copies
from .effects import compute, effect, smallest_access
from .faults import Fault, OverLimit
from .lanes import Grid, Registers
from .memory import GlobalMemory, SharedMemory
from .numbers import UNSIGNED, dtype
from .parser import Instruction, Kernel
from .races import Barriers
from .schedule import Block, Bundle, blocks, operation
from .warpgroups import Products

LIMITS = {80: 99 * 1024, 90: 227 * 1024}  # bytes of shared memory of a block; RTX 30 and 40 run the code of sm_80
REGISTERS = 64 * 1024  # of a multiprocessor
MOST_REGISTERS = 255  # of a thread


class Machine:
    """One launch: registers, memory, and where every lane is."""

    def __init__(
        self, kernel: Kernel, ctas: tuple[int, int, int], arguments: list, tensors: dict[str, torch.Tensor], shared: int
    ):
        """`arguments`: a number for each parameter, addresses for pointers into `tensors`; `shared`: bytes."""
        check_limits(kernel, shared)
        self.kernel, self.grid = kernel, Grid(ctas, kernel.threads)
        self.arguments = {
            name: np.array(value, dtype(kind)) if kind[0] == "f" else _bits(value, kind)
            for (kind, name), value in zip(kernel.parameters, arguments, strict=True)
        }
        self.registers = Registers(kernel.registers, kernel.parameters, self.grid)
        self.barriers = Barriers(self.grid)
        self.memory = GlobalMemory(self.grid, tensors, smallest_access(kernel.instructions, "global"), self.barriers)
        self.shared = SharedMemory(self.grid, shared, smallest_access(kernel.instructions, "shared"), self.barriers)
        self.copies = Copies(self.grid, self.memory, self.shared)
        self.products = Products(self.grid)
        self.live = np.ones(self.grid.size, bool)
        self.where = ""
        self.executed: set[int] = set()  # `id` of each instruction that has run, of bundles of the first one

    @cached_property
    def every(self) -> np.ndarray:
        return np.arange(self.grid.size)

    def indices(self, lanes: np.ndarray | None) -> np.ndarray:
        """Numbers of the active lanes."""
        return self.every if lanes is None else lanes

    def run(self) -> None:
        """Run until every lane has returned. Raises `Fault`."""
        code, number_of = blocks(self.kernel, self.registers)
        steps = [[_step(bundle) for bundle in block.bundles] for block in code]
        place = np.zeros(self.grid.size, np.int64)
        with np.errstate(all="ignore"):
            while (current := int(place.min())) < len(code):
                active = place == current
                lanes = None if active.all() else np.flatnonzero(active)
                for instruction, step in steps[current]:
                    self.executed.add(id(instruction))
                    try:
                        step(self, lanes)
                    except Fault as fault:
                        raise type(fault)(f"{fault}; {_told(instruction)} of {self.kernel.name}") from None
                self._branch(code[current], place, lanes, number_of, len(code))
            self.memory.check_races()

    def _branch(
        self, block: Block, place: np.ndarray, lanes: np.ndarray | None, number_of: dict[str, int], end: int
    ) -> None:
        """Send the lanes that ran a block to their next one."""
        lanes = self.indices(lanes)
        place[lanes] = block.next
        if block.branch is None:
            return
        goes = lanes if block.branch.guard is None else lanes[guarded(self, block.branch, lanes)]
        if block.branch.opcode == "ret":
            place[goes], self.live[goes] = end, False
        else:
            place[goes] = number_of[block.branch.operands[0]]


def check_limits(kernel: Kernel, shared: int) -> None:
    """Raises `OverLimit` for more shared memory or registers than a block of the target may have."""
    if shared > LIMITS[kernel.target]:
        raise OverLimit(
            f"{kernel.name} takes {shared} bytes of shared memory; sm_{kernel.target} has {LIMITS[kernel.target]}"
        )
    most = kernel.max_registers
    if most is not None and (most > MOST_REGISTERS or most * kernel.threads > REGISTERS):
        raise OverLimit(f"{kernel.name} asks for {most} registers in {kernel.threads} threads")


def guarded(machine: Machine, instruction: Instruction, lanes: np.ndarray | None) -> np.ndarray:
    """Whether each lane runs an instruction with a guard."""
    value = machine.registers.read(instruction.guard, "pred", lanes)
    return ~value if instruction.negated else value


def _bits(value: int, kind: str) -> np.ndarray:
    size = dtype(kind).itemsize
    return np.array(int(value) % (1 << 8 * size), UNSIGNED[size])


def _told(instruction: Instruction) -> str:
    return f"at {instruction.source}: {instruction.text}"


def _step(bundle: Bundle) -> tuple[Instruction, Callable]:
    """What runs a bundle, and its first instruction for messages."""
    first = bundle.instructions[0]
    if bundle.operation is not None:
        return first, lambda machine, lanes: bundle.compute(machine.registers, lanes)
    computes = operation(first)
    apply = effect(first) if computes is None else compute(first, computes)
    where = _told(first)

    def run(machine: Machine, lanes: np.ndarray | None) -> None:
        machine.where = where
        if first.guard is not None:
            runs = guarded(machine, first, lanes)
            if not runs.all():
                lanes = machine.indices(lanes)[runs]
                if not len(lanes):
                    return
        apply(machine, lanes)

    return first, run
