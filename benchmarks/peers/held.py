"""Bytes that a cache really holds, whoever wrote it."""

from __future__ import annotations

from typing import Any

import torch


def held_bytes(thing: Any, seen: set[int] | None = None, widest: int = 8) -> int:
    """Bytes of the storage of all tensors in a cache, or in nested objects and containers.

    Storage counts whole and once: a view keeps all of what it views. A tensor that wraps others counts as what it is
    made of.

    Args:
        widest: bytes that a floating-point number counts at most: 2 for what a model in 16 bits would hold.
    """
    seen = set() if seen is None else seen
    if hasattr(thing, "__tensor_flatten__"):
        return sum(held_bytes(getattr(thing, name), seen, widest) for name in thing.__tensor_flatten__()[0])
    storage = thing.untyped_storage() if isinstance(thing, torch.Tensor) else None
    key = id(thing) if storage is None else storage._cdata
    if key in seen or isinstance(thing, type):
        return 0
    seen.add(key)
    if storage is not None:
        width = thing.itemsize
        return storage.nbytes() // width * (min(width, widest) if thing.is_floating_point() else width)
    if isinstance(thing, (list, tuple)):
        return sum(held_bytes(part, seen, widest) for part in thing)
    parts = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
    return sum(held_bytes(part, seen, widest) for part in parts.values())
