"""Bytes that a cache really holds, whoever wrote it."""

from __future__ import annotations

from typing import Any

import torch


def held_bytes(thing: Any, seen: set[int] | None = None) -> int:
    """Bytes of the storage of all tensors in a cache, or in nested objects and containers.

    Storage counts whole and once: a view keeps all of what it views. A tensor that wraps others counts as what it is
    made of.
    """
    seen = set() if seen is None else seen
    if hasattr(thing, "__tensor_flatten__"):
        return sum(held_bytes(getattr(thing, name), seen) for name in thing.__tensor_flatten__()[0])
    storage = thing.untyped_storage() if isinstance(thing, torch.Tensor) else None
    key = id(thing) if storage is None else storage._cdata
    if key in seen or isinstance(thing, type):
        return 0
    seen.add(key)
    if storage is not None:
        return storage.nbytes()
    if isinstance(thing, (list, tuple)):
        return sum(held_bytes(part, seen) for part in thing)
    parts = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
    return sum(held_bytes(part, seen) for part in parts.values())
