"""Small safetensors files: equal content gives equal bytes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from kvsurgery.errors import OutputError, ProfileError
from kvsurgery.system.files import write_bytes_whole
from kvsurgery.system.repo_id import is_address

DTYPES = {"F32": "<f4", "F16": "<f2", "I16": "<i2"}


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: its name in messages.
        format, version: the values in its metadata.
        source: how to make such a file, as text.
        dtypes: those that its tensors may have.
    """

    name: str
    format: str
    version: str
    source: str
    dtypes: tuple[str, ...] = ("F32",)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata entries that every file of the kind has."""
        return {"format": self.format, "version": self.version}


@dataclass(frozen=True, eq=False)
class TensorFile(ABC):
    """The content of a safetensors file of one kind; equal content makes equal bytes.

    Attributes:
        provenance: data, steps, seeds, tool version; free JSON.
    """

    KIND: ClassVar[Kind]
    provenance: dict[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def address(self) -> str | None:
        """The address on the Hub from which it was read, with the commit."""
        file = self.provenance.get("file")
        return file if isinstance(file, str) and is_address(file) and file.isprintable() else None

    @abstractmethod
    def content(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Metadata, in which None values are left out, and tensors of the kind's dtypes."""

    @classmethod
    @abstractmethod
    def load(cls, path: str | Path) -> Self:
        """Read and validate a file.

        Raises:
            ProfileError: it is of another kind, of an unknown version, or inconsistent.
        """

    @cached_property
    def hash(self) -> str:
        """BLAKE3 of the file that `save` writes."""
        return blake3(to_bytes(*self.content())).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the file atomically. An existing file of its kind is replaced; any other file is refused.

        Raises:
            OutputError: the path has another kind of file, or cannot be written.
        """
        path = Path(path)
        if path.exists():
            try:
                self.load(path)
            except ProfileError as error:
                raise OutputError(f"{path} exists and is not a {self.KIND.name}; give another output file") from error
        write_bytes_whole(path, to_bytes(*self.content()), self.KIND.name)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Whether the metadata of a file declare this kind."""
        if not path.is_file():
            return False
        try:
            with safe_open(path, framework="numpy") as file:
                return (file.metadata() or {}).get("format") == cls.KIND.format
        except (SafetensorError, OSError):
            return False


def to_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> bytes:
    """A safetensors file of tensors in `DTYPES`, and of metadata as strings; None is left out."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header: dict[str, dict[str, Any]] = {
        "__metadata__": {key: str(value) for key, value in metadata.items() if value is not None}
    }
    data = b""
    for name, tensor in tensors.items():
        offsets = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        data += tensor.astype(DTYPES[names[tensor.dtype]]).tobytes()
    # written by hand: the library's own `save` orders metadata at random
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def read(path: str | Path, kind: Kind) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and tensors of a file.

    Raises:
        ProfileError: it is of another kind, of an unknown version, or cannot be read.
    """
    if Path(path).exists() and not Path(path).is_file():  # of a pipe or a device, reading might never come to the end
        raise ProfileError(f"cannot read {kind.name} {path}: it is not a regular file")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != kind.format:
                raise ProfileError(f"{path} is not a {kind.name}; {kind.source}")
            if metadata.get("version") != kind.version:
                version = metadata.get("version")
                raise ProfileError(f"{path} has {kind.name} version {version}; this tool reads {kind.version}")
            names = sorted(file.keys())
            for name in names:
                dtype = file.get_slice(name).get_dtype()
                if dtype not in kind.dtypes:
                    raise ProfileError(f"{path}: {name} are {dtype}, not {' or '.join(kind.dtypes)}")
            return metadata, {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ProfileError(f"{path} is not a {kind.name} ({error}); {kind.source}") from error
    except OSError as error:
        raise ProfileError(f"cannot read {kind.name} {path}: {error}") from error
