"""Files beside the weights. All but a deny-list are copied, since a tokenizer's files can have any name."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kvsurgery.checkpoint.headers import reading
from kvsurgery.errors import CheckpointError

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


@dataclass(frozen=True)
class SideFiles:
    """The files of a checkpoint that hold no weights; names are relative, with slashes.

    Attributes:
        copied: names of files that are copied as they are.
        originals: bytes of files that conversion replaces or leaves out, and `revert` restores.
        left_out: names of all others; folders end with a slash.
    """

    copied: tuple[str, ...]
    originals: dict[str, bytes]
    left_out: tuple[str, ...]


def side_files(
    folder: Path, weights: Collection[str], replaced_names: Collection[str], needed_code: Collection[str] = ()
) -> SideFiles:
    """Sort a checkpoint's files, apart from its `weights` and their index.

    Args:
        folder: the checkpoint.
        weights: names of its shards.
        replaced_names: files that conversion writes.
        needed_code: files of code that are copied, since a tokenizer or a processor runs them.

    Raises:
        CheckpointError: a file cannot be read, or is a link to nothing.
    """
    copied: list[str] = []
    originals: dict[str, bytes] = {}
    left_out: list[str] = []
    try:
        for name in walk(folder):
            base = name.rpartition("/")[2]
            if name in weights:
                continue
            if name in needed_code:
                copied.append(name)
            elif name in replaced_names or _is_kept(folder, name, base):
                originals[name] = (folder / name).read_bytes()
            elif name.endswith("/") or matches(base.lower(), LEFT_OUT):
                left_out.append(name)
            else:
                copied.append(name)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
    return SideFiles(tuple(copied), originals, tuple(left_out))


def _is_kept(folder: Path, name: str, base: str) -> bool:
    return matches(base, KEPT) and (folder / name).stat().st_size <= MAX_KEPT_BYTES


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the patterns; `*` spans slashes."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def walk(folder: Path, prefix: str = "") -> Iterator[str]:
    """Names of the regular files in a fixed order, following links; a folder that is left out is one name."""
    for name in sorted(os.listdir(folder)):
        path = folder / name
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            if matches(name.lower(), LEFT_OUT_FOLDERS):
                yield f"{prefix}{name}/"
            else:
                yield from walk(path, f"{prefix}{name}/")
        elif path.is_file():
            yield prefix + name
        elif path.is_dir():
            yield f"{prefix}{name}/"
        elif stat.S_ISLNK(mode):
            raise CheckpointError(f"{path} is a link to nothing; fetch it again")


def chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file in pieces.

    Raises:
        CheckpointError: it cannot be read; a caller that writes can tell this from an error of its own.
    """
    with reading(path), open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk
