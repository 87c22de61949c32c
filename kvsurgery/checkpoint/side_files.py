"""Files beside the weights. All but a deny-list are copied, since a tokenizer's files can have any name."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvsurgery.checkpoint.files import FileState, check_link, file_state, file_status, reading
from kvsurgery.checkpoint.patterns import matches
from kvsurgery.errors import CheckpointError, cut

LEFT_OUT_FOLDERS = (
    ".*",
    "__pycache__",
    "checkpoint-*",
    "coreml",
    "gguf",
    "global_step*",
    "metal",
    "onnx",
    "openvino",
    "original",
    "runs",
)
# weights in other formats, pickles, and what a download or a training run leaves behind
LEFT_OUT = (
    ".*",
    "*.bin",
    "*.ckpt",
    "*.gguf",
    "*.ggml",
    "*.h5",
    "*.incomplete",
    "*.index.json",
    "*.index.*.json",
    "*.lock",
    "*.mlmodel",
    "*.msgpack",
    "*.npy",
    "*.npz",
    "*.onnx",
    "*.onnx_data",
    "*.ot",
    "*.part",
    "*.pickle",
    "*.pkl",
    "*.pt",
    "*.pth",
    "*.py",
    "*.safetensors",
    "*.tflite",
    "kvsurgery.json",
)
# not copied, but their bytes are kept for `revert`
KEPT = ("*.py", ".gitattributes")
MAX_KEPT_BYTES = 4 << 20
# a path of bytes, and folders in folders, beyond which some program or disk fails
MAX_PATH_BYTES, MAX_FOLDERS = 1000, 50


@dataclass(frozen=True)
class SideFiles:
    """The files of a checkpoint without weights; names are relative, with slashes.

    Attributes:
        copied: names of files that are copied unchanged.
        originals: bytes of files that conversion replaces or leaves out, and `revert` restores.
        left_out: names of all other files; folders end with a slash.
    """

    copied: tuple[str, ...]
    originals: dict[str, bytes]
    left_out: tuple[str, ...]


def side_files(
    folder: Path, weights: Collection[str], replaced_names: Collection[str], needed_code: Collection[str] = ()
) -> SideFiles:
    """Classify a checkpoint's files, apart from its `weights` and their index.

    Args:
        folder: the checkpoint.
        weights: names of its shards.
        replaced_names: files that conversion writes.
        needed_code: code files that a tokenizer or a processor needs, which are copied.

    Raises:
        CheckpointError: a file cannot be read, or is a link to nothing.
    """
    copied: list[str] = []
    originals: dict[str, bytes] = {}
    left_out: list[str] = []
    for name in walk(folder):
        base = name.rpartition("/")[2]
        if name in weights:
            continue
        if name in needed_code:
            copied.append(name)
        elif name in replaced_names or _is_kept(folder, name, base):
            with reading(folder / name):
                originals[name] = (folder / name).read_bytes()
        elif name.endswith("/") or matches(base.lower(), LEFT_OUT):
            left_out.append(name)
        else:
            copied.append(name)
    return SideFiles(tuple(copied), originals, tuple(left_out))


def _is_kept(folder: Path, name: str, base: str) -> bool:
    return matches(base, KEPT) and file_status(folder / name).st_size <= MAX_KEPT_BYTES


def survey(folder: Path) -> dict[str, FileState]:
    """The state of each file beside the weights that conversion reads, by name.

    Raises:
        CheckpointError: a file cannot be read, is not a regular file, or is a broken link or a link out of the folder.
    """
    states: dict[str, FileState] = {}
    for name, is_readable in _entries(folder):
        if not name.endswith("/") and not _is_left_out(name):
            if not is_readable:
                raise CheckpointError(f"{folder / name} is not a regular file; remove it")
            check_link(folder, name)
            states[name] = file_state(file_status(folder / name))
    return states


def _is_left_out(name: str) -> bool:
    """Whether conversion ignores a file's content, or reads it as weights."""
    base = name.rpartition("/")[2]
    return matches(base.lower(), LEFT_OUT) and not matches(base, KEPT)


def walk(folder: Path) -> Iterator[str]:
    """Names of the regular files in a fixed order, following links; a skipped folder is a single name.

    Raises:
        CheckpointError: a file cannot be read, lies too deep, or is a link to nothing.
    """
    return (name for name, is_readable in _entries(folder) if is_readable)


def _entries(folder: Path, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """The names of `walk` and of other entries such as pipes, each with whether it is such an entry."""
    with reading(folder):
        names = sorted(os.listdir(folder))
    for name in names:
        path, relative = folder / name, prefix + name
        if len(os.fsencode(relative)) > MAX_PATH_BYTES or relative.count("/") > MAX_FOLDERS:
            raise CheckpointError(
                f"{cut(str(path))} lies in more than {MAX_FOLDERS} folders, or its path is longer than "
                f"{MAX_PATH_BYTES} bytes; move it out of the checkpoint"
            )
        with reading(path):
            mode = path.lstat().st_mode
            is_link = stat.S_ISLNK(mode)
            is_file = path.is_file()
            is_folder = path.is_dir()
        if is_folder and (is_link or matches(name.lower(), LEFT_OUT_FOLDERS)):
            yield f"{relative}/", True
        elif is_folder:
            yield from _entries(path, f"{relative}/")
        elif is_link and not path.exists() and not _is_left_out(name):
            raise CheckpointError(f"{path} is a broken link; fetch the file again")
        else:
            yield relative, is_file or (is_link and not path.exists())


def file_hash(path: Path) -> str:
    """The BLAKE3 of a file's bytes.

    Raises:
        CheckpointError: it cannot be read.
    """
    hasher = blake3()
    for chunk in chunks(path):
        hasher.update(chunk)
    return hasher.hexdigest()


def chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file in pieces.

    Raises:
        CheckpointError: the file cannot be read, so that callers can distinguish this from their own write errors.
    """
    with reading(path), open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk
