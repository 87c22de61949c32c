"""`Output`: a folder that is being filled. Files appear whole or not at all, and a killed run can be continued."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from blake3 import blake3

from kvsurgery.checkpoint.headers import Shard
from kvsurgery.checkpoint.journal import JOURNAL, PART, Journal
from kvsurgery.checkpoint.provenance import PROVENANCE
from kvsurgery.checkpoint.side_files import chunks
from kvsurgery.checkpoint.source import CONFIG
from kvsurgery.conversion.engine import JOBS, Target, move_bytes
from kvsurgery.conversion.plan import Move
from kvsurgery.errors import OutputError
from kvsurgery.system.files import check_folder
from kvsurgery.system.locks import reserved_folder
from kvsurgery.system.sizes import size as readable


class Output:
    """An output folder that is being filled; use as a context manager. `resumed` counts bytes of shards found finished.

    Leaving it without an error removes the journal, which makes the folder an ordinary checkpoint. After an error
    finished shards and the journal stay, so that the same command goes on, or `discard` removes them.
    """

    def __init__(self, folder: Path, journal: Journal) -> None:
        self.folder = folder
        self._journal = journal
        self.resumed = 0
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        folder: Path,
        size: int,
        fingerprint: Mapping[str, str],
        finished: Mapping[str, dict[str, str]] | None = None,
        last: str = CONFIG,
    ) -> Output:
        """Check everything that can be checked before writing, then fill the folder or go on with it.

        Args:
            folder: the folder to fill, which is `reserved`.
            size: bytes that will be written.
            fingerprint: what decides the output; only a killed run with the same one is continued.
            finished: of a finished output whose side files are written again: by shard, the hashes of its tensors.
            last: name of the file without which the folder does not load, which will be written last.

        Raises:
            OutputError: the folder is not usable, the disk too small, or the fingerprint another.
        """
        with writing(folder):
            if finished is None:
                _check_empty(folder)
            check_folder(folder)
            check_space(folder, size)
            journal = Journal.open(folder, fingerprint, finished)
            (folder / last).unlink(missing_ok=True)
            return cls(folder, journal)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with self._file(name) as file:
            file.write(content)

    def copy(self, name: str, path: Path) -> str:
        """Copy a file; returns its BLAKE3."""
        hasher = blake3()
        with self._file(name) as file:
            for chunk in chunks(path):
                hasher.update(chunk)
                file.write(chunk)
        return hasher.hexdigest()

    def shard(
        self,
        shard: Shard,
        moves: Mapping[str, Move],
        *,
        inverse: bool = False,
        expected: Mapping[str, str] | None = None,
        jobs: int = JOBS,
        progress: Callable[[int], None] | None = None,
    ) -> dict[str, str]:
        """Move the bytes of a shard that are still to do; returns its tensors' hashes. Arguments as in `move_bytes`.

        Threads may call it at the same time for different shards.
        """
        path = self.folder / shard.name
        finished_hashes = dict(self._journal.finished.get(shard.name, {}))
        names = [tensor.name for tensor in shard.tensors]
        if finished_hashes.keys() == set(names) and _size(path) == shard.size:
            self._resume(shard.size)
            if progress is not None:
                progress(shard.size)
            return {name: finished_hashes[name] for name in names}
        if finished_hashes and not (shard.slow and _size(_part(path)) == shard.size):
            self._journal.record(shard.name, {})
            finished_hashes = {}
        self._resume(sum(tensor.size for tensor in shard.tensors if tensor.name in finished_hashes))
        with self._file(shard.name, keep=shard.slow) as file:

            def record(name: str, digest: str) -> None:
                os.fsync(file.fileno())
                self._journal.record(shard.name, {name: digest})

            hashes = move_bytes(
                shard,
                moves,
                Target(file.fileno(), finished_hashes, record if shard.slow else None),
                inverse=inverse,
                expected=expected,
                jobs=jobs,
                progress=progress,
            )
        if not shard.slow:
            self._journal.record(shard.name, hashes)
        return hashes

    def _resume(self, size: int) -> None:
        with self._lock:
            self.resumed += size

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                os.unlink(self._journal.path)
                _sync(self.folder)
        finally:
            self._journal.close()
        if isinstance(error, OSError):
            raise OutputError(
                f"cannot write {self.folder}: {error.strerror or error}; rerun the same command to resume"
            ) from error

    @contextmanager
    def _file(self, name: str, keep: bool = False) -> Generator[BinaryIO]:
        """A file that gets its name once it is on disk; its mode is left to the umask.

        On an error it is removed, or with `keep` stays, and the next run opens it as it is.
        """
        path = self.folder / name
        part = _part(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "r+b" if keep and part.exists() else "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            if not keep:
                with suppress(OSError):
                    os.unlink(part)
            raise
        _sync(path.parent)

    def remove(self, name: str) -> None:
        """Remove a file that an earlier conversion wrote, and the folders that held nothing else."""
        (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            for folder in Path(name).parents:
                (self.folder / folder).rmdir()

    def discard(self, names: Iterable[str]) -> None:
        """Remove what this run and those before it wrote of the named files, and the folders made for them."""
        paths = [self.folder / name for name in names]
        with writing(self.folder):
            for path in [*paths, *map(_part, paths), self._journal.path]:
                path.unlink(missing_ok=True)
        folders = {folder for path in paths for folder in path.parents if self.folder in folder.parents}
        for folder in sorted(folders, reverse=True):
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def reserved(folder: Path, source: Path) -> Generator[None]:
    """Inside, a folder to fill is there, and no other process fills it; afterwards it is gone if nothing is in it.

    Raises:
        OutputError: another process fills it, it is the source or lies in it, or it cannot be made.
    """
    with writing(folder):
        check_outside(folder, source)
    with reserved_folder(folder):
        yield


@contextmanager
def writing(folder: Path) -> Generator[None]:
    """Inside, an output folder is looked at or changed.

    Raises:
        OutputError: the system does not allow it.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}") from error


def check_no_other(folder: Path) -> None:
    """Check, before a checkpoint is downloaded, that a folder holds nothing but a conversion, finished or not.

    Raises:
        OutputError: it holds something else.
    """
    if not (folder / PROVENANCE).exists():
        _check_empty(folder)


def check_outside(folder: Path, source: Path) -> None:
    """Check that a folder is not the source, and no part of it.

    Raises:
        OutputError: it is.
    """
    resolved_folder = folder.resolve()
    resolved_source = source.resolve()
    if resolved_folder == resolved_source or resolved_source in resolved_folder.parents:
        raise OutputError(f"{folder} is the source or inside it; choose another folder")


def _check_empty(folder: Path) -> None:
    if folder.is_dir():
        names = set(os.listdir(folder))
        if JOURNAL not in names and names - {JOURNAL + PART}:
            raise OutputError(f"{folder} is not empty; choose another folder")


def check_space(folder: Path, size: int) -> None:
    """Raise OutputError where a folder, which need not be there yet, has no room for this many bytes."""
    free_bytes = shutil.disk_usage(_nearest_existing(folder)).free
    if folder.is_dir():
        # what an interrupted run left is kept or overwritten; .part files have holes, so count blocks
        size -= sum(512 * entry.stat().st_blocks for entry in os.scandir(folder))
    if size > free_bytes:
        raise OutputError(f"{folder} needs {readable(size)}, but only {readable(free_bytes)} are free there")


def _nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    ancestor = folder.resolve()
    while not ancestor.exists():
        ancestor = ancestor.parent
    return ancestor


def _part(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(path.name + PART)


def _size(path: Path) -> int:
    """Bytes of a file, -1 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems cannot sync a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
