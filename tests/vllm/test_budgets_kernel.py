"""The GPU's attention of budgeted heads, in Triton's interpreter, beside the CPU's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_every_step_of_a_batch_gives_what_it_gives_on_a_cpu() -> None:
    script = Path(__file__).with_name("budgets_kernel.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[2])}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
