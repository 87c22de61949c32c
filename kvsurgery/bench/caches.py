"""The caches of transformers for comparison, and the bytes that a cache holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import QuantizedCache

WIDTHS = {"quanto": (4, 2), "hqq": (8, 4, 2)}  # bits that each backend of QuantizedCache supports
STATES = "conv_states", "recurrent_states"  # of layers that have both keys and states
STEP = 64  # tokens; backends that scale keys per channel need prompts of a multiple of these


def stored_bytes(thing: Any) -> int:
    """Bytes of all tensors in nested containers; a tensor that wraps others counts as the tensors inside."""
    if hasattr(thing, "__tensor_flatten__"):
        return sum(stored_bytes(getattr(thing, name)) for name in thing.__tensor_flatten__()[0])
    if isinstance(thing, torch.Tensor):
        return thing.nbytes
    if isinstance(thing, dict):
        return stored_bytes([*thing.values()])
    return sum(map(stored_bytes, thing)) if isinstance(thing, (list, tuple)) else 0


def cache_bytes(cache: Any) -> int:
    """Bytes of keys and values that a cache holds, without the states of linear attention."""
    if hasattr(cache, "allocated_bytes"):
        return cache.allocated_bytes()
    stored = [vars(layer) for layer in cache.layers if hasattr(layer, "keys")]
    return sum(stored_bytes([part for name, part in one.items() if name not in STATES]) for one in stored)


def unusable(make: Callable[[], QuantizedCache]) -> str:
    """The reason why a kind of cache does not run here, in one sentence; empty if it runs."""
    states = torch.ones(1, 1, STEP, STEP)
    try:
        cache = make()
        cache.update(states, states, 0)
        cache.update(states, states, 0)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[0].partition(". ")[0]
    return ""
