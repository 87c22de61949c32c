"""Memory: the tensors of a launch, and shared memory, with bounds, alignment, and what nothing has written yet."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import torch

from .faults import Misaligned, OutOfBounds, Race, Uninitialized
from .lanes import Grid
from .numbers import UNSIGNED
from .races import Accesses, Barriers, GlobalAccess, GlobalAccesses


@dataclass
class Allocation:
    """Memory of one tensor's storage, of which a kernel may touch the elements of the tensors that it gets."""

    name: str
    start: int  # address
    cells: np.ndarray
    allowed: np.ndarray  # how many bytes before each one are elements
    size: int  # bytes
    accesses: GlobalAccesses = field(default_factory=GlobalAccesses)


def allocations(tensors: dict[str, torch.Tensor], unit: int) -> list[Allocation]:
    """Of the tensors by name, each storage once, in order of addresses and in cells of `unit` bytes."""
    found: dict[int, tuple[list[str], torch.Tensor, torch.UntypedStorage]] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            continue
        names, element, _ = found.setdefault(
            storage.data_ptr(), ([], torch.zeros(storage.nbytes(), dtype=torch.bool), storage)
        )
        names.append(name)
        size = tensor.element_size()
        strides = (*(size * stride for stride in tensor.stride()), 1)
        element.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size).fill_(True)
    result = []
    for start, (names, element, storage) in sorted(found.items()):
        content = np.frombuffer(
            (ctypes.c_uint8 * (storage.nbytes() // unit * unit)).from_address(start), UNSIGNED[unit]
        )
        allowed = np.concatenate([[0], np.cumsum(element.numpy())])
        result.append(Allocation("/".join(names), start, content, allowed, storage.nbytes()))
    return result


class GlobalMemory:
    """What the pointers of a launch lead to, in cells of as many bytes as its smallest access."""

    def __init__(self, grid: Grid, tensors: dict[str, torch.Tensor], unit: int, barriers: Barriers):
        self.grid, self.unit, self.barriers = grid, unit, barriers
        self.allocations = allocations(tensors, unit)
        self.starts = np.array([each.start for each in self.allocations], np.int64)

    def _parts(self, address: np.ndarray, size: int):
        """Allocations that are accessed, each with the lanes that do and the bytes from its start."""
        if (address % size).any():
            raise Misaligned(f"global memory: {size} bytes at address {address[address % size != 0][0]}")
        number = np.searchsorted(self.starts, address, "right") - 1
        if (number < 0).any():
            raise OutOfBounds(f"global memory: {address.min()} is before every tensor")
        for each in np.unique(number):
            own = np.flatnonzero(number == each)
            allocation = self.allocations[each]
            first = address[own] - allocation.start
            inside = first + size <= allocation.size
            end = np.where(inside, first + size, 0)
            inside &= allocation.allowed[end] - allocation.allowed[np.where(inside, first, 0)] == size
            if not inside.all():
                raise OutOfBounds(
                    f"global memory: {(~inside).sum()} lanes outside of {allocation.name}, of {allocation.size} "
                    f"bytes: {size} bytes at {first[~inside][0]}"
                )
            yield allocation, own, first

    def load(self, lanes: np.ndarray, address: np.ndarray, size: int, text: str) -> np.ndarray:
        """[lanes, cells] of `size` bytes"""
        result = np.empty((len(lanes), size // self.unit), UNSIGNED[self.unit])
        for allocation, own, first in self._parts(address, size):
            result[own] = allocation.cells[(first // self.unit)[:, None] + np.arange(size // self.unit)]
            self._note(allocation, False, first, size, lanes[own], text)
        return result

    def store(self, lanes: np.ndarray, address: np.ndarray, values: np.ndarray, text: str) -> None:
        """Values: [lanes, ...], contiguous"""
        values = values.view(UNSIGNED[self.unit])
        size = values.shape[1] * self.unit
        for allocation, own, first in self._parts(address, size):
            allocation.cells[(first // self.unit)[:, None] + np.arange(size // self.unit)] = values[own]
            self._note(allocation, True, first, size, lanes[own], text)

    def _note(self, allocation: Allocation, writes: bool, first: np.ndarray, size: int, lanes: np.ndarray, text: str):
        cta, stamp = self.grid.cta[lanes], self.barriers.stamp(lanes)
        allocation.accesses.all.append(GlobalAccess(writes, first, size, cta, stamp, text))

    def check_races(self) -> None:
        """Raises `Race` for what CTAs did to each other's memory since the launch."""
        for each in self.allocations:
            each.accesses.check(each.name, each.size)


class SharedMemory:
    """The shared memory of all CTAs, one after the other, in cells of as many bytes as a kernel's smallest access."""

    def __init__(self, grid: Grid, size: int, unit: int, barriers: Barriers):
        self.grid, self.size, self.unit, self.barriers = grid, -(-size // unit) * unit, unit, barriers
        count = self.size // unit * (grid.size // grid.threads)
        self.cells = ~np.zeros(count, UNSIGNED[unit])
        self.written, self.arriving = np.zeros(count, bool), np.zeros(count, bool)
        self.accesses = Accesses(count, "shared memory")

    def places(self, lanes: np.ndarray, address: np.ndarray, size: int) -> np.ndarray:
        """[lanes, cells] of `size` bytes; addresses count from the start of a CTA's own."""
        if (address % size).any():
            raise Misaligned(f"shared memory: {size} bytes at {address[address % size != 0][0]}")
        if (address.astype(np.int64) + size > self.size).any():
            raise OutOfBounds(f"shared memory: {size} bytes at {address.max()} of {self.size}")
        first = (self.grid.cta[lanes] * self.size + address) // self.unit
        return first[:, None] + np.arange(size // self.unit)

    def read(self, lanes: np.ndarray, places: np.ndarray) -> np.ndarray:
        """What lanes find in places of theirs, [lanes, ...]."""
        if self.arriving[places].any():
            raise Uninitialized("shared memory: a copy to what is read has not been waited for")
        if not self.written[places].all():
            raise Uninitialized("shared memory: nothing has been written to what is read")
        self.accesses.reading(places, self.stamp(lanes, places))
        return self.cells[places]

    def load(self, lanes: np.ndarray, address: np.ndarray, size: int) -> np.ndarray:
        """[lanes, cells] of `size` bytes"""
        return self.read(lanes, self.places(lanes, address, size))

    def store(self, lanes: np.ndarray, address: np.ndarray, values: np.ndarray) -> None:
        """Values: [lanes, ...], contiguous"""
        values = values.view(self.cells.dtype)
        places = self.places(lanes, address, values.shape[1] * self.unit)
        if self.arriving[places].any():
            raise Uninitialized("shared memory: a copy to what is written has not been waited for")
        self.accesses.writing(places, self.stamp(lanes, places), self.cells[places] != values)
        self.cells[places], self.written[places] = values, True
        if (self.cells[places] != values).any():
            raise Race("shared memory: lanes write different values to the same place at once")

    def stamp(self, lanes: np.ndarray, places: np.ndarray) -> np.ndarray:
        """A number for each lane and place of when and by which warp it is touched."""
        return self.barriers.stamp(lanes).reshape(-1, *[1] * (places.ndim - 1))
