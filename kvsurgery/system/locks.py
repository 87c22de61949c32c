"""Locks on output folders and files. A lock ends with its process, even if the process is killed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from kvsurgery.errors import OutputError
from kvsurgery.system.files import check_file, check_folder

LOCK = ".lock"


@contextmanager
def reserved_folder(folder: Path) -> Generator[None]:
    """Create and lock a folder inside the block, and remove it afterwards if it is empty.

    Raises:
        OutputError: another process writes to it, or it cannot be created.
    """
    if not os.path.isdir(folder):  # unlike Path.is_dir, it answers for names that are too long
        check_folder(folder)
    made_folders = [path for path in (folder, *folder.absolute().parents) if not os.path.exists(path)]
    descriptor = _locked(folder, partial(_open_folder, folder), folder)
    try:
        yield
    finally:
        with suppress(OSError):
            for path in made_folders:
                path.rmdir()
        os.close(descriptor)


@contextmanager
def reserved_file(path: Path) -> Generator[None]:
    """Lock a file inside the block, by a lock file beside it that is removed afterwards.

    Raises:
        OutputError: another process writes the file, or it cannot be written.
    """
    check_file(path)
    lock_path = path.with_name(path.name + LOCK)
    descriptor = _locked(lock_path, partial(os.open, lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), path)
    try:
        yield
    finally:
        lock_path.unlink(missing_ok=True)
        os.close(descriptor)


def lock(descriptor: int, path: Path) -> None:
    """Lock a path until the descriptor of its lock is closed, which also happens when the process dies.

    Raises:
        OutputError: another process has the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"another process is writing {path}; wait for it, or choose another output") from None
    except OSError:
        # some network file systems have no locks, and many lock a file that is open for writing, but no folder
        pass


def _locked(lock_path: Path, open_lock: Callable[[], int | None], path: Path) -> int:
    """Open the lock of a path, and create it if necessary; None if another process has just removed it."""
    while True:
        try:
            descriptor = open_lock()
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error
        if descriptor is None:
            continue
        try:
            lock(descriptor, path)
            if lock_path.exists() and os.path.samestat(lock_path.stat(), os.fstat(descriptor)):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open_folder(folder: Path) -> int | None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:  # another process, which had made it, has just removed it
        return None
