"""Products of matrices by a warp, and how their parts come from shared memory and go there.

Lane l holds of a matrix of 8 rows of 16 bit the elements (l // 4, 2 * (l % 4)) and the one after it, as one register.
"""

from __future__ import annotations

import re

import numpy as np

from .lanes import WARP
from .numbers import floats, halves, joined
from .parser import Instruction, address, listed

ROW, COLUMN = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2  # of a lane's first element


def load_matrices(instruction: Instruction, match: re.Match):
    """`ldmatrix...x4{.trans}.shared.b16 {d...}, [a]`: lanes 8 i to 8 i + 7 have the addresses of matrix i's rows."""
    count, transposed = int(match[1]), bool(match[2])
    results, (base, offset) = listed(instruction.operands[0]), address(instruction.operands[1])

    def run(machine, lanes):
        machine.grid.warps(lanes, instruction.opcode)
        every = machine.indices(lanes)
        first = (machine.registers.read_all(base, "u32", lanes) + np.uint32(offset)).reshape(-1, WARP)
        owners = every.reshape(-1, WARP)[:, : 8 * count]
        rows = machine.shared.load(owners.reshape(-1), first[:, : 8 * count].reshape(-1), 16)
        matrices = rows.view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        for number, name in enumerate(results):
            parts = (matrices[:, number, ROW, COLUMN + side] for side in (0, 1))
            machine.registers.write(name, joined(*parts).reshape(-1), lanes)

    return run


def store_matrices(instruction: Instruction, match: re.Match):
    """`stmatrix...x4{.trans}.shared.b16 [a], {s...}`: the inverse of `ldmatrix`."""
    count, transposed = int(match[1]), bool(match[2])
    (base, offset), sources = address(instruction.operands[0]), listed(instruction.operands[1])

    def run(machine, lanes):
        machine.grid.warps(lanes, instruction.opcode)
        every = machine.indices(lanes)
        matrices = np.empty((len(every) // WARP, count, 8, 8), np.uint16)
        own = matrices.swapaxes(2, 3) if transposed else matrices
        for number, name in enumerate(sources):
            for side, part in enumerate(halves(machine.registers.read_all(name, "b32", lanes).reshape(-1, WARP))):
                own[:, number, ROW, COLUMN + side] = part
        first = (machine.registers.read_all(base, "u32", lanes) + np.uint32(offset)).reshape(-1, WARP)
        owners = every.reshape(-1, WARP)[:, : 8 * count]
        rows = matrices.reshape(-1, 8)
        machine.shared.store(owners.reshape(-1), first[:, : 8 * count].reshape(-1), rows)

    return run


def fragment(machine, names: list[str], kind: str, lanes: np.ndarray | None) -> np.ndarray:
    """float32 [warps, 16, 16] of a 16-bit operand's four registers, or [warps, 8, 16] of two: 8 x 8 after 8 x 8."""
    height = 4 * len(names)
    parts = [halves(machine.registers.read_all(name, "b32", lanes).reshape(-1, WARP)) for name in names]
    result = np.empty((len(parts[0][0]), height, 16), np.float32)
    for number, both in enumerate(parts):
        down, right = (number % 2, number // 2) if len(names) == 4 else (0, number)
        for side, part in enumerate(both):
            result[:, 8 * down + ROW, 8 * right + COLUMN + side] = floats(part, kind)
    return result


def accumulator(machine, names: list[str], lanes: np.ndarray | None) -> np.ndarray:
    """float32 [warps, 16, 8 n] of four registers for each n."""
    values = [machine.registers.read_all(name, "f32", lanes).reshape(-1, WARP) for name in names]
    result = np.empty((len(values[0]), 16, 2 * len(names)), np.float32)
    for number, value in enumerate(values):
        result[:, 8 * (number // 2 % 2) + ROW, 8 * (number // 4) + COLUMN + number % 2] = value
    return result


def spread(machine, names: list[str], matrix: np.ndarray, lanes: np.ndarray | None) -> None:
    """The inverse of `accumulator`."""
    for number, name in enumerate(names):
        value = matrix[:, 8 * (number // 2 % 2) + ROW, 8 * (number // 4) + COLUMN + number % 2]
        machine.registers.write(name, np.ascontiguousarray(value).reshape(-1), lanes)


def multiply(instruction: Instruction, match: re.Match):
    """`mma.sync.aligned.m16n8k16...`: d [16, 8] = a [16, 16] x b [16, 8] + c, in float32."""
    kind = match[1]
    results, left, right, added = map(listed, instruction.operands)

    def run(machine, lanes):
        machine.grid.warps(lanes, instruction.opcode)
        a, b = fragment(machine, left, kind, lanes), fragment(machine, right, kind, lanes)
        spread(machine, results, a @ b.swapaxes(1, 2) + accumulator(machine, added, lanes), lanes)

    return run


EFFECTS = {
    r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16": load_matrices,
    r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16": store_matrices,
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32": multiply,
}
