"""`Progress`: who is told how far some work is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with what is done, of how much (None: unknown), and how it goes."""

    def __call__(self, done: int, total: int | None, note: str = "", /) -> None: ...


def silent(*_: object) -> None:
    """Progress that nobody is told of."""
