"""Sizes in bytes, in words."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes for people: 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
