"""Format sizes in bytes."""

from __future__ import annotations


def size(count: float) -> str:
    """A number of bytes as text: 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
