"""The host's work in an eager decode step. Counts have ceilings; time depends on load."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from benchmarks import host_work


def test_a_layer_has_three_launches_and_no_more_operations_than_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "host-work.json"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(sys, "argv", ["host_work.py", "--layers", "2", "--steps", "2", "--json", str(path)])
    host_work.main()
    stock, *ours = json.loads(path.read_text())["contenders"].values()
    assert stock["launches"] == 0
    for found in ours:
        assert found["launches"] == 3
        assert found["operations"] <= stock["operations"]
        assert found["microseconds"] > 0
    assert "| 4 bits |" in capsys.readouterr().out
