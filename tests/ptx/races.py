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


class Accesses:
    """The last write and the last reads of each place in memory that the warps of a CTA share."""

    def __init__(self, places: int, name: str):
        self.name = name
        self.written = np.full(places, -1, np.int32)  # stamps
        self.read = np.full(places, -1, np.int32)

    def reading(self, places: np.ndarray, stamp: np.ndarray) -> None:
        """Raises `Race` if another warp has written one of the places since the last barrier."""
        self._conflict(self.written[places], stamp, "reads what OTHER wrote")
        before = self.read[places]
        self.read[places] = np.where(_other(before, stamp), stamp & -PHASE | MANY, stamp)

    def writing(self, places: np.ndarray, stamp: np.ndarray, changes: np.ndarray) -> None:
        """Raises `Race` if, since the last barrier, others have read a place, or written to one that this `changes`."""
        self._conflict(self.read[places], stamp, "overwrites what OTHER read")
        before = self.written[places]
        self._conflict(np.where(changes, before, -1), stamp, "overwrites what OTHER wrote")
        self.written[places] = stamp

    def _conflict(self, before: np.ndarray, stamp: np.ndarray, message: str) -> None:
        bad = _other(before, stamp)
        if bad.any():
            warp, other = (int(np.broadcast_to(each, bad.shape)[bad][0]) % PHASE for each in (stamp, before))
            other = f"warp {other}" if other < MANY else "several warps"
            raise Race(f"{self.name}: warp {warp} {message} since the last barrier".replace("OTHER", other))


def _other(before: np.ndarray, stamp: np.ndarray) -> np.ndarray:
    """Where a stamp is of the same phase as another, and of another warp."""
    difference = before ^ stamp
    return (difference > 0) & (difference < PHASE)


@dataclass
class GlobalAccess:
    """What one instruction touches of a tensor's memory."""

    writes: bool
    first: np.ndarray  # bytes from its start, of each lane
    count: int  # bytes
    cta: np.ndarray
    stamp: np.ndarray
    where: str  # the instruction

    @property
    def places(self) -> np.ndarray:
        """[lanes, bytes]"""
        return self.first[:, None] + np.arange(self.count)


@dataclass
class GlobalAccesses:
    """Accesses of a launch to one tensor's memory, in order."""

    all: list[GlobalAccess] = field(default_factory=list)

    def check(self, name: str, size: int) -> None:
        """Raises `Race` if one CTA has touched what another one wrote, or a warp so without a barrier in between."""
        if not any(each.writes for each in self.all):
            return
        owner = np.zeros(size, np.int32)  # CTA + 1
        for each in self.all:
            if each.writes:
                places, own = each.places, each.cta[:, None] + 1
                before = owner[places]
                owner[places] = own
                if (((before != 0) & (before != own)) | (owner[places] != own)).any():
                    raise Race(f"two CTAs write to the same place of {name}; {each.where}")
        within = Accesses(size, name)
        for each in self.all:
            places, stamp = each.places, np.broadcast_to(each.stamp[:, None], (len(each.first), each.count))
            written = owner[places]
            if ((written != 0) & (written != each.cta[:, None] + 1)).any():
                raise Race(f"a CTA reads what another one writes of {name}; {each.where}")
            try:
                if each.writes:
                    within.writing(places, stamp, np.bool_(True))
                elif written.any():
                    within.reading(places[written != 0], stamp[written != 0])
            except Race as race:
                raise Race(f"{race}; {each.where}") from None
