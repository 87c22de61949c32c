"""The GPU's attention over quantized tiles in Triton's interpreter, beside the CPU's and from a stand-in for graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["codes_kernel.py", "codes_graph.py"])
def test_every_step_gives_what_it_gives_on_a_cpu_and_from_a_graph(name: str) -> None:
    script = Path(__file__).with_name(name)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[2])}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
