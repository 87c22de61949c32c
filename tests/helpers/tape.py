"""A stand-in for CUDA graphs that runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Notes every operation of a step, to do the same operations on the same memory again, as a CUDA graph does.

    What the host knew when the step was noted stays as it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.replays = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.note(function, args, kwargs or {})

    def note(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, result))
        return result

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, result in self.calls:
            for old, fresh in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                if torch.is_tensor(old) and old.data_ptr() != fresh.data_ptr():
                    old.copy_(fresh)


def noted(function: Callable) -> Callable:
    """A function that a tape notes as one operation, whatever it calls."""

    def run(*args: Any, **kwargs: Any) -> Any:
        active = torch.utils._python_dispatch._get_current_dispatch_mode()
        with _disable_current_modes():
            return active.note(function, args, kwargs) if active else function(*args, **kwargs)

    return run
