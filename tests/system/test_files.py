"""Files that are whole or not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvsurgery.system.files import write_whole


def test_what_a_killed_write_left_is_removed_by_the_next(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    others = ["a.json.part", f"a.json.{os.getppid()}.part", f"b.json.{dead.pid}.part", "a.json.mine.part"]
    for name in [f"a.json.{dead.pid}.part", *others]:
        (tmp_path / name).touch()
    write_whole(tmp_path / "a.json", "{}")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", *others}
