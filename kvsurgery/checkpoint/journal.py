"""The journal of an unfinished output folder: its fingerprint, and the finished tensors.

Each line is a JSON object. The first line is written atomically; a line that a crash left incomplete is dropped. Each
other line adds tensors of one shard; a line without tensors means that the shard starts over. Each line has a checksum:
tensors before a changed line are not trusted, and are written again.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from kvsurgery.errors import CheckpointError, OutputError
from kvsurgery.system.locks import lock

JOURNAL = ".kvsurgery-journal"
PART = ".part"


def check_finished(folder: Path) -> None:
    """Check that a folder has no unfinished conversion.

    Raises:
        CheckpointError: it has one.
    """
    if (folder / JOURNAL).exists():
        raise CheckpointError(f"{folder}: its conversion was interrupted; run the same command again to finish it")


class Journal:
    """The finished tensors of an output folder's shards, with their hashes."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.path = folder / JOURNAL
        self.finished: dict[str, dict[str, str]] = {}
        self._descriptor = descriptor
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, folder: Path, fingerprint: Mapping[str, str], finished: Mapping[str, dict[str, str]] | None = None
    ) -> Journal:
        """Start a journal, or continue the one with the same fingerprint.

        Args:
            finished: the content of a new journal: by shard, the hashes of the tensors that are already finished.

        Raises:
            OutputError: another process writes to the folder, or the fingerprint differs.
        """
        path = folder / JOURNAL
        if not path.exists():
            _create(path, fingerprint, finished or {})
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            lock(descriptor, folder)
            content = path.read_bytes()
            end = content.rfind(b"\n") + 1
            lines = [_parse(line) for line in content[:end].splitlines()]
            _compare(folder, lines[0] if lines else {}, fingerprint)
            os.ftruncate(descriptor, end)
        except BaseException:
            os.close(descriptor)
            raise
        journal = cls(folder, descriptor)
        for line in lines[1:]:
            if line == _entry(line.get("shard"), line.get("tensors")):
                journal._add(line["shard"], line["tensors"])
            else:
                journal.finished.clear()
        return journal

    def record(self, shard: str, tensors: dict[str, str]) -> None:
        """Record that tensors of a shard are on disk; without tensors, record that the shard has none."""
        line = json.dumps(_entry(shard, tensors)) + "\n"
        with self._lock:
            with os.fdopen(os.dup(self._descriptor), "ab") as file:
                file.write(line.encode())
            os.fsync(self._descriptor)
            self._add(shard, tensors)

    def _add(self, shard: str, tensors: dict[str, str]) -> None:
        if tensors:
            self.finished.setdefault(shard, {}).update(tensors)
        else:
            self.finished.pop(shard, None)

    def close(self) -> None:
        """Close the journal, so that another process can continue it."""
        os.close(self._descriptor)


def recorded_fingerprint(folder: Path) -> dict[str, str] | None:
    """The fingerprint of the unfinished run in a folder; None without such a run, or if its journal is damaged."""
    try:
        with open(folder / JOURNAL, "rb") as file:
            return _parse(file.readline()).get("fingerprint")
    except OSError:
        return None


def _entry(shard: object, tensors: object) -> dict[str, object]:
    """The text of a line, with its checksum."""
    entry = {"shard": shard, "tensors": tensors}
    return {**entry, "checksum": blake3(json.dumps(entry).encode()).hexdigest()}


def _create(path: Path, fingerprint: Mapping[str, str], finished: Mapping[str, dict[str, str]]) -> None:
    lines = [{"fingerprint": dict(fingerprint)}, *(_entry(shard, tensors) for shard, tensors in finished.items())]
    part = path.with_name(path.name + PART)
    with open(part, "wb") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _parse(line: bytes) -> dict:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _compare(folder: Path, first_line: dict, fingerprint: Mapping[str, str]) -> None:
    old_fingerprint = first_line.get("fingerprint")
    if not isinstance(old_fingerprint, dict):
        raise OutputError(f"{folder / JOURNAL} is damaged; `overwrite` {folder}, or choose another folder")
    changed_parts = [part for part, value in fingerprint.items() if old_fingerprint.get(part) != value]
    if changed_parts:
        raise OutputError(
            f"{folder} holds an unfinished run with another {' and '.join(changed_parts)}; "
            "repeat that command, `overwrite` it, or choose another folder"
        )
