"""Messages of the library name fields in backticks, for Python callers too; the command line shows options instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest

from kvsurgery.cli.convert import convert
from kvsurgery.cli.evaluate import evaluate
from kvsurgery.cli.help import in_options
from kvsurgery.cli.options import flag
from kvsurgery.cli.profile.compute import compute
from kvsurgery.cli.sweep import sweep
from kvsurgery.evaluate.tasks import task_classes
from kvsurgery.measure.methods import METHODS
from kvsurgery.setting import settings_of

ROOT = Path(__file__).parent.parent
# files and folders whose strings spell options
EXCEPTED = (
    "kvsurgery/cli",
    "kvsurgery/vllm",  # vLLM's own options
    "kvsurgery/profile/published.py",  # builds command lines
)
COMMAND = re.compile(r"`kvsurgery [^`]*`|torchrun --nproc-per-node")  # whole commands may be a fix
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string but docstrings, of f-strings with `{}` for each value."""
    tree = ast.parse(source)
    passed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                passed.add(node.body[0].value)
        elif isinstance(node, ast.JoinedStr):
            passed |= {*node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in passed:
            yield node.lineno, node.value


def flags(source: str) -> list[tuple[int, str]]:
    """Line and name of every option that strings spell outside of whole commands."""
    return [(line, name) for line, text in strings(source) for name in FLAG.findall(COMMAND.sub("", text))]


def test_the_library_spells_no_flags() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted((ROOT / "kvsurgery").rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith(EXCEPTED)
        for line, name in flags(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_flags_are_found_in_messages_alone() -> None:
    source = '''"""Takes --docs."""
def check(size):
    """Raise where --size is small."""
    raise ValueError(f"{size} is small; "
        f"give a larger --size than {size} or --no-size")
    raise ValueError("no file; make one with `kvsurgery convert --out DIR`, or well-known--things, or `size`")
'''
    assert flags(source) == [(4, "--size"), (4, "--no-size")]


@pytest.mark.parametrize(
    ("command", "kinds"), [(evaluate, task_classes()), (sweep, task_classes()), (compute, METHODS)]
)
def test_every_setting_becomes_its_flag(command: click.Command, kinds: Mapping[str, type]) -> None:
    with click.Context(command):
        for kind in kinds.values():
            for setting in settings_of(kind).values():
                assert in_options(f"`{setting.option}`") == flag(setting.option)


def test_fields_in_backticks_become_flags_of_the_command_that_runs() -> None:
    message = "give another `device`, leave out `resume` or `kv_bits`; `generate` runs it"
    with click.Context(compute):
        assert in_options(message) == "give another --device, leave out --resume or `kv_bits`; `generate` runs it"
    with click.Context(evaluate):
        assert in_options("`hidden` of `tasks`") == "--passkey-hidden of --tasks"
    with click.Context(convert):
        assert in_options("`kv_bits`, `reform.chunk` or `out`") == "--kv-bits, --reform-chunk or --out"
