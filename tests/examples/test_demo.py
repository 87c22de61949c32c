"""What the demo prints: commands as one types them, and at the end the table that the README shows."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, session
from tests.docs.test_documentation import check


@pytest.mark.slow
def test_the_demo_shows_its_commands_and_ends_with_the_documented_table(tmp_path: Path) -> None:
    [shown] = blocks("README.md", "text")
    table = [line.rstrip() for line in shown.splitlines()]
    run = [sys.executable, "examples/demo.py", tmp_path / "demo"]
    printed = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert [line.rstrip() for line in printed.rstrip().splitlines()[-len(table) :]] == table
    commands = session(printed)
    assert len(commands) == 7
    for command in commands:
        check(command)
    assert commands[0].line == "kvsurgery profile show examples/tiny-recall/profile.safetensors"
