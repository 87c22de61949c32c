"""Evaluation tasks, one module or package each: its `TASK` is a frozen dataclass that is a `Task`.

Commands find tasks by the names of their modules, and offer the fields that are a `setting` as options. Modules import
neither torch nor transformers before samples are made, so that `--help` is fast.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvsurgery.evaluate.sample import Task


@cache
def task_classes() -> Mapping[str, type[Task]]:
    """Every task by its name, in alphabetical order."""
    names = sorted(module.name for module in iter_modules(__path__))
    return MappingProxyType({name: import_module(f"{__name__}.{name}").TASK for name in names})
