"""Instructions that do more than compute: loads and stores, copies, barriers.

Each factory takes an instruction and the match of its opcode, and returns a function of the machine and the active
lanes (None: all of them) that runs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from . import tensor_cores, warpgroups, warps
from .faults import OutOfBounds, Unknown
from .lanes import PARAMETER
from .numbers import DTYPES, dtype
from .parser import Instruction, address, listed


def load_parameter(instruction: Instruction, match: re.Match):
    """`ld.param.b32 %r1, [name];`, or of a register that has the address of a parameter."""
    result, (name, offset) = instruction.operands[0], address(instruction.operands[1])
    if offset:
        raise Unknown(f"part of a parameter: {instruction.text}")

    def run(machine, lanes):
        arguments, kind = machine.arguments, dtype(match[1])
        if name in arguments:
            machine.registers.write(result, arguments[name].view(kind), lanes)
            return
        at, of_lanes = np.unique(machine.registers.read_low(name, np.dtype("u4"), lanes), return_inverse=True)
        if (at % PARAMETER).any() or at[-1] >= PARAMETER * len(arguments):
            raise OutOfBounds(f"no parameter is at {at.tolist()}")
        values = [*arguments.values()]
        found = np.stack([values[each].view(kind) for each in at // PARAMETER])
        machine.registers.write(result, found[of_lanes], lanes)

    return run


def _addresses(machine, base: str, offset: int, kind: str, lanes: np.ndarray | None) -> np.ndarray:
    return machine.registers.read_all(base, kind, lanes).astype(np.int64) + offset


def load(instruction: Instruction, match: re.Match):
    """`ld.global.v2.b32 {%r1, %r2}, [%rd1+8];` and its like of shared memory."""
    in_shared, count, kind = match[1] == "shared", int(match[2] or 1), dtype(match[3])
    results, (base, offset) = listed(instruction.operands[0]), address(instruction.operands[1])
    size = count * kind.itemsize

    def run(machine, lanes):
        every = machine.indices(lanes)
        at = _addresses(machine, base, offset, "u32" if in_shared else "u64", lanes)
        if in_shared:
            found = machine.shared.load(every, at, size)
        else:
            found = machine.memory.load(every, at, size, machine.where)
        for name, value in zip(results, found.view(kind).T, strict=True):
            machine.registers.write(name, value, lanes)

    return run


def store(instruction: Instruction, match: re.Match):
    """`st.global.v2.b32 [%rd1+8], {%r1, %r2};` and its like of shared memory."""
    in_shared, kind = match[1] == "shared", dtype(match[3])
    (base, offset), sources = address(instruction.operands[0]), listed(instruction.operands[1])

    def run(machine, lanes):
        every = machine.indices(lanes)
        at = _addresses(machine, base, offset, "u32" if in_shared else "u64", lanes)
        values = np.stack([machine.registers.read_low(name, kind, lanes) for name in sources], 1)
        if in_shared:
            machine.shared.store(every, at, values)
        else:
            machine.memory.store(every, at, values, machine.where)

    return run


def copy(instruction: Instruction, match: re.Match):
    """`cp.async.cg.shared.global [a], [b], 16, n;`: the first n bytes of 16, and zeros."""
    (to, to_offset), (base, offset) = map(address, instruction.operands[:2])
    size, given = int(instruction.operands[2], 0), instruction.operands[2:][-1]

    def run(machine, lanes):
        machine.copies.start(
            machine.indices(lanes),
            _addresses(machine, to, to_offset, "u32", lanes),
            _addresses(machine, base, offset, "u64", lanes),
            size,
            machine.registers.read_all(given, "u32", lanes),
            machine.where,
        )

    return run


def commit(instruction: Instruction, match: re.Match):
    return lambda machine, lanes: machine.copies.commit(machine.indices(lanes))


def wait(instruction: Instruction, match: re.Match):
    """`cp.async.wait_group n;`: all groups but the newest n have arrived."""
    newest = int(instruction.operands[0], 0)
    return lambda machine, lanes: machine.copies.wait(machine.indices(lanes), newest)


def barrier(instruction: Instruction, match: re.Match):
    """`bar.sync 0;`, of all threads."""
    if instruction.operands != ("0",):
        raise Unknown(f"a barrier of some threads: {instruction.text}")
    return lambda machine, lanes: machine.barriers.arrive(lanes, machine.live)


def warp_barrier(instruction: Instruction, match: re.Match):
    """`bar.warp.sync`: lanes of a warp run together anyway."""
    return lambda machine, lanes: machine.grid.warps(lanes, instruction.opcode)


def compute(instruction: Instruction, operation) -> Callable:
    """A guarded instruction that only computes."""

    def run(machine, lanes):
        values = [
            machine.registers.read(name, kind, lanes)
            for name, kind in zip(instruction.operands[1:], operation.sources, strict=True)
        ]
        machine.registers.write(instruction.operands[0], operation.function(*values), lanes)

    return run


ACCESS = r"(?:\.v([24]))?\.([bus](?:8|16|32|64)|f32)"
EFFECTS = {
    r"ld\.param\.(\w+)": load_parameter,
    rf"ld\.(global|shared){ACCESS}": load,
    rf"st\.(global|shared){ACCESS}": store,
    r"cp\.async\.c[ag]\.shared\.global": copy,
    r"cp\.async\.commit_group": commit,
    r"cp\.async\.wait_group": wait,
    r"bar\.sync": barrier,
    r"bar\.warp\.sync": warp_barrier,
    **warps.EFFECTS,
    **tensor_cores.EFFECTS,
    **warpgroups.EFFECTS,
}


def effect(instruction: Instruction) -> Callable:
    """What runs an instruction. Raises `Unknown` for one that is not here."""
    for pattern, factory in EFFECTS.items():
        if match := re.fullmatch(pattern, instruction.opcode):
            return factory(instruction, match)
    raise Unknown(f"instruction {instruction.opcode}: {instruction.text}")


def smallest_access(instructions: list[Instruction], space: str) -> int:
    """Bytes of the smallest element that instructions load from or store to `shared` or `global` memory at once."""
    sizes = [16]
    for each in instructions:
        for pattern in (rf"(?:ld|st)\.({space}){ACCESS}",):
            if match := re.fullmatch(pattern, each.opcode):
                sizes.append(int(match[2] or 1) * DTYPES[match[3]].itemsize)
        if each.opcode.startswith("cp.async.c") and len(each.operands) > 2:
            sizes.append(int(each.operands[2], 0))
        if each.opcode.startswith(("ldmatrix", "stmatrix")):
            sizes.append(16)
        if each.opcode.startswith("wgmma.mma"):
            sizes.append(2)
    return min(min(sizes), 8)
