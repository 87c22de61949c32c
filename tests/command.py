"""The command line as a user has it: what is typed, and what comes back."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from kvsurgery.cli import main

# what a progress bar's line begins with
BARS = ("converting", "reverting", "verifying")


@dataclass(frozen=True)
class Result:
    """Exit code, stdout and stderr of one command."""

    code: int
    out: str
    err: str


def run(*arguments: Any) -> Result:
    """Run `kvsurgery` with these arguments in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    typed = ["kvsurgery", *map(str, arguments)]
    with patch.object(sys, "argv", typed), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return Result(code, out.getvalue(), err.getvalue())


def done(*arguments: Any) -> Result:
    """Run a command that works."""
    result = run(*arguments)
    assert result.code == 0, result.err
    return result


def refused(*arguments: Any, code: int = 1) -> str:
    """Run a command that fails, and return the line that says why: the only one but for a progress bar's."""
    result = run(*arguments)
    assert result.code == code, result
    assert result.out == ""
    *bars, line = [line for line in result.err.splitlines() if line.strip()]
    assert all(bar.startswith(BARS) for bar in bars), result.err
    assert line.startswith("kvsurgery: "), result.err
    return line
