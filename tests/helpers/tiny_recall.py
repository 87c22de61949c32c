"""The bundled model's folder, the task that it was trained for, and the ablation of its heads."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "examples" / "tiny-recall"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tiny_recall_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


task, ablation = _script("task"), _script("ablation")
