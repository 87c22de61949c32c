"""Peak memory of tensors, and free memory."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PLAIN = (torch.Tensor, torch.nn.Parameter)
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# limit and use, of cgroups v2 and v1; without a limit v2 says "max", and v1 some 2^63 bytes
CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


class LiveBytes(TorchDispatchMode):
    """The peak number of bytes in tensors that are created inside a block."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if FakeTensor in types:  # shapes without memory, by which distributed tensors are planned
            return func(*args, **(kwargs or {}))
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a tensor of several others: its own operations on those come here
        input_storages = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and (storage := tensor.untyped_storage())._cdata not in input_storages:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self._live_bytes() > self.peak:
            self._forget()
            self.peak = max(self.peak, self._live_bytes())
        return result

    def take(self) -> int:
        """The peak since the last call; the next peak starts from the bytes held now."""
        self._forget()
        peak, self.peak = self.peak, self._live_bytes()
        return peak

    def _forget(self) -> None:
        """Drop the storages that are gone."""
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}

    def _live_bytes(self) -> int:
        return sum(size for _, size in self.storages.values())


class CudaBytes:
    """The peak number of bytes that a block allocates on a CUDA device beyond the bytes on entry."""

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> CudaBytes:
        self.bytes_before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def take(self) -> int:
        """The peak since the last call; the next peak starts from the bytes held now."""
        peak = torch.cuda.max_memory_allocated(self.device) - self.bytes_before
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


def peak_of(device: torch.device) -> LiveBytes | CudaBytes:
    """A context manager that measures the memory peak of the work inside."""
    return CudaBytes(device) if device.type == "cuda" else LiveBytes()


def free_bytes(device: torch.device) -> int:
    """Bytes that tensors can still take on a device; on a CPU, within the limit of the container."""
    if device.type == "cuda":
        unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused_bytes
    return int(min(_machine_bytes(), _container_bytes()))


def _machine_bytes() -> int:
    if MEMINFO.exists():
        [line] = [line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container_bytes() -> float:
    """Bytes that the memory limit of this container leaves; cached files count as free, as in MemAvailable."""
    for limit, usage in CGROUP_FILES:
        limit_path = CGROUP / limit
        if limit_path.exists() and (size := limit_path.read_text().strip()) != "max":
            stat = dict(line.split() for line in limit_path.with_name("memory.stat").read_text().splitlines())
            return int(size) - int((CGROUP / usage).read_text()) + int(stat["active_file"]) + int(stat["inactive_file"])
    return math.inf
