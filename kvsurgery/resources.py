"""Where the family patches and the emitted templates lie: inside a wheel, or beside the package in a checkout."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent


@cache
def folder(name: str) -> Path:
    """The folder `patches` or `templates`."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


@cache
def template_module(name: str) -> ModuleType:
    """Import one self-contained template, so that the tool and the emitted checkpoint run the same code."""
    spec = importlib.util.spec_from_file_location(f"kvsurgery_template_{name}", folder("templates") / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
