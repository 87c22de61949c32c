"""Names of files and tensors by patterns."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of the patterns; `*` spans slashes."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
