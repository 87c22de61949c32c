"""`Progress`: the callback for progress of long work."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with the amount done, the total (None if unknown), and a note."""

    def __call__(self, done: int, total: int | None, note: str = "", /) -> None: ...


def silent(*_: object) -> None:
    """Progress that is not shown."""
