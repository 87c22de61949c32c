"""Checks before files are written, atomic writes, and JSON documents of this tool."""

from __future__ import annotations

import csv
import glob
import io
import json
import math
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvsurgery.errors import KVSurgeryError, OutputError, TextError

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # possibly the escape of half a character; `ESCAPE` decides
# an escape of valid JSON: both halves of a character, one without the other, or anything else
ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F]..)|.)")


def check_file(path: Path) -> None:
    """Check that a file can be written, before the work whose result it will hold.

    Raises:
        OutputError: it is a folder, its folder is missing, or there is no permission.
    """
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder; give a file")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {path}: no permission in {path.parent}")


def check_new_file(path: Path) -> None:
    """Check that a new file can be written, before the work whose result it will hold.

    Raises:
        OutputError: as `check_file`, or the file exists.
    """
    check_file(path)
    if path.exists():
        raise OutputError(f"{path} exists; choose another file")


def check_folder(folder: Path) -> None:
    """Check that files can be written to a folder, which need not exist yet, before the work that produces them.

    Raises:
        OutputError: it or its parent is not a folder, or there is no permission.
    """
    existing_path = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing_path.is_dir():
        raise OutputError(f"cannot write {folder}: {existing_path} is not a folder; choose another")
    if not os.access(existing_path, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {folder}: no permission in {existing_path}")


def check_readable(path: str | Path) -> None:
    """Check that a file can be read, so that long work does not fail at its end.

    Raises:
        KVSurgeryError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise KVSurgeryError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def reading_text(path: str | Path, label: str = "") -> Generator[None]:
    """Turn errors of reading a user's text file into TextError; `label` says what the file is, such as "needles".

    Raises:
        TextError: the file cannot be read, or is not UTF-8.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise TextError(f"cannot read {label and label + ' '}{path}: {error.strerror}") from error


def parse_json(text: str) -> Any:
    """Parse JSON, and refuse strings with half of a character, which tokenizers and files cannot take.

    Raises:
        ValueError: it is not JSON, or a string has half of a character, a lone surrogate such as "\\ud83d".
        RecursionError: it is nested too deeply.
    """
    value = json.loads(text)
    if SURROGATE.search(text):
        for escape in ESCAPE.finditer(text):
            if half := escape["half"]:
                message = f"\\{half} is half of a character; write both halves, or leave it out"
                raise json.JSONDecodeError(message, text, escape.start())
    return value


def json_values(value: Any) -> Any:
    """A value of a dataclass's `asdict` as plain JSON values; NaN and infinities become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: json_values(entry) for name, entry in value.items()}
    return [*map(json_values, value)] if isinstance(value, list | tuple) else value


def write_whole(path: Path, content: str) -> None:
    """Write a text file atomically: with all of its content, or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    write_bytes_whole(path, content.encode(), "")


def write_bytes_whole(path: Path, content: bytes, label: str) -> None:
    """Write a file of bytes atomically: with all of its content, or not at all.

    A failed write leaves nothing behind. The part that a killed write left is removed by the next one.

    Raises:
        OutputError: the file cannot be written; the message calls it `label`.
    """
    # of this process alone: another one may write the same file
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        _remove_stale_parts(path)
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        raise OutputError(f"cannot write {label and label + ' '}{path}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            part.unlink()


def _remove_stale_parts(path: Path) -> None:
    """Remove the parts of a file whose processes were killed while they wrote it."""
    for part in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        process = part.name.removeprefix(f"{path.name}.").removesuffix(".part")
        if process.isascii() and process.isdigit() and not _is_alive(int(process)):
            part.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:  # it is another user's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same names as CSV, atomically."""
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0] if rows else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, file.getvalue())


@contextmanager
def document(path: Path, kind: tuple[str, int], command: str) -> Generator[dict[str, Any]]:
    """Read a JSON document, check its format and version, and turn errors inside the block into one about the file.

    Args:
        kind: the format and version that the document must have.
        command: the command that writes it, such as "kvsurgery eval".

    Raises:
        KVSurgeryError: the file is missing, has another format or version, or has malformed content.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (content.pop("format"), content.pop("version")) != kind:
            raise ValueError("another format or version")
        yield content
    except OSError as error:
        raise KVSurgeryError(f"cannot read {path}: {error.strerror}; run `{command}` first") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise KVSurgeryError(f"{path} is not what this version of `{command}` writes: {error}") from error


def differences(left: Any, right: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The differences between two documents: the path of keys and both values, down to the first non-object."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in dict.fromkeys([*left, *right]):
            yield from differences(left.get(key), right.get(key), (*keys, key))
    elif left != right:
        yield keys, left, right
