"""Rows of the tables on a real language model that are measured again: which these are, and when they are the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.real_model import first_rows


def test_rows_are_those_of_the_committed_results(tmp_path: Path) -> None:
    for table in first_rows.tables(tmp_path):
        assert (first_rows.HERE / table.script).is_file()
        assert set(table.rows) <= json.loads((first_rows.RESULTS / table.results).read_text())["results"].keys()


@pytest.mark.parametrize(
    ("right", "kl", "line"),
    [
        ([1, 1, 0, 1], [0.02, 0.04], None),
        ([1, 1, 0, 1], [0.02, 0.0412], None),
        ([1, 0, 0, 1], [0.02, 0.04], "gates: 50% of the facts, and 75% in the committed results"),
        ([1, 1, 0, 1], [0.04, 0.05], "gates: KL 0.0450, and 0.0300 in the committed results"),
    ],
)
def test_rows_that_differ_are_named(right: list[int], kl: list[float], line: str | None) -> None:
    committed = {"right": [1, 1, 0, 1], "kl": [0.02, 0.04]}
    assert first_rows.differences("gates", {"right": right, "kl": kl}, committed) == ([line] if line else [])


def test_texts_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["first_rows.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        first_rows.main()
    assert "pride_and_prejudice.txt is missing" in capsys.readouterr().err
