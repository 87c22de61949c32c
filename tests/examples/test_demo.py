"""What the demo prints is what the tour shows."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks


@pytest.mark.slow
def test_the_demo_ends_with_the_table_of_the_tour(tmp_path: Path) -> None:
    [shown] = blocks("docs/tour.md", "text")
    table = [line.rstrip() for line in shown.splitlines()]
    run = [sys.executable, ROOT / "examples/demo.py", "demo"]
    printed = subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert [line.rstrip() for line in printed.rstrip().splitlines()[-len(table) :]] == table
