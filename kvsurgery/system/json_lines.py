"""JSONL files that survive a kill: records are appended, and an incomplete last line is removed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvsurgery.errors import KVSurgeryError
from kvsurgery.system.files import json_values, parse_json


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a JSONL file, none if it is missing, and remove an incomplete last line from the file.

    Raises:
        KVSurgeryError: an earlier line is not a JSON object.
    """
    if not path.exists():
        return []
    complete_lines, newline, torn_line = path.read_bytes().rpartition(b"\n")
    if torn_line:
        os.truncate(path, len(complete_lines) + len(newline))
    records = []
    for number, line in enumerate(complete_lines.split(b"\n") if newline else [], 1):
        try:
            records.append(parse_json(line.decode()))
            if not isinstance(records[-1], dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            raise damaged(path, number, str(error)) from error
    return records


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a JSONL file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(lines(records))


def lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Records as JSONL; NaN and infinities become null."""
    return "".join(json.dumps(json_values(record), ensure_ascii=False) + "\n" for record in records)


def damaged(path: Path, number: int, reason: str) -> KVSurgeryError:
    """The error for a damaged line."""
    return KVSurgeryError(f"{path}, line {number} is damaged: {reason}; remove the file to run anew")
