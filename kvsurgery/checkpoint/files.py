"""Checks for files of a checkpoint folder, which may change while they are read, or be links to other places."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from kvsurgery.errors import CheckpointError, SourceChanged

# inode, size and time of the last write; not the time of the inode's change, which other modes or links change too
FileState = tuple[int, int, int]


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Turn errors of reading a file of a checkpoint into CheckpointError.

    Raises:
        CheckpointError: the system cannot read the file.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def file_status(path: Path) -> os.stat_result:
    """Size and times of a file.

    Raises:
        CheckpointError: it cannot be read.
    """
    with reading(path):
        return path.stat()


def file_state(status: os.stat_result) -> FileState:
    """The state of a file, which changes if the file is written again or replaced."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def source_changed(path: Path) -> SourceChanged:
    """The error for a file that changed after the conversion was planned."""
    return SourceChanged(f"{path} changed while it was read; convert again when nothing else writes to its folder")


def check_regular(path: Path) -> None:
    """Check that a path, if it exists, is a regular file, because reading another kind may never end.

    Raises:
        CheckpointError: it is not a regular file.
    """
    with reading(path):
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is not a regular file")


def check_link(folder: Path, name: str) -> None:
    """Check that a file of a folder is not a link out of it, whose content would become part of the output.

    Allowed are links to files of the folder that are not hidden and, in a snapshot of the Hub's cache, links to the
    blobs of its repository.

    Raises:
        CheckpointError: the file, or a folder above it, is another link.
    """
    path, root = folder / name, folder.resolve()
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # a loop is a RuntimeError up to Python 3.12
        raise CheckpointError(f"cannot read {path}: it is a link that leads nowhere") from error
    if target.is_relative_to(root):
        inner_path = target.relative_to(root)
        if inner_path == Path(name) or not any(part.startswith(".") for part in inner_path.parts):
            return
        raise CheckpointError(f"{path} is a link to a hidden file, {inner_path}; put a copy in its place, or remove it")
    if any(target.parent == above.parent / "blobs" for above in root.parents if above.name == "snapshots"):
        return
    raise CheckpointError(
        f"{path} is a link to {target}, outside of {folder}; remove it, put a copy in its place, or give the "
        "folder that has the files themselves"
    )
