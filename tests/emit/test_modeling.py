"""The modeling code of a checkpoint: valid for every family, no module too few or too many."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from itertools import product

import pytest

from kvsurgery import __version__
from kvsurgery.checkpoint.family import Family, load_family, supported
from kvsurgery.checkpoint.model import Model
from kvsurgery.emit.modeling import Needs, code_files, modeling_code
from kvsurgery.templates.kv_generation import require_transformers

ALL = Needs(reform=True, budgets=True, holds=True, quantized=True)
NEEDS = [
    Needs(),
    Needs(reform=True),
    Needs(budgets=True),
    Needs(budgets=True, holds=True),
    Needs(quantized=True),
    Needs(kernels=False),
    Needs(budgets=True, holds=True, quantized=True, kernels=False),
    ALL,
]


def family(name: str) -> Family:
    inner = load_family(name).text[-1:]
    config = {"model_type": name, **({"text_config": {"model_type": inner[0]}} if inner else {})}
    return Model.of(config).family


@cache  # families share most modules
def relative_imports(code: bytes) -> set[str]:
    """The modules of the checkpoint that one of its files imports."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return {f"{module}.py" for module in found}


@pytest.mark.parametrize(
    ("name", "needs"),
    [*product(supported(), [Needs(), ALL]), *product(["llama"], NEEDS[1:-1])],
    ids=str,
)
def test_a_checkpoint_has_what_its_code_imports_and_no_more(name: str, needs: Needs) -> None:
    files = code_files(family(name), needs)
    modeling, *modules = files
    assert modeling == f"modeling_kvsurgery_{name}.py"
    assert relative_imports(files[modeling]) == set(modules)  # transformers 4 copies no others
    needed, reached = {modeling}, set()
    while needed:
        reached |= needed
        needed = {module for each in needed for module in needed_imports(files[each], files)} - reached
    assert reached == set(files)


def needed_imports(code: bytes, files: Iterable[str]) -> set[str]:
    """The same without what only type checkers read, and without what functions import that is not there."""
    return runtime_imports(code) - (imports_in_functions(code) - set(files))


@cache
def imports_in_functions(code: bytes) -> set[str]:
    """The modules of the checkpoint that its functions import when they are called."""
    functions = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)]
    return {module for node in functions for module in relative_imports(ast.unparse(node).encode())}


@cache
def runtime_imports(code: bytes) -> set[str]:
    """The same without what only type checkers read."""
    tree = ast.parse(code)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node))]
    return relative_imports(ast.unparse(tree).encode())


def test_no_module_imports_one_that_imports_it() -> None:
    files = code_files(family("llama"), ALL)
    TopologicalSorter({name: runtime_imports(code) for name, code in files.items()}).prepare()


def names(**needs: bool) -> set[str]:
    return {name.removeprefix("kv_").removesuffix(".py") for name in code_files(family("llama"), Needs(**needs))}


def test_a_checkpoint_has_no_code_that_it_does_not_need() -> None:
    plain, budgets, holds = names(), names(budgets=True), names(budgets=True, holds=True)
    assert names(reform=True) - plain == {"received", "encode", "gather", "reform"}
    assert budgets - plain == {"received", "budget", "compact"}
    assert holds - budgets == {"hold", "move", "reselect"}
    assert names(quantized=True) - plain == {"codes", "cpu", "tiles", "pack", "packed"}
    assert names(quantized=True, budgets=True, holds=True) - holds - names(quantized=True) == {
        "move_codes",
        "token_codes",
    }
    assert plain - names(kernels=False) == {"cuda", "decode", "graph", "kernels", "prefill", "store"}


@pytest.mark.parametrize("quantized", [False, True])
def test_code_without_kernels_never_names_triton(quantized: bool) -> None:
    needs = Needs(reform=True, budgets=True, holds=True, quantized=quantized, kernels=False)
    assert not any(b"import triton" in code for code in code_files(family("llama"), needs).values())


def test_every_checkpoint_has_the_same_text_of_a_module() -> None:
    """transformers 4 loads a module once for all folders of one name."""
    texts: dict[str, set[bytes]] = {}
    for needs in NEEDS:
        _, *modules = code_files(family("llama"), needs).items()
        for name, code in modules:
            texts.setdefault(name, set()).add(code)
    assert {name for name, found in texts.items() if len(found) > 1} == set()


def test_plain_code_is_short() -> None:
    def lines(needs: Needs) -> int:
        return sum(code.count(b"\n") for code in code_files(family("llama"), needs).values())

    assert lines(Needs()) <= 4_800
    assert lines(Needs(kernels=False)) <= 3_400


@pytest.mark.parametrize("name", supported())
def test_classes_are_those_that_the_config_names(name: str) -> None:
    code = code_files(family(name), ALL)[f"modeling_kvsurgery_{name}.py"]
    classes = [node.name for node in ast.parse(code).body if isinstance(node, ast.ClassDef)]
    assert classes == [*dict.fromkeys(family(name).classes.values())]


def test_every_file_says_what_it_is_its_license_and_the_version() -> None:
    for code in code_files(family("llama"), ALL).values():
        license, version, *_ = code.decode().splitlines()
        assert license == "# SPDX-License-Identifier: Apache-2.0"
        assert f"kvsurgery {__version__}" in version
        assert ast.get_docstring(ast.parse(code))


def test_code_that_needs_a_later_transformers_says_so():
    code = modeling_code(family("qwen2_moe"), Needs())
    assert "\nrequire_transformers(5)\n" in code
    assert "require_transformers" not in modeling_code(family("llama"), Needs())
    with pytest.raises(ImportError, match="needs transformers 99"):
        require_transformers(99)
