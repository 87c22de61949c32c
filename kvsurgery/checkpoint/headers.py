"""Safetensors headers, read strictly: every byte belongs to exactly one tensor, or the file is refused.

The format: 8 bytes little-endian header size, a JSON object, the tensors' bytes. The raw header is kept, so that a
rewritten shard can be byte-identical.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from blake3 import blake3

from kvsurgery.checkpoint.files import FileState, check_regular, file_state, file_status, reading, source_changed
from kvsurgery.errors import CheckpointError

# the reference implementation's own limit
MAX_HEADER_BYTES = 100_000_000

# fill a buffer with the bytes from a place on, counted from the file's first byte
Read = Callable[[memoryview, int], None]

# bits per element
DTYPES = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a shard; `start` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start


@dataclass(frozen=True)
class Shard:
    """One safetensors file: its raw header (with the 8 bytes of its size) and its tensors in file order.

    `opened` is the state of the file when its header was read. `read_at_once` is the best number of bytes of
    neighboring tensors to read at once, and `slow` means that no finished tensor should be read twice.
    """

    name: str
    path: Path
    header: bytes
    tensors: tuple[Tensor, ...]
    opened: FileState

    read_at_once: ClassVar[int] = 0
    slow: ClassVar[bool] = False

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.tensors[-1].end if self.tensors else len(self.header)

    @property
    def state(self) -> tuple[int | str | None, ...]:
        """The state of the file, which changes if it is written again or replaced."""
        return self.opened

    def check_unchanged(self) -> None:
        """Check that the file can be read, and has not changed since its header was read.

        Raises:
            SourceChanged: it was written again, or replaced.
            CheckpointError: it cannot be read.
        """
        with reading(self.path), open(self.path, "rb") as file:
            state = file_state(os.fstat(file.fileno()))
        if state != self.opened:
            raise source_changed(self.path)

    def changed_after(self, moment: int) -> bool:
        """Whether the file was written after a moment, in nanoseconds of the epoch.

        Raises:
            CheckpointError: the file cannot be read.
        """
        # ctime, since a copied file may bring an old mtime along
        return file_status(self.path).st_ctime_ns > moment

    def stop(self) -> None:
        """Cancel pending reads, because the run has failed."""

    @contextmanager
    def open(self, start: int, end: int) -> Generator[Read]:
        """Open the bytes from `start` to `end`, which are best read in order.

        Raises:
            CheckpointError: the file cannot be read, or ends early because it changed; also raised by the reader.
        """
        with reading(self.path):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

        def read(buffer: memoryview, offset: int) -> None:
            with reading(self.path):
                while buffer:
                    count = os.preadv(descriptor, [buffer], offset)
                    if count == 0:
                        raise source_changed(self.path)
                    buffer, offset = buffer[count:], offset + count

        try:
            yield read
        finally:
            os.close(descriptor)


def header_hashes(shards: Iterable[Shard]) -> dict[str, str]:
    """The hash of each shard's header, by the shard's name."""
    return {shard.name: blake3(shard.header).hexdigest() for shard in shards}


def changed_headers(shards: Iterable[Shard], recorded_hashes: Mapping[str, str]) -> list[str]:
    """The sorted names of shards with a header that differs from its hash, and of missing and unrecorded shards."""
    hashes = header_hashes(shards)
    return [
        name for name in sorted(hashes.keys() | recorded_hashes.keys()) if hashes.get(name) != recorded_hashes.get(name)
    ]


def read_shard(path: Path) -> Shard:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: the file is unreadable or breaks the format in any way.
    """
    check_regular(path)
    with reading(path), open(path, "rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + length > size:
            raise CheckpointError(f"{path} is truncated: {size} bytes do not hold its header; fetch it again")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} has a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
        header = prefix + file.read(length)
    tensors = _tensors(path, header)
    _check_extents(path, tensors, len(header), size)
    return Shard(path.name, path, header, tensors, file_state(status))


def _tensors(path: Path, header: bytes) -> tuple[Tensor, ...]:
    """The header's tensors, by offset."""
    if header[8:9] != b"{":
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object")
    try:
        entries = json.loads(header[8:].decode("utf-8"), object_pairs_hook=_distinct, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a corrupt header: {error}") from error
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path} has a corrupt header: __metadata__ must map strings to strings")
    tensors = (_tensor(path, name, entry, len(header)) for name, entry in entries.items())
    return tuple(sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)))


def _tensor(path: Path, name: str, entry: Any, base: int) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: {name!r} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name!r} has unknown dtype {dtype!r}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: {name!r} has a bad shape or bad data_offsets")
    bits = math.prod(shape) * DTYPES[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise CheckpointError(
            f"{path}: {name!r} is {dtype} {shape}, which is not the {offsets[1] - offsets[0]} bytes of its data_offsets"
        )
    return Tensor(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_extents(path: Path, tensors: tuple[Tensor, ...], base: int, size: int) -> None:
    """Check for overlaps, holes, and bytes before the first tensor or after the last."""
    end = base
    for tensor in tensors:
        if tensor.start != end:
            fault = "overlaps the tensor before it" if tensor.start < end else "leaves a hole before it"
            raise CheckpointError(f"{path}: {tensor.name!r} {fault}")
        end = tensor.end
    if end != size:
        fault = "is truncated" if size < end else "has bytes after its last tensor"
        raise CheckpointError(f"{path} {fault}: its header accounts for {end} bytes, the file has {size}")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object, and refuse duplicate keys."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"duplicate name {name!r}")
        result[name] = value
    return result


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
