"""The measured lines behind the decision table of the README."""

from __future__ import annotations

import re

import pytest

from benchmarks import by_workload
from benchmarks.by_workload import Choice
from tests.docs.pages import ROOT


def test_each_workload_and_engine_of_the_readme_has_a_line() -> None:
    readme = (ROOT / "README.md").read_text()
    [table] = re.findall(r"^\| workload \|.*\n\|---.*\n((?:\|.*\n)+)", readme, re.MULTILINE)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    asked = [(workload, engine) for workload, engines, *_ in rows for engine in engines.split(" or ")]
    assert [(choice.workload, choice.engine) for choice in by_workload.CHOICES] == asked


def test_lines_are_quoted_with_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = [
        Choice("chats", "vLLM", "a model", "page.md#section", "served", "4 bits", ("bytes", "facts")),
        Choice("memory", "vLLM", "a model", "page.md", "fitted", "1 GiB", ("choice",)),
    ]
    monkeypatch.setattr(by_workload, "CHOICES", choices)
    tables = {
        "served": ["| cache | facts | bytes |", "|---|---|---|", "| original | 9 | 100% |", "| 4 bits | 8 | 30% |"],
        "fitted": ["| memory | choice |", "|---|---|", "| 1 GiB | 4 bits |"],
    }
    assert by_workload.table({name: lambda lines=lines: lines for name, lines in tables.items()})[2:] == [
        "| chats | vLLM | a model | [4 bits](page.md#section) | bytes<br>facts | 30%<br>8 | 100%<br>9 |",
        "| memory | vLLM | a model | [1 GiB](page.md) | choice | 4 bits |  |",
    ]
