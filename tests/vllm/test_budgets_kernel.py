"""The GPU's attention of budgeted heads, in Triton's interpreter: beside the CPU's, and in an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["budgets_kernel.py", "budgeted_codes_kernel.py", "budgets_engine.py"])
def test_every_step_gives_what_it_gives_on_a_cpu(name: str) -> None:
    script = Path(__file__).with_name(name)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[2])}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
