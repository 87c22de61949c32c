"""Run a conversion, or its way back, that gets killed at its n-th system call; a program, since forks want no threads.

    python -m tests.conversion.killing convert SOURCE WORK EXPECTED STRIDE
    python -m tests.conversion.killing revert CONVERTED WORK EXPECTED STRIDE

For every n, or every STRIDE-th, it kills one run with SIGKILL, repeats the command, and compares the result with
EXPECTED. Prints how many runs it killed; the exit code is not 0 for the first difference.
"""

from __future__ import annotations

import builtins
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsurgery.checkpoint.journal import JOURNAL
from kvsurgery.conversion.revert import revert
from tests.helpers.shards import convert_llama, tree

CALLS = ("fsync", "ftruncate", "mkdir", "open", "pwrite", "replace", "unlink")


def killed_at(moment: int, run: Callable[[], object]) -> bool:
    """Whether a child that runs `run` was killed just before its call number `moment`."""
    child = os.fork()
    if child == 0:
        calls = itertools.count(1)

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*arguments: Any, **options: Any) -> Any:
                if next(calls) == moment:
                    if call is os_pwrite:
                        call(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
                    os.kill(os.getpid(), signal.SIGKILL)
                # a kill loses nothing that fsync would save, and syncing takes most of the time
                return None if call is os_fsync else call(*arguments, **options)

            return wrapper

        os_pwrite, os_fsync = os.pwrite, os.fsync
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        builtins.open = counted(builtins.open)
        run()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"run failed before call {moment}")
    return False


def main(how: str, source: Path, work: Path, expected: Path, stride: int) -> None:
    out = work / "out"
    run = {"convert": lambda: convert_llama(source, out, jobs=2), "revert": lambda: revert(source, out, jobs=2)}[how]
    wanted = tree(expected)
    kills = 0
    for moment in itertools.count(1, stride):
        if not killed_at(moment, run):
            break
        kills += 1
        names = tree(out) if out.exists() else {}
        if "config.json" in names and JOURNAL in names and len(names) != len(wanted) + 1:
            raise SystemExit(f"killed before call {moment}: config.json lies in half an output")
        # the second run is killed too, once, somewhere else
        killed_at(1 + moment % 7, run)
        if killed_at(0, run) or tree(out) != wanted:
            raise SystemExit(f"killed before call {moment}: the repeated run wrote something else")
        shutil.rmtree(out)
    print(kills)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:5]), int(sys.argv[5]))
