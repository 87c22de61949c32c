"""Where the family patches and the emitted templates lie: inside a wheel, or beside the package in a checkout."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent
TEMPLATES = "kvsurgery_templates"  # the package that they are imported as, wherever they lie


@cache
def folder(name: str) -> Path:
    """The folder `patches` or `templates`."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


@cache
def template_module(name: str) -> ModuleType:
    """Import a template, with those it imports, so that the tool and the emitted checkpoint run the same code."""
    if TEMPLATES not in sys.modules:
        spec = importlib.util.spec_from_loader(TEMPLATES, None, is_package=True)
        spec.submodule_search_locations.append(str(folder("templates")))
        sys.modules[TEMPLATES] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{TEMPLATES}.{name}")
