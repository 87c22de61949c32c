"""The bundled model's folder, and the task that it was trained for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "tiny-recall"

_spec = importlib.util.spec_from_file_location("tiny_recall_task", FOLDER / "task.py")
task = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = task
_spec.loader.exec_module(task)
