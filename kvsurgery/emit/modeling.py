"""The code of a converted checkpoint: the modeling file of its family, and the modules that this file names."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from graphlib import TopologicalSorter

from kvsurgery.checkpoint.family import Family
from kvsurgery.emit.rendering import template_environment
from kvsurgery.policy.policy import Policy
from kvsurgery.system.resources import TEMPLATES
from kvsurgery.version import __version__

HEADER = f"""\
# SPDX-License-Identifier: Apache-2.0
# Emitted by kvsurgery {__version__}. README.md of this folder says in what order to read its files.
"""


@dataclass(frozen=True)
class Needs:
    """What a checkpoint needs beside the code of every checkpoint."""

    reform: bool = False  # long prompts are gathered
    budgets: bool = False  # a layer has budgeted heads
    holds: bool = False  # their budgets hold after the prompt
    quantized: bool = False  # tokens are stored as codes, or may be
    kernels: bool = True  # in Triton

    @classmethod
    def of(cls, policy: Policy) -> Needs:
        """What a policy's checkpoint needs."""
        layers = policy.layout.layers
        return cls(
            reform=policy.reform is not None,
            budgets=any(layer.budgets for layer in layers),
            holds=any(layer.budgets and layer.holds for layer in layers),
            quantized=policy.recipe.quantized or any(layer.quantization for layer in layers),
            kernels=policy.recipe.kernels,
        )


def modeling_code(family: Family, needs: Needs, modules: dict[str, str] | None = None) -> str:
    """The source of a family's modeling file, which names a definition of each of these modules for type checkers."""
    model, *_, generator = family.classes.values()
    return (
        template_environment()
        .get_template("modeling_kvsurgery.py.jinja")
        .render(
            vars(family.modeling),
            model=model,
            generator=generator,
            auto_class=[*family.classes][-1],
            needs=needs,
            modules=modules or {},
        )
    )


def code_files(family: Family, needs: Needs) -> dict[str, bytes]:
    """Every code file of a converted checkpoint by name, in the order to read them: no more than the model runs."""
    codes = {family.module: modeling_code(family, needs)}
    named, imports = relative_imports(codes[family.module], needs), {}
    waiting = sorted(named)
    while waiting:
        module = waiting.pop()
        codes[module] = needed_lines((TEMPLATES / f"{module}.py").read_text(encoding="utf-8"), needs)
        imports[module] = relative_imports(codes[module], needs)
        waiting += sorted(imports[module] - {*codes, *waiting})
    # a file comes before those that it imports
    order = [*TopologicalSorter({module: sorted(imports[module]) for module in sorted(imports)}).static_order()][::-1]
    modules = {module: first_definition(codes[module]) for module in order if module not in named}
    codes[family.module] = modeling_code(family, needs, modules)
    return {f"{module}.py": f"{HEADER}{codes[module]}".encode() for module in (family.module, *order)}


def relative_imports(code: str, needs: Needs) -> set[str]:
    """The modules beside it that a module imports; those that it tries to import have kernels."""
    found, tree = set(), ast.parse(code)
    if not needs.kernels:
        tree.body = [node for node in tree.body if not isinstance(node, ast.Try)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return found


def first_definition(code: str) -> str:
    """The first public class or function of a module, or else its first constant."""
    tree = ast.parse(code)
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    constants = [ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)]
    return next(name for name in (*defined, *constants) if not name.startswith("_"))


def needed_lines(code: str, needs: Needs) -> str:
    """A module's code without what it marks with `# needs NAME` that the checkpoint does not need: the line, and the
    lines that are indented below it."""
    kept, left_out = [], None  # the indentation of a line that is left out
    for line in code.splitlines():
        indentation = len(line) - len(line.lstrip())
        if left_out is not None and (not line or indentation > left_out or line.startswith(" " * left_out + ")")):
            continue
        marked = re.search(r"  # needs (\w+)$", line)
        left_out = indentation if marked and not getattr(needs, marked[1]) else None
        if left_out is None:
            kept.append(line[: marked.start()] if marked else line)
    return "\n".join(kept) + "\n"
