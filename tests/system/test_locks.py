"""Outputs that one process at a time writes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvsurgery.errors import OutputError
from kvsurgery.system.locks import reserved_file, reserved_folder

HOLDER = """
import sys
from pathlib import Path
from kvsurgery.system import locks
with getattr(locks, sys.argv[1])(Path(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""
both = pytest.mark.parametrize("kind", [reserved_file, reserved_folder])


@both
def test_one_process_has_it_until_it_dies(tmp_path: Path, kind: AbstractContextManager[None]) -> None:
    path = tmp_path / "out"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, kind.__name__, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(OutputError, match=f"another process is writing {path}; wait for it"), kind(path):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with kind(path), pytest.raises(OutputError, match="another process"), kind(path):
        pass
    assert not [*tmp_path.glob("*.lock")]


def test_a_folder_that_holds_something_stays(tmp_path: Path) -> None:
    with reserved_folder(tmp_path / "new" / "out"):
        (tmp_path / "new" / "out" / "file").touch()
    assert (tmp_path / "new" / "out" / "file").exists()


@both
def test_what_cannot_be_written(tmp_path: Path, kind: AbstractContextManager[None]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot write .*file/out"), kind(tmp_path / "file" / "out"):
        pass
