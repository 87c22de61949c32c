"""The house: rooms import downwards only, a line assigns one thing, and docstrings say what a thing is."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(parsed(path))]


def imports(path: Path, package: str, files: dict[str, Path]) -> Iterator[str]:
    """Modules that a file imports anywhere, also inside of functions and for types alone, as absolute names."""
    for node in nodes(path):
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


@pytest.mark.parametrize("room", ["checkpoint", "heads", "policy", "emit", "conversion"])
def test_the_domain_knows_no_presentation(room: str) -> None:
    """Nothing that decides or writes a checkpoint imports a screen or a chart; `inspect` alone asks vLLM's planner."""
    targets = {name for path in (ROOT / "kvsurgery" / room).rglob("*.py") for name in imports(path, "", {})}
    assert targets
    found = {".".join(name.split(".")[:2]) for name in targets if name.startswith("kvsurgery.")}
    assert not found & {"kvsurgery.display", "kvsurgery.report", "kvsurgery.cli"}
    assert ("kvsurgery.vllm" in found) == (room == "conversion")


def sources() -> Iterator[tuple[str, ast.Module]]:
    """The product's code by its place."""
    paths = [path for folder in ("kvsurgery", "templates") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 100
    for path in paths:
        yield path.relative_to(ROOT).as_posix(), parsed(path)


def crowded(tree: ast.AST) -> Iterator[int]:
    """Lines of assignments that do the work of several: a tuple of which two elements or more compute, by a call or a
    comprehension, and an unpacked loop over a tuple that is spelt out."""
    computing = (ast.Call, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
            continue
        if isinstance(node.value, ast.Tuple):
            count = sum(any(isinstance(part, computing) for part in ast.walk(item)) for item in node.value.elts)
            if count > 1:
                yield node.lineno
        is_loop = isinstance(node.value, ast.GeneratorExp | ast.ListComp)
        if is_loop and isinstance(node.value.generators[0].iter, ast.Tuple):
            yield node.lineno


def test_a_line_assigns_one_thing() -> None:
    assert {place: lines for place, tree in sources() if (lines := [*crowded(tree)])} == {}


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("a, b = f(x), g(y)", 1),
        ("a, b = [i for i in x], f(y) + 1", 1),
        ("a, b = (f(i) for i in (x, y))", 1),
        ("a, b = f(x), 0", 0),
        ("a, b = b, a", 0),
        ("a, b = x.shape", 0),
        ("a, b = (f(i) for i in pairs)", 0),
    ],
)
def test_what_a_crowded_line_is(code: str, count: int) -> None:
    assert len([*crowded(ast.parse(code))]) == count


Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def is_public(node: ast.AST) -> bool:
    if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
        return False
    return not any(ast.unparse(decorator).endswith((".setter", "overload")) for decorator in node.decorator_list)


def public(tree: ast.Module) -> Iterator[tuple[str, Documented, bool]]:
    """A module and its public classes, functions and methods by name, and whether a base may say what each does."""
    yield "", tree, False
    for node in filter(is_public, tree.body):
        yield node.name, node, False
        for method in filter(is_public, node.body if isinstance(node, ast.ClassDef) else ()):
            yield f"{node.name}.{method.name}", method, bool(node.bases)


def fault(node: Documented, inherits: bool) -> str | None:
    """What is wrong with a docstring: its first line is a sentence or ends in a colon, and needs no neighbor."""
    lines = (ast.get_docstring(node) or "").splitlines()
    if not lines:
        return None if inherits else "is missing"
    if not lines[0].endswith((".", ":")) or any(lines[1:2]):
        return "does not end with its first line"
    return "leans on another" if re.match("The same |As `|Such ", lines[0]) else None


def test_the_first_line_of_a_docstring_stands_alone() -> None:
    found = {
        f"{place} {name}".rstrip(): reason
        for place, tree in sources()
        for name, node, inherits in public(tree)
        if (reason := fault(node, inherits))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("docstring", "reason"),
    [
        ("", "is missing"),
        ("Bytes of a cache.", None),
        ("Bytes of a cache.\n\n    With more.", None),
        ("Bytes of a cache that goes\n    on.", "does not end with its first line"),
        ("Bytes of a cache: of\n    all.", "does not end with its first line"),
        ("Bytes of a cache.\n    With more.", "does not end with its first line"),
        ("The same of a cache.", "leans on another"),
        ("As `bytes`, of a cache.", "leans on another"),
    ],
)
def test_what_a_fault_of_a_docstring_is(docstring: str, reason: str | None) -> None:
    [function] = ast.parse(f'def f():\n    """{docstring}"""').body
    assert fault(function, inherits=False) == reason
