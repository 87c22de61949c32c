"""Read published files: check sizes, JSON and tables, and record the source."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from kvsurgery.errors import ProfileError
from kvsurgery.profile.profiled_model import ProfiledModel
from kvsurgery.version import TOOL

# 128 layers x 128 heads x 1,000 trials of 20 characters come to a third of it
LARGEST_SCORES_FILE = 1 << 30


def read(path: Path, max_bytes: int | None = None) -> bytes:
    """The bytes of a file, `LARGEST_SCORES_FILE` at most unless `max_bytes` is given.

    Raises:
        ProfileError: it cannot be read, or is too large for head scores.
    """
    max_bytes = LARGEST_SCORES_FILE if max_bytes is None else max_bytes
    try:
        with open(path, "rb") as file:
            is_too_large = os.fstat(file.fileno()).st_size > max_bytes
            raw = b"" if is_too_large else file.read(max_bytes + 1)  # a device or a pipe has no size
    except OSError as error:
        raise ProfileError(f"cannot read {path}: {error.strerror}") from error
    if is_too_large or len(raw) > max_bytes:
        raise ProfileError(f"{path} is over {max_bytes >> 20:,} MiB; this is not a file of head scores")
    return raw


def origin(method: str, path: Path, raw: bytes) -> dict[str, str]:
    """The entry in a profile's provenance about the imported file."""
    return {"source": path.name, "blake3": blake3(raw).hexdigest(), "origin": method, "tool": TOOL}


def parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    """Parse a JSON object, and refuse duplicate keys.

    Raises:
        ProfileError: it is not a JSON object, or has a duplicate key.
    """
    try:
        value = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ProfileError(f"{path} holds no JSON object")
    return value


def parse_table(path: Path, raw: bytes, number_of: Callable[[Path, int, str], float]) -> np.ndarray:
    """float64 [lines, columns] of tab-separated cells.

    A byte order mark, comments, quotes around numbers, and blank lines at the end are accepted.

    Args:
        number_of: converts a cell of the file to a number, given the path, the number of its line, and its text.

    Raises:
        ProfileError: lines differ in length, or `number_of` refuses a cell.
    """
    encoding = "utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    text = raw.decode(encoding, "replace")
    if "\0" in text:
        raise ProfileError(f"{path} is not a table of tab-separated numbers")
    lines = text.splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    rows = {
        number: [number_of(path, number, _unquoted(cell)) for cell in line.split("\t")]
        for number, line in enumerate(lines, 1)
        if not line.lstrip().startswith("#")
    }
    first_number = next(iter(rows), 0)
    columns = len(rows[first_number]) if rows else 0
    for number, row in rows.items():
        if len(row) != columns:
            raise ProfileError(f"{path}, line {number}: {len(row)} scores, but {columns} in line {first_number}")
    return np.array([*rows.values()], dtype=np.float64).reshape(len(rows), columns)


def _unquoted(cell: str) -> str:
    """A cell without blanks and quotes around it."""
    cell = cell.strip()
    for quote in ("'", '"'):
        if len(cell) > 1 and cell[0] == cell[-1] == quote:
            return cell[1:-1].strip()
    return cell


def read_shares(path: Path, slack: float, noun: str, model: ProfiledModel) -> tuple[np.ndarray, bytes]:
    """float64 [layers, kv_heads]: a file's tab-separated numbers from 0 to 1, clipped; and the file's bytes.

    Args:
        slack: how far outside of [0, 1] a number may be.
        noun: the name of a number in messages, such as "DuoAttention gate".

    Raises:
        ProfileError: the file is unreadable, not such a table, or of another shape.
    """

    def share(path: Path, number: int, cell: str) -> float:
        try:
            score = float(cell)
        except ValueError:
            raise ProfileError(f"{path}, line {number}: {cell[:40]!r} is not a number") from None
        if not -slack <= score <= 1 + slack:
            raise ProfileError(f"{path}, line {number}: {score} is outside [0, 1]; this is not a {noun}")
        return score

    raw = read(path)
    scores = np.clip(parse_table(path, raw, share), 0, 1)
    check_kv_heads(path, scores.shape, model)
    return scores, raw


def check_kv_heads(path: Path, shape: Sequence[int], model: ProfiledModel) -> None:
    """Check that a shape has one score for every KV head of a model.

    Raises:
        ProfileError: it does not.
    """
    dimensions = model.dimensions
    if tuple(shape) != (dimensions.layers, dimensions.kv_heads):
        raise ProfileError(
            f"{path} holds {' x '.join(map(str, shape)) or 'no'} scores, but {model.name} has {dimensions.layers} "
            f"layers of {dimensions.kv_heads} KV heads; was another model measured?"
        )


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number within float32: not NaN, infinity or a whole number of a thousand digits."""
    return type(value) in (int, float) and abs(value) < 1e38


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is given twice")
    return result
