"""Which cases of a test run: some of them for a change, and with CASES=all (`make test-all`) every one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

ALL = os.environ.get("CASES") == "all"
# of tests that take long and show more of what others show
ONLY_IN_ALL = pytest.mark.skipif(not ALL, reason="make test-all runs it")

Case = TypeVar("Case")


def some(cases: Iterable[Case], step: int = 3) -> list[Case]:
    """Every case where all are asked for, otherwise one in `step`, from the first on."""
    return [*cases] if ALL else [*cases][::step]
