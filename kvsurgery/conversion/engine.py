"""One loop for converting, reverting and verifying: read, hash and write a shard's tensors window by window.

Tensors are independent, so threads take them in file order: while one waits for the disk or the network, another hashes
or shuffles (pread, pwrite, BLAKE3 and numpy's take all release the GIL). A tensor is always walked, and hashed, in the
order of the original checkpoint, so its bytes can come from a stream; going back, a window is gathered from the places
where the plan sent them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from kvsurgery.checkpoint.headers import Read, Shard, Tensor
from kvsurgery.conversion.plan import Move
from kvsurgery.errors import Mismatch

JOBS = 4
MAX_JOBS = 32
# bytes; a thread holds two windows, and what is read should still be in its cache when it is hashed and written
WINDOW = 1 << 20
# pieces of this length are sent to the disk at once; left to the kernel, all would wait for the fsync at the end
FLUSH = 256 << 10


@dataclass(frozen=True)
class Target:
    """A shard's file that is written.

    Attributes:
        descriptor: of the open file.
        finished: hashes of tensors that are written already.
        record: called with the name and the hash of every tensor that is written, from any thread.
    """

    descriptor: int
    finished: Mapping[str, str] = field(default_factory=dict)
    record: Callable[[str, str], None] | None = None


def move_bytes(
    shard: Shard,
    moves: Mapping[str, Move],
    target: Target | None = None,
    *,
    inverse: bool = False,
    expected: Mapping[str, str] | None = None,
    jobs: int = JOBS,
    progress: Callable[[int], None] | None = None,
) -> dict[str, str]:
    """Move one shard's bytes.

    Args:
        shard: the shard to read: original, or with `inverse` converted.
        moves: by tensor name, from the original to the converted checkpoint.
        target: the file to write, including the header; None only hashes.
        expected: hashes that the tensors must have.
        jobs: threads; more than `MAX_JOBS` gain nothing.
        progress: called with bytes done, from any thread.

    Returns:
        By tensor name in file order, the BLAKE3 of its bytes in the original order.

    Raises:
        CheckpointError: the shard cannot be read, or ends early.
        Mismatch: a tensor does not have its expected hash.
        OSError: the target cannot be written.
    """
    digests = dict(target.finished) if target else {}
    descriptor = target.descriptor if target else None
    failures: list[BaseException] = []
    pending = iter(_neighbors(shard, digests))

    def work() -> None:
        buffers = np.empty((2, WINDOW), np.uint8)
        for tensors in pending:
            try:
                with shard.open(tensors[0].start, tensors[-1].end) as read:
                    for tensor in tensors:
                        move(tensor, read, buffers)
            except BaseException as failure:
                fail(failure)
            if failures:
                return

    def fail(reason: BaseException) -> None:
        failures.append(reason)
        shard.stop()

    def move(tensor: Tensor, read: Read, buffers: np.ndarray) -> None:
        hasher = blake3()
        for count in _windows(tensor, moves[tensor.name], read, descriptor, inverse, buffers, hasher):
            if failures:
                raise failures[0]
            if progress is not None:
                progress(count)
        digests[tensor.name] = hasher.hexdigest()
        if expected is not None and expected.get(tensor.name) != digests[tensor.name]:
            raise Mismatch(f"{tensor.name} in {shard.path} differs from the recorded bytes")
        if target is not None and target.record is not None:
            target.record(tensor.name, digests[tensor.name])

    if descriptor is not None:
        os.ftruncate(descriptor, shard.size)
        _write(descriptor, memoryview(shard.header), 0)
    if progress is not None:
        progress(len(shard.header) + sum(tensor.size for tensor in shard.tensors if tensor.name in digests))
    with ThreadPoolExecutor(MAX_JOBS) as pool:
        try:
            for worker in [pool.submit(work) for _ in range(min(jobs, MAX_JOBS))]:
                worker.result()
        except BaseException as interrupt:
            fail(interrupt)
    if failures:
        raise failures[0]
    return {tensor.name: digests[tensor.name] for tensor in shard.tensors}


def _neighbors(shard: Shard, finished: Mapping[str, str]) -> list[list[Tensor]]:
    """The unfinished tensors of a shard in file order, in groups of neighbors of at most `read_at_once` bytes."""
    groups: list[list[Tensor]] = []
    for tensor in shard.tensors:
        if tensor.name in finished:
            continue
        if groups and groups[-1][-1].end == tensor.start and tensor.end - groups[-1][0].start <= shard.read_at_once:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    return groups


def _windows(
    tensor: Tensor,
    move: Move,
    read: Read,
    target: int | None,
    inverse: bool,
    buffers: np.ndarray,
    hasher: blake3,
) -> Iterator[int]:
    """Read, hash and write one tensor; yields the bytes of each window done."""
    step, columns = WINDOW, move.columns
    if columns is not None:
        step -= WINDOW % columns.row
    for start in range(0, tensor.size, step):
        length = min(step, tensor.size - start)
        original_pieces, converted_pieces = [(start, 0, length)], list(_scatter(move, start, length))
        source_pieces, target_pieces = (
            (converted_pieces, original_pieces) if inverse else (original_pieces, converted_pieces)
        )
        window, scratch = buffers[0][:length], buffers[1][:length]
        for place, offset, count in source_pieces:
            read(window[offset : offset + count].data, tensor.start + place)
        if columns is not None and inverse:
            window = _shuffle(window, scratch, columns.block, np.argsort(columns.order))
        hasher.update(window.data)
        if target is not None:
            if columns is not None and not inverse:
                window = _shuffle(window, scratch, columns.block, np.asarray(columns.order))
            for place, offset, count in target_pieces:
                _write(target, window[offset : offset + count].data, tensor.start + place)
        yield length


def _scatter(move: Move, start: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(place in the converted tensor, offset in the window, bytes) of the pieces of one window of the original."""
    for run in move.runs:
        first = max(run.source, start)
        last = min(run.source + run.length, start + length)
        if first < last:
            yield run.destination + first - run.source, first - start, last - first


def _shuffle(rows: np.ndarray, out: np.ndarray, block: int, order: np.ndarray) -> np.ndarray:
    """Copy rows of `len(order)` blocks to `out`, so that place p holds block order[p]."""
    shape = (-1, len(order), block)
    # with mode "raise", take goes through a buffer of its own
    np.take(rows.reshape(shape), order, axis=1, out=out.reshape(shape), mode="clip")
    return out


def _write(target: int, data: memoryview, place: int) -> None:
    start, length = place, len(data)
    while data:
        count = os.pwrite(target, data, place)
        data, place = data[count:], place + count
    if length >= FLUSH and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(target, start, length, os.POSIX_FADV_DONTNEED)
