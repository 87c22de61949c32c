"""wgmma, H100's products of matrices by four warps, which go on while their warps do something else.

Operands lie in shared memory where descriptors say, or the left one in registers. Results are there when their warps
have waited for their group; until then the registers hold NaN.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from .faults import Divergence, Race, Unknown
from .lanes import WARP, Grid
from .numbers import floats
from .parser import Instruction, listed
from .tensor_cores import accumulator, fragment, spread

GROUP = 4 * WARP
SWIZZLES = {1: (128, 7), 2: (64, 3), 3: (32, 1)}  # bytes of a row, and which bits of its number the columns get


@dataclass
class Accumulators:
    """What one instruction's registers will hold, in all warps."""

    matrix: np.ndarray  # [warps, 16, n]
    group: np.ndarray  # of each warp, how many groups came before; -1: the registers hold it


@dataclass
class Operand:
    """What products that are under way have read of shared memory."""

    warps: np.ndarray
    group: np.ndarray  # of each of these warps
    places: np.ndarray  # [warps, ...]
    cells: np.ndarray


class Products:
    """The products of all warps, in groups that each warp commits."""

    def __init__(self, grid: Grid):
        self.committed = np.zeros(grid.size // WARP, np.int32)
        self.pending: dict[str, Accumulators] = {}  # by registers
        self.operands: list[Operand] = []

    def start(self, machine, results: str, lanes: np.ndarray, matrix: np.ndarray, scaled: np.ndarray) -> None:
        """Add what the registers or an earlier product of theirs hold, where `scaled`, and go on."""
        warps = lanes[::WARP] // WARP
        count = len(self.committed)
        own = self.pending.setdefault(
            results, Accumulators(np.zeros((count, *matrix.shape[1:]), np.float32), np.full(count, -1))
        )
        added = accumulator(machine, listed(results), lanes)
        added = np.where(own.group[warps, None, None] >= 0, own.matrix[warps], added)
        own.matrix[warps] = matrix + np.where(scaled[:, None, None], added, np.float32(0))
        own.group[warps] = self.committed[warps]
        spread(machine, listed(results), np.full_like(matrix, np.nan), lanes)

    def commit(self, lanes: np.ndarray) -> None:
        self.committed[lanes[::WARP] // WARP] += 1

    def wait(self, machine, lanes: np.ndarray, newest: int) -> None:
        """Let all groups of these lanes' warps end but their `newest` ones."""
        before = np.zeros(len(self.committed), np.int32)  # groups that end
        warps = lanes[::WARP] // WARP
        before[warps] = self.committed[warps] - newest
        for results, own in self.pending.items():
            ended = np.flatnonzero((own.group >= 0) & (own.group < before))
            if len(ended):
                of_warps = (ended[:, None] * WARP + np.arange(WARP)).reshape(-1)
                spread(machine, listed(results), own.matrix[ended], of_warps)
                own.group[ended] = -1
        remaining = []
        for operand in self.operands:
            ended = operand.group < before[operand.warps]
            if (machine.shared.cells[operand.places[ended]] != operand.cells[ended]).any():
                raise Race("shared memory: an operand was overwritten before its product had ended")
            rest = ~ended
            if rest.any():
                parts = (operand.warps, operand.group, operand.places, operand.cells)
                remaining.append(Operand(*(part[rest] for part in parts)))
        self.operands = remaining


def places_of(descriptor: np.ndarray, rows: int, transposed: bool) -> np.ndarray:
    """Addresses in bytes, [descriptors, rows, 16], of an operand's elements of 16 bit.

    "Asynchronous Warpgroup Level Matrix Shared Memory Layout" in the PTX ISA: blocks of 8 rows, whose bytes are
    swizzled; transposed, a block has 8 columns of the 16.
    """
    start, leading, stride = (
        (descriptor >> np.uint64(bit) & np.uint64(0x3FFF)).astype(np.int64) << 4 for bit in (0, 16, 32)
    )
    modes = np.unique(descriptor >> np.uint64(62)).tolist()
    if len(modes) > 1 or modes[0] not in SWIZZLES:
        raise Unknown(f"operands of wgmma with swizzle {modes}")
    width, mask = SWIZZLES[modes[0]]
    row, column = np.arange(rows)[:, None], np.arange(16)
    leading, stride, start = (part[:, None, None] for part in (leading, stride, start))
    if transposed:
        block, within = np.divmod(row, width // 2)
        address = start + block * leading + column // 8 * stride + column % 8 * width + within * 2
    else:
        address = start + row // 8 * stride + row % 8 * width + column * 2
    return address ^ (address >> 7 & mask) << 4


def multiply(instruction: Instruction, match: re.Match):
    """`wgmma.mma_async...m64nNk16`: d [64, N] = a [64, 16] x b [16, N] + d, or without d where a predicate is false."""
    columns, kind = int(match[1]), match[2]
    results, left, right, scale, *options = instruction.operands
    if options[:2] != ["1", "1"]:
        raise Unknown(f"negated operands: {instruction.text}")
    transposed = [option == "1" for option in options[2:]]

    def operand(machine, name, rows, flip, lanes):
        descriptor = machine.registers.read(name, "u64", lanes).reshape(-1, GROUP)
        if (descriptor != descriptor[:, :1]).any():
            raise Divergence("the lanes of a warp group have several descriptors")
        address = places_of(descriptor[:, 0], rows, flip)
        owners = machine.indices(lanes)[::GROUP]
        flat = address.reshape(len(owners), -1)
        places = machine.shared.places(np.repeat(owners, flat.shape[1]), flat.reshape(-1), 2).reshape(address.shape)
        cells, warps = machine.shared.read(owners, places), owners // WARP
        machine.products.operands.append(Operand(warps, machine.products.committed[warps], places, cells))
        return floats(cells.view(np.uint16), kind)

    def run(machine, lanes):
        every = machine.indices(lanes)
        whole = np.arange(GROUP) + every[::GROUP, None] // GROUP * GROUP
        if not np.array_equal(whole.reshape(-1), every):
            raise Divergence(f"{instruction.opcode} needs whole warp groups")
        if left.startswith("{"):
            a = fragment(machine, listed(left), kind, lanes).reshape(-1, 64, 16)
        else:
            a = operand(machine, left, 64, transposed[0], lanes)
        b = operand(machine, right, columns, transposed[-1], lanes)
        matrix = (a @ b.swapaxes(1, 2)).reshape(-1, 16, columns)
        machine.products.start(
            machine, results, every, matrix, machine.registers.read_all(scale, "pred", lanes)[::WARP]
        )

    return run


def commit(instruction: Instruction, match: re.Match):
    return lambda machine, lanes: machine.products.commit(machine.indices(lanes))


def wait(instruction: Instruction, match: re.Match):
    newest = int(instruction.operands[0], 0)
    return lambda machine, lanes: machine.products.wait(machine, machine.indices(lanes), newest)


def fence(instruction: Instruction, match: re.Match):
    """Orders accesses of several kinds, which are in order here anyway."""
    return lambda machine, lanes: None


EFFECTS = {
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2": multiply,
    r"wgmma\.commit_group\.sync\.aligned": commit,
    r"wgmma\.wait_group\.sync\.aligned": wait,
    r"wgmma\.fence\.sync\.aligned": fence,
    r"fence\.proxy\.async\.shared::cta": fence,
}
