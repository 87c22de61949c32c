"""cp.async: copies to shared memory that have arrived only when their lane has waited for their group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .faults import Misaligned
from .lanes import Grid
from .memory import GlobalMemory, SharedMemory


@dataclass
class Copy:
    """One instruction's copies that are under way."""

    lanes: np.ndarray
    places: np.ndarray  # [lanes, cells]
    values: np.ndarray
    group: np.ndarray  # of each lane's groups, the number


class Copies:
    """Copies of all lanes, in groups that each lane commits."""

    def __init__(self, grid: Grid, source: GlobalMemory, target: SharedMemory):
        self.source, self.target = source, target
        self.committed = np.zeros(grid.size, np.int32)  # groups
        self.pending: list[Copy] = []
        self.final = np.zeros_like(target.cells)  # what will have arrived

    def start(self, lanes: np.ndarray, target: np.ndarray, source: np.ndarray, size: int, given: np.ndarray, text: str):
        """Copy the first `given` of `size` bytes, and zeros after them, from global to shared addresses."""
        values = np.zeros((len(lanes), size), np.uint8)
        if (source % size).any():
            raise Misaligned(f"global memory: {size} bytes at address {source[source % size != 0][0]}")
        for count in np.unique(given[given > 0]).tolist():
            own = given == count
            values[own, :count] = self.source.load(lanes[own], source[own], count, text).view(np.uint8)
        memory, values = self.target, values.view(self.target.cells.dtype)
        places = memory.places(lanes, target, size)
        # several warps may bring the same
        changes = ~memory.arriving[places] | (self.final[places] != values)
        memory.accesses.writing(places, memory.stamp(lanes, places), changes)
        memory.cells[places], memory.arriving[places], memory.written[places] = ~np.zeros_like(values), True, True
        self.final[places] = values
        self.pending.append(Copy(lanes, places, values, self.committed[lanes]))

    def commit(self, lanes: np.ndarray) -> None:
        self.committed[lanes] += 1

    def wait(self, lanes: np.ndarray, newest: int) -> None:
        """Let all groups of these lanes arrive but their `newest` ones."""
        waits = np.zeros(len(self.committed), bool)
        waits[lanes] = True
        memory, remaining = self.target, []
        for copy in self.pending:
            done = waits[copy.lanes] & (copy.group < self.committed[copy.lanes] - newest)
            if done.any():
                places = copy.places[done]
                memory.cells[places], memory.arriving[places] = copy.values[done], False
                memory.accesses.written[places] = memory.stamp(copy.lanes[done], places)
            if not done.all():
                rest = ~done
                remaining.append(Copy(copy.lanes[rest], copy.places[rest], copy.values[rest], copy.group[rest]))
        self.pending = remaining
