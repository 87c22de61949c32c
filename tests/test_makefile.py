"""Which Python `make` takes for its environment: tried with commands on a PATH that has no others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAKE = shutil.which("make")
pytestmark = pytest.mark.skipif(MAKE is None, reason="make is not installed")

WORKS = 'exec {python} "$@"'
# Debian's Python without the package python3-venv; a Python of before; a command of pyenv without a version for it
NO_VENV = 'exec {python} -I -c \'import sys; sys.modules["ensurepip"] = None; exec(sys.argv[-1])\' "$@"'
OLD = "exec {python} -I -c 'import sys; sys.version_info = (3, 10, 12); exec(sys.argv[-1])' \"$@\""
UNCHOSEN = 'echo "pyenv: command not found" >&2; exit 127'
OTHER_VERSION = 'if [ "$1" = -V ]; then echo Python 3.9.99; else ' + WORKS + "; fi"

Make = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """What making `.venv` would run, where these are the only commands: their names, and what each of them does."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def run(commands: dict[str, str], *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        for name, line in commands.items():
            write_command(tmp_path / "commands" / name, line)
        return subprocess.run(
            [MAKE, "--dry-run", ".venv/ready", *arguments],
            cwd=tmp_path,
            env={"PATH": str(tmp_path / "commands"), **environment},
            capture_output=True,
            text=True,
        )

    return run


def write_command(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line.format(python=sys.executable)}\n")
    path.chmod(0o755)


def makes_environment_with(python: str, done: subprocess.CompletedProcess) -> bool:
    return done.returncode == 0 and f"\n{python} -m venv .venv\n" in done.stdout


@pytest.mark.parametrize(
    ("commands", "taken"),
    [
        ({"python3.11": WORKS, "python3.12": WORKS}, "python3.11"),
        ({"python3.13": WORKS, "python3.12": WORKS}, "python3.12"),
        ({"python3.14": WORKS}, "python3.14"),
        ({"python3": WORKS}, "python3"),
        ({"python3.11": UNCHOSEN, "python3.12": UNCHOSEN, "python3.13": WORKS}, "python3.13"),
        ({"python3.11": NO_VENV, "python3.12": WORKS}, "python3.12"),
        ({"python3": OLD, "python3.12": WORKS}, "python3.12"),
    ],
)
def test_the_first_python_that_works_is_taken(commands: dict[str, str], taken: str, make: Make) -> None:
    done = make(commands)
    assert makes_environment_with(taken, done)
    assert not done.stderr


@pytest.mark.parametrize("commands", [{}, {"python3.11": UNCHOSEN}, {"python3.13": NO_VENV}, {"python3": OLD}])
def test_without_any_one_line_says_what_to_install(commands: dict[str, str], make: Make) -> None:
    done = make(commands)
    assert done.returncode
    [line] = done.stderr.splitlines()
    assert "python3-venv" in line
    assert "PYTHON=" in line


def test_the_python_that_is_asked_for_wins(make: Make) -> None:
    commands = {"python3.11": WORKS, "python3.13": WORKS}
    assert makes_environment_with("python3.13", make(commands, "PYTHON=python3.13"))
    assert makes_environment_with("python3.13", make(commands, PYTHON="python3.13"))


@pytest.mark.parametrize("line", [OLD, NO_VENV, UNCHOSEN])
def test_one_that_is_asked_for_and_does_not_work_is_named(line: str, make: Make) -> None:
    done = make({"python3.11": WORKS, "my-python": line}, "PYTHON=my-python")
    assert done.returncode
    [line] = done.stderr.splitlines()
    assert "my-python" in line


def test_settings_of_the_callers_python_do_not_decide(make: Make) -> None:
    assert makes_environment_with("python3.12", make({"python3.12": WORKS}, PYTHONHOME="/nowhere"))


class TestAnEnvironmentThatIsThere:
    @pytest.fixture(autouse=True)
    def _environment(self, tmp_path: Path, make: Make) -> None:
        write_command(tmp_path / ".venv" / "bin" / "python", WORKS)
        (tmp_path / ".venv" / "ready").touch()

    def test_it_is_kept(self, make: Make) -> None:
        for commands, arguments in (({}, []), ({"python3": OTHER_VERSION}, []), ({"mine": WORKS}, ["PYTHON=mine"])):
            done = make(commands, *arguments)
            assert done.returncode == 0
            assert "-m venv" not in done.stdout

    def test_another_python_that_is_asked_for_replaces_it(self, make: Make) -> None:
        done = make({"mine": OTHER_VERSION}, "PYTHON=mine")
        assert makes_environment_with("mine", done)
        assert "rm -rf .venv\n" in done.stdout

    def test_new_requirements_are_added_to_it(self, tmp_path: Path, make: Make) -> None:
        os.utime(tmp_path / ".venv" / "ready", (0, 0))
        done = make({"python3.12": WORKS})
        assert makes_environment_with("python3.12", done)
        assert "rm -rf .venv\n" not in done.stdout
