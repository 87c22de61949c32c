"""The table of families in the documentation says what the code and the tests say."""

from __future__ import annotations

import re

import pytest

from kvsurgery.checkpoint.family import load_family, supported
from kvsurgery.vllm.architectures import ARCHITECTURES
from tests.distributed import test_tensor_parallel
from tests.docs.pages import ROOT, figures
from tests.helpers.families import FAMILIES

ROW = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)
ROWS = {name: cells.split(" | ") for name, cells in ROW.findall((ROOT / "docs" / "families.md").read_text())}
del ROWS["model_type"]  # the header
SHARED = {FAMILIES[name]["model_type"] for name in test_tensor_parallel.FAMILIES}


def test_every_family_has_a_row() -> None:
    assert [*ROWS] == [*supported()]


@pytest.mark.parametrize(
    ("page", "line"), [("README.md", "families.md), [quantized]"), ("docs/support.md", "values of `model_type`")]
)
def test_pages_say_how_many_families_there_are(page: str, line: str) -> None:
    assert str(len(supported())) in figures(page, line)


@pytest.mark.parametrize("name", supported())
def test_rows(name: str) -> None:
    _, _, parallel, reform, vllm = ROWS[name]
    family = load_family(name)
    assert parallel == ("not split" if family.replicated else "yes" if name in SHARED else "not tested")
    assert (vllm == "yes") == (not {*family.classes.values()}.isdisjoint(ARCHITECTURES))
    if not family.text:
        assert reform == ("no" if family.no_reform else "yes")
