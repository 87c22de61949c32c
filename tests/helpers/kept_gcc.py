"""gcc that compiles each loop in C once: checkpoints, processes and tests that need the same one get a copy.

Run as a script: the folder of what is kept, and gcc's arguments, which read standard input.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def keep_compiled() -> None:
    """Let this process, and those that it starts, compile so."""
    if shutil.which("gcc") is None:
        return
    folder = tempfile.mkdtemp(prefix="kvsurgery-compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = Path(folder, "gcc")
    command.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", "-S", __file__, folder])} "$@"\n')
    command.chmod(0o755)
    os.environ["CC"] = str(command)


def main(folder: str, *arguments: str) -> int:
    source = sys.stdin.buffer.read()
    library = arguments[arguments.index("-o") + 1]
    others = [argument for argument in arguments if argument != library]
    kept = Path(folder, hashlib.sha256(repr(others).encode() + source).hexdigest())
    if not kept.exists():
        code = subprocess.run(["gcc", *arguments], input=source).returncode
        if code:
            return code
        own = kept.with_name(f"{kept.name}.{os.getpid()}")
        shutil.copy(library, own)
        own.replace(kept)
    else:
        shutil.copy(kept, library)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
