"""The GPU's attention of streaming heads, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_kernel_sees_sinks_and_window_and_no_block_that_is_freed() -> None:
    script = Path(__file__).with_name("streaming_kernel.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[2])}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
