"""Messages of the library name fields in backticks, for Python callers too; the command line shows options instead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kvsurgery.cli.options import flag
from kvsurgery.cli.recipe_options import in_flags
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


def test_every_setting_becomes_its_flag() -> None:
    for kind in (*task_classes().values(), *METHODS.values()):
        for setting in settings_of(kind).values():
            assert in_flags(f"`{setting.option}`") == flag(setting.option)


def test_fields_in_backticks_become_flags() -> None:
    said = in_flags("give another `device`, leave out `resume`, or name it: `base_model` NAME; `generate` runs it")
    assert said == "give another --device, leave out --resume, or name it: --base-model NAME; `generate` runs it"
