"""The house: rooms import downwards only, and functions stay small enough to read."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def imports(path: Path, package: str, files: dict[str, Path]) -> Iterator[str]:
    """Modules that a file imports anywhere, also inside of functions and for types alone, as absolute names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([package] * bool(node.level) + [node.module] * bool(node.module))
            names = (f"{base}.{alias.name}" for alias in node.names)
            yield from (name if name in files else base for name in names)


def graph(files: dict[str, Path], rooms: bool) -> dict[str, set[str]]:
    """What each module imports of the others; with `rooms`, each subpackage counts as one."""
    edges = defaultdict(set)
    for name, path in files.items():
        for target in imports(path, name.rpartition(".")[0], files):
            if target in files and target != name:
                start, end = (".".join(each.split(".")[:2]) if rooms else each for each in (name, target))
                if start != end:
                    edges[start].add(end)
    return edges


@pytest.mark.parametrize("rooms", [False, True], ids=["modules", "rooms"])
def test_nothing_imports_in_a_circle(rooms: bool) -> None:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "kvsurgery").rglob("*.py")
    }
    files |= {f"kvsurgery.templates.{path.stem}": path for path in (ROOT / "templates").glob("kv_*.py")}
    assert len(files) > 100
    try:
        TopologicalSorter(graph(files, rooms)).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


LONGEST, MOST = 60, 8  # lines of code and parameters of a function
THEIRS = {"kvsurgery/vllm/cpu.py: forward"}  # has the signature that vLLM calls


def test_functions_are_short() -> None:
    """Kernels and click commands are excepted: they spell out their arguments."""
    found = []
    for folder in ("kvsurgery", "templates"):
        for path in (ROOT / folder).rglob("*.py"):
            lines = path.read_text().splitlines()
            for node in ast.walk(ast.parse("\n".join(lines))):
                if not isinstance(node, ast.FunctionDef):
                    continue
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
                body = node.body[1:] if ast.get_docstring(node) else node.body
                first = body[0].lineno if body else node.end_lineno
                code = [line for line in lines[first - 1 : node.end_lineno] if line.strip() and line.strip()[0] != "#"]
                name = f"{path.relative_to(ROOT)}: {node.name}"
                excepted = name in THEIRS or "click" in decorators or "jit" in decorators
                if (len(code) > LONGEST or count > MOST) and not excepted:
                    found.append(f"{name}, {len(code)} lines, {count} parameters")
    assert not found, "\n".join(found)
