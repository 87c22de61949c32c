"""What the code imports is declared: an environment may hold more than a user's does."""

import ast
import re
import sys
import tomllib
from pathlib import Path

from kvsurgery.templates import kv_layout
from kvsurgery.templates.kv_layout import Quantization

ROOT = Path(__file__).parent.parent
WITH_OTHERS = {"markupsafe"}  # is jinja2's
NAMES = {"pillow": "PIL", "pyyaml": "yaml"}  # of packages, where code imports them by another


def imported(folder: str) -> dict[str, str]:
    """Module outside of the standard library, and a file that imports it."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= dict.fromkeys((name.partition(".")[0] for name in names), path.name)
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names}


def test_the_tool_imports_its_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + [line for name in extras.keys() - {"dev"} for line in extras[name]]
    packages = [re.match(r"[\w-]+", line)[0] for line in lines]
    declared = {NAMES.get(package, package.replace("-", "_")) for package in packages}
    found = imported("kvsurgery")
    assert {"torch", "click"} <= found.keys()
    assert {name: path for name, path in found.items() if name not in declared | WITH_OTHERS | {"kvsurgery"}} == {}


def test_emitted_code_imports_torch_and_transformers_and_kernels() -> None:
    """And safetensors, which transformers requires."""
    assert imported("templates").keys() == {"torch", "transformers", "safetensors", "triton", "flash_attn"}


def test_the_tool_and_the_templates_share_classes() -> None:
    assert Quantization is kv_layout.Quantization
    assert not [name for name in sys.modules if name.partition(".")[0] == "templates"]
