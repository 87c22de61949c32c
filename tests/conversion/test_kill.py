from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvsurgery.conversion.revert import revert
from tests.helpers.shards import convert_llama, llama_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_killed_anywhere_and_repeated(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", shards=2)
    convert_llama(source, tmp_path / "converted")
    revert(tmp_path / "converted", tmp_path / "reverted")
    # every file is opened, synced and renamed, and every moved tensor written in pieces
    assert kills("convert", source, tmp_path / "converted", stride=3) > 33
    # the same code, but for the order of its files
    assert kills("revert", tmp_path / "converted", tmp_path / "reverted", stride=7) > 14


def kills(how: str, start: Path, end: Path, stride: int) -> int:
    work = end.with_name(f"{how}-work")
    work.mkdir()
    command = [sys.executable, "-m", "tests.conversion.killing", how, str(start), str(work), str(end), str(stride)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)
