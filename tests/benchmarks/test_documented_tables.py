"""Tables of the docs are what the committed results give."""

from __future__ import annotations

import re

import pytest

from benchmarks import documented_tables

PAGES = {path: path.read_text() for path in documented_tables.PAGES}
TABLES = documented_tables.all_tables()


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_the_table(name: str) -> None:
    lines = "".join(f"{line}\n" for line in TABLES[name]())
    assert lines.count("\n") > 2
    shown = [
        found["lines"]
        for page in PAGES.values()
        for found in documented_tables.TABLE.finditer(page)
        if found["name"] == name
    ]
    assert shown == [lines]


def test_every_comment_names_a_table() -> None:
    comments = [name for page in PAGES.values() for name in re.findall(r"<!-- table: (.+) -->", page)]
    assert sorted(comments) == sorted(TABLES)


def test_a_table_is_written_anew() -> None:
    page = PAGES[documented_tables.ROOT / "docs" / "results" / "long-prompts.md"]
    changed = re.sub(r"(\| REFORM \| 25 \|) \d+%", r"\1 1%", page)
    assert changed != page
    assert documented_tables.filled(changed) == page
