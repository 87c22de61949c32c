"""Instructions in which the lanes of a warp exchange registers."""

from __future__ import annotations

import re

import numpy as np

from .faults import Unknown
from .lanes import WARP
from .numbers import dtype
from .parser import Instruction

ALL_LANES = 2**32 - 1
REDUCTIONS = {
    **{"add": np.add, "min": np.minimum, "max": np.maximum},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
}


def _whole(machine, instruction: Instruction, lanes: np.ndarray | None) -> None:
    """Every lane of the warps takes part, and the instruction says so."""
    machine.grid.warps(lanes, instruction.opcode)
    if (machine.registers.read(instruction.operands[-1], "b32", lanes) != ALL_LANES).any():
        raise Unknown(f"a mask of some lanes: {instruction.text}")


def shuffle(instruction: Instruction, match: re.Match):
    """`shfl.sync.bfly.b32 d|p, a, b, c, mask`: a of the lane that b, and the bounds in c, choose."""
    mode = match[1]
    result, _, valid = instruction.operands[0].partition("|")
    source, offset, bounds = instruction.operands[1:4]

    def run(machine, lanes):
        _whole(machine, instruction, lanes)
        registers = machine.registers
        lane = machine.grid.lane if lanes is None else machine.grid.lane[lanes]
        by, limits = (registers.read(name, "u32", lanes).astype(np.int64) for name in (offset, bounds))
        segment, clamp = limits >> 8 & 31, limits & 31
        lowest = lane & segment
        highest = lowest | clamp & ~segment
        if mode == "idx":
            chosen = lowest | by & ~segment & 31
        else:
            chosen = {"up": lane - by, "down": lane + by, "bfly": lane ^ by}[mode]
        inside = chosen >= highest if mode == "up" else chosen <= highest
        chosen = np.where(inside, chosen, lane)
        values = registers.read_all(source, "b32", lanes).reshape(-1, WARP)
        registers.write(result, np.take_along_axis(values, chosen.reshape(-1, WARP), 1).reshape(-1), lanes)
        if valid:
            registers.write(valid, inside, lanes)

    return run


def reduction(instruction: Instruction, match: re.Match):
    """`redux.sync.max.s32 d, a, mask`: of all lanes, in every lane."""
    function, kind = REDUCTIONS[match[1]], match[2]
    result, source = instruction.operands[:2]

    def run(machine, lanes):
        _whole(machine, instruction, lanes)
        values = machine.registers.read_all(source, kind, lanes).reshape(-1, WARP)
        machine.registers.write(result, np.repeat(function.reduce(values, 1, dtype(kind)), WARP), lanes)

    return run


EFFECTS = {
    r"shfl\.sync\.(up|down|bfly|idx)\.b32": shuffle,
    r"redux\.sync\.(add|min|max|and|or|xor)\.([usb]32)": reduction,
}
