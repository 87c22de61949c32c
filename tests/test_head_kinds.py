"""Kinds of heads: what each head is and how many there are, and the files that have to know every kind."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kvsurgery.heads.kinds import (
    BUDGETED,
    FULL,
    KINDS,
    OTHERS,
    STREAMING,
    WINDOW,
    Rest,
    counts,
    full_heads,
    head_list,
    kinds_of,
    unquantized,
)
from kvsurgery.recipe import TABLES
from kvsurgery.templates.kv_layout import KVLayout, LayerLayout, Quantization, Selection
from tests.templates.test_kv_layout import BUDGETS, SELECTION, config

ROOT = Path(__file__).parent.parent


def test_every_head_has_a_kind() -> None:
    layout = KVLayout.from_config(config())
    heads = [head_list(layer) for layer in layout.layers]
    assert heads == [("full", "streaming", "streaming", "streaming"), ("full",) * 4, ("window",) * 4]
    assert counts(layout) == kinds_of(heads) | {BUDGETED: 0} == {FULL: 5, STREAMING: 3, WINDOW: 4, BUDGETED: 0}
    native = config()["kv_surgery"]["layers"][2]
    layers = [BUDGETS, {"blocks": [[2, 2]], "budgets": [8, 8]}, native]
    layout = KVLayout.from_config(config(layers, selection=SELECTION))
    heads = [head_list(layer) for layer in layout.layers]
    assert heads[0] == ("full", 5, 7, 9)
    assert counts(layout) == kinds_of(heads) | {STREAMING: 0} == {FULL: 3, STREAMING: 0, WINDOW: 4, BUDGETED: 5}


def test_heads_in_blocks_are_listed_in_order() -> None:
    layer = LayerLayout(((1, 1), (0, 2)), 0, 1, False, (6, 0, 3), Selection(), order=(2, 0, 3, 1))
    assert head_list(layer) == ("full", 6, 0, 3)
    assert full_heads(layer) == (2,)
    assert head_list(LayerLayout((), 0, 1, source=0)) == ()


def test_sizes_in_words() -> None:
    layers = KVLayout.from_config(config()).layers
    assert STREAMING.sizes(layers[:1]) == "keep 4 sink tokens and the 16 most recent ones"
    layers = KVLayout.from_config(config([BUDGETS] * 3, selection=SELECTION)).layers
    assert BUDGETED.sizes(layers).startswith("keep 7 tokens of the prompt on average, chosen by the attention of its ")


def test_which_kinds_are_not_quantized() -> None:
    quantization = Quantization(4)
    held = Selection(hold=64)
    streams, windows = (LayerLayout(((1, 1),), 0, 9, native, quantization=quantization) for native in (False, True))
    budgets = LayerLayout(((1, 1),), 0, 1, False, (5,), held, quantization)
    assert unquantized(KVLayout((streams, windows, budgets), 16)) == [STREAMING, WINDOW, BUDGETED]
    per_token, long = Quantization(4, "per-token"), Quantization(4, streaming=True, residual=0)
    budgets = LayerLayout(((1, 1),), 0, 1, False, (5,), held, per_token)
    streams = LayerLayout(((1, 1),), 0, 256, quantization=long)
    assert unquantized(KVLayout((streams, budgets), 16)) == []


def test_what_the_remaining_heads_may_become() -> None:
    assert [*Rest.__args__] == [kind.name for kind in OTHERS] == [name for name in TABLES if name in Rest.__args__]
    assert [kind for kind in KINDS if kind is not FULL and not kind.own] == [*OTHERS]


# files that name both kinds, and to which no further kind has to be added
OLD_NAMES = {
    "kvsurgery/cli/plan.py",  # keys of the plan's JSON; every kind is in its `heads`
    "kvsurgery/conversion/inspection.py",  # the same of what `inspect` says
    "kvsurgery/profile/methods.py",  # by method, what heads become where nobody says
    "kvsurgery/vllm/limits.py",  # what an engine serves of each
    "kvsurgery/vllm/split.py",
}
NAMES = {name: kind for kind in OTHERS for name in (kind.name, kind.name.upper())} | {"budgets": BUDGETED}


def kinds_named(path: Path) -> set[str]:
    """The kinds of `OTHERS` that a file tells apart: by a string that is a kind's name, an attribute or a constant.

    Full heads and windows are left out: their names are words for other things as well. Docstrings and messages, which
    have more words than one, do not count.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and node.id.isupper():
            found.add(node.id)
    return {NAMES[name].name for name in found & NAMES.keys()}


def test_six_files_tell_kinds_of_heads_apart() -> None:
    paths = (path for folder in ("kvsurgery", "templates") for path in (ROOT / folder).rglob("*.py"))
    found = {str(path.relative_to(ROOT)) for path in paths if len(kinds_named(path)) > 1}
    guide = (ROOT / "CONTRIBUTING.md").read_text().split("### A kind of head\n")[1].split("\n###")[0]
    listed = re.findall(r"^\d\. `([\w/]+\.py)`", guide, re.MULTILINE)
    assert found - OLD_NAMES == {*listed}
    assert len(listed) == 6
