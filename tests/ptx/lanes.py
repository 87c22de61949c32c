"""Registers of all lanes of a launch, and which lane belongs to which warp and CTA."""

from __future__ import annotations

import numpy as np

from .faults import Divergence, Unknown
from .numbers import UNSIGNED, dtype, literal

WARP = 32
SYMBOLS = {"global_smem": 0}  # addresses, in bytes, of the one array of shared memory that Triton declares
PARAMETER = 8  # bytes from one parameter to the next, in a memory of their own


class Grid:
    """The lanes of a launch, CTA by CTA."""

    def __init__(self, ctas: tuple[int, int, int], threads: int):
        self.ctas, self.threads = ctas, threads
        number = np.arange(ctas[0] * ctas[1] * ctas[2] * threads)
        self.size = len(number)
        self.lane, self.warp, self.cta = number % WARP, number // WARP, number // threads

    def special(self) -> dict[str, np.ndarray]:
        """Special registers by name."""
        x, y, _ = self.ctas
        values = {"%tid.x": np.arange(self.size) % self.threads, "%laneid": self.lane, "%ntid.x": self.threads}
        values |= {"%ctaid.x": self.cta % x, "%ctaid.y": self.cta // x % y, "%ctaid.z": self.cta // (x * y)}
        return values | {f"%nctaid.{axis}": count for axis, count in zip("xyz", self.ctas, strict=True)}

    def warps(self, lanes: np.ndarray | None, opcode: str) -> np.ndarray | None:
        """Warps to which active lanes belong (None: all do), of which every lane must be active."""
        if lanes is None:
            return None
        warps = np.unique(self.warp[lanes])
        if len(lanes) != WARP * len(warps):
            raise Divergence(f"{opcode} needs whole warps, but runs on {len(lanes)} lanes of {len(warps)}")
        return warps


class Registers:
    """A row of all lanes' values for each register, in a bank for each width."""

    def __init__(self, declared: dict[str, int], parameters: list[tuple[str, str]], grid: Grid):
        special = grid.special()
        self.symbols = SYMBOLS | {name: PARAMETER * number for number, (_, name) in enumerate(parameters)}
        widths = declared | dict.fromkeys(special, 4)
        self.place: dict[str, tuple[int, int]] = {}
        counts = dict.fromkeys((0, *UNSIGNED), 0)
        for name, width in widths.items():
            self.place[name] = width, counts[width]
            counts[width] += 1
        kinds = {width: UNSIGNED[width] if width else np.dtype(bool) for width in counts}
        # all bits are set in what nothing has written: NaN in every format
        self.banks = {width: ~np.zeros((count, grid.size), kinds[width]) for width, count in counts.items()}
        self.size = grid.size
        for name, value in special.items():
            self.write(name, np.asarray(value, np.uint32), None)

    def operand(self, name: str, kind: str) -> tuple[np.ndarray, int] | np.ndarray:
        """Where an operand of a PTX type is: a typed bank and a row of it; or its value, if it is an immediate."""
        to = dtype(kind)
        if name in self.place:
            width, row = self.place[name]
            if (width or 1) != to.itemsize:
                raise Unknown(f"operand {name} of {width} bytes as .{kind}")
            return self.banks[width].view(to), row
        value = literal(str(self.symbols.get(name, name)), to)
        if value is None:
            raise Unknown(f"operand {name}")
        return value

    def read(self, name: str, kind: str, lanes: np.ndarray | None = None) -> np.ndarray:
        """Values of one operand in all lanes, or in some; an immediate is an array of no dimensions."""
        found = self.operand(name, kind)
        if isinstance(found, np.ndarray):
            return found
        bank, row = found
        return bank[row] if lanes is None else bank[row, lanes]

    def read_all(self, name: str, kind: str, lanes: np.ndarray | None = None) -> np.ndarray:
        """As `read`, with an immediate repeated for each lane."""
        return np.broadcast_to(self.read(name, kind, lanes), self.size if lanes is None else len(lanes))

    def read_low(self, name: str, kind: np.dtype, lanes: np.ndarray | None) -> np.ndarray:
        """As `read_all`, of a register that may be wider: its low bytes."""
        width, _ = self.place.get(name, (kind.itemsize, 0))
        unsigned = UNSIGNED[kind.itemsize]
        return self.read_all(name, f"u{8 * width}", lanes).astype(unsigned)

    def write(self, name: str, value: np.ndarray, lanes: np.ndarray | None) -> None:
        """Set one register in all lanes, or in some; a narrower value is extended by its type's sign or by zeros."""
        if name == "_":
            return
        if name not in self.place:
            raise Unknown(f"operand {name}")
        width, row = self.place[name]
        if value.dtype.kind == "f":
            value = value.view(UNSIGNED[value.dtype.itemsize])
        self.banks[width][row if lanes is None else (row, lanes)] = value
