"""Who has read and written what: races in shared memory between barriers, and in global memory between CTAs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .faults import Divergence, Race
from .lanes import WARP, Grid

MANY = WARP  # of a phase, the reader that stands for several warps; a CTA has at most 32
PHASE = 64  # numbers of a phase: its warps, and MANY


class Barriers:
    """How many barriers each CTA has passed: nothing orders accesses of two warps in the same phase."""

    def __init__(self, grid: Grid):
        self.grid = grid
        self.phase = np.zeros(grid.size // grid.threads, np.int32)
        self.warp = (grid.warp % (grid.threads // WARP)).astype(np.int32)  # within its CTA

    def arrive(self, lanes: np.ndarray | None, live: np.ndarray) -> None:
        """All lanes of a CTA that have not returned pass a barrier together."""
        if lanes is None:
            self.phase += 1
            return
        ctas = len(self.phase)
        arrived = np.bincount(self.grid.cta[lanes], minlength=ctas)
        expected = np.bincount(self.grid.cta[live], minlength=ctas)
        if late := np.flatnonzero((arrived > 0) & (arrived != expected)).tolist():
            raise Divergence(f"{arrived[late[0]]} of {expected[late[0]]} lanes of CTA {late[0]} are at this barrier")
        self.phase[arrived > 0] += 1

    def stamp(self, lanes: np.ndarray) -> np.ndarray:
        """A number of each lane's phase and warp."""
        return self.phase[self.grid.cta[lanes]] * PHASE + self.warp[lanes]


class SharedAccesses:
    """The last write and the last reads of each place in the shared memory of all CTAs."""

    def __init__(self, places: int):
        self.written = np.full(places, -1, np.int32)  # stamps
        self.read = np.full(places, -1, np.int32)

    def reading(self, places: np.ndarray, stamp: np.ndarray) -> None:
        """Raises `Race` if another warp has written one of the places since the last barrier."""
        _conflict(self.written[places], stamp, "reads what OTHER wrote")
        before = self.read[places]
        self.read[places] = np.where(_other(before, stamp), stamp & -PHASE | MANY, stamp)

    def writing(self, places: np.ndarray, stamp: np.ndarray, changes: np.ndarray) -> None:
        """Raises `Race` if others have read a place or, where that `changes` it, written to it since the last barrier."""
        _conflict(self.read[places], stamp, "overwrites what OTHER read")
        before = self.written[places]
        _conflict(np.where(changes, before, -1), stamp, "overwrites what OTHER wrote")
        self.written[places] = stamp


def _other(before: np.ndarray, stamp: np.ndarray) -> np.ndarray:
    """Where a stamp is of the same phase as another, and of another warp."""
    difference = before ^ stamp
    return (difference > 0) & (difference < PHASE)


def _conflict(before: np.ndarray, stamp: np.ndarray, message: str) -> None:
    bad = _other(before, stamp)
    if bad.any():
        warp, other = (int(np.broadcast_to(each, bad.shape)[bad][0]) % PHASE for each in (stamp, before))
        other = f"warp {other}" if other < MANY else "several warps"
        raise Race(f"shared memory: warp {warp} {message} since the last barrier".replace("OTHER", other))


@dataclass
class GlobalAccesses:
    """Accesses of a launch to one tensor's memory; nothing orders two CTAs, so only who and where counts."""

    reads: list[tuple] = field(default_factory=list)  # first byte, bytes, CTA of each lane; the instruction
    writes: list[tuple] = field(default_factory=list)

    def check(self, name: str, size: int) -> None:
        """Raises `Race` if a CTA has read or written what another one has written."""
        if not self.writes:
            return
        owner = np.zeros(size, np.int32)  # CTA + 1
        for first, count, cta, instruction in self.writes:
            places, own = first[:, None] + np.arange(count), cta[:, None] + 1
            before = owner[places]
            owner[places] = own
            if (((before != 0) & (before != own)) | (owner[places] != own)).any():
                raise Race(f"two CTAs write to the same place of {name}: {instruction}")
        for first, count, cta, instruction in self.reads:
            own = owner[first[:, None] + np.arange(count)]
            if ((own != 0) & (own != cta[:, None] + 1)).any():
                raise Race(f"a CTA reads what another one writes of {name}: {instruction}")
