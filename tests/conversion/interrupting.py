"""Conversions that the disk is too full for, and what they would have written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsurgery.conversion.output import Output
from kvsurgery.errors import OutputError
from tests.helpers.shards import convert_llama, tree


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The disk is full when the file `name` gets written."""
    write, shard = Output.write, Output.shard

    def full(output: Output, wanted: str) -> None:
        if wanted == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Output, "write", lambda self, name, content: full(self, name) or write(self, name, content))
    monkeypatch.setattr(
        Output, "shard", lambda self, item, *args, **kw: full(self, item.name) or shard(self, item, *args, **kw)
    )


def interrupt(source: Path, out: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert until the disk is full, when the file `name` gets written."""
    with monkeypatch.context() as patch:
        fail_at(patch, name)
        with pytest.raises(OutputError, match="No space left on device; rerun the same command to resume"):
            convert_llama(source, out)


def interrupted_at(count: int, monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """Run until the disk is full, when file number `count` would have got its name."""
    replace, calls = os.replace, []

    def full(start: Path, end: Path) -> None:
        calls.append(end)
        if len(calls) == count + 1:  # the first is the journal
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(start, end)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OutputError, match="rerun the same command to resume"):
            run()


def undisturbed(source: Path) -> dict[str, bytes]:
    """The files of a conversion that nothing interrupts."""
    convert_llama(source, source.with_name("undisturbed"))
    return tree(source.with_name("undisturbed"))
