"""Tables in terminals of any width, and in files: no line is too long, and no number is cut."""

import io
import re

import pytest
from rich.console import Console

from kvsurgery.display import console

COLUMNS = ["task", "metric", "samples", "original", "converted", "first token", "x original", "against the original"]
NUMBERS = ["1,300", "98.0%", "100.0%", "1,123,456.1", "0.99"]
ROWS = [
    ["infinitebench/longbook_sum_eng", "string_match_all", *NUMBERS, "worse by 10.0 points [3.0, 20.0]"],
    ["needle", "rouge1_recall", *NUMBERS, "no clear difference [-12.5, +11.5]"],
]


def printed(table, width, monkeypatch, *, terminal=True):
    """What is printed where lines have a width."""
    file = io.StringIO()
    file.isatty = lambda: terminal
    monkeypatch.setenv("COLUMNS", str(width))
    Console(file=file, width=width, soft_wrap=True, highlight=False, color_system=None).print(table)
    return file.getvalue()


def words(text):
    return re.sub(r"[─\s]+", " ", text).split()


@pytest.mark.parametrize("width", [160, 120, 100, 80, 70, 60, 50])
@pytest.mark.parametrize("terminal", [True, False])
def test_every_line_fits_and_nothing_is_lost(width, terminal, monkeypatch):
    title = "Scores of a model with a long name, and the KV cache of one sequence of 131,072 tokens, side by side"
    text = printed(console.table(title, COLUMNS, ROWS, left=2, notes=1), width, monkeypatch, terminal=terminal)
    assert max(map(len, text.splitlines())) <= width
    found = words(text)
    for number in (*NUMBERS, "[3.0,", "20.0]", "[-12.5,", "+11.5]", "131,072"):
        assert number in found
    letters = "".join(found)
    for part in ("infinitebench/", "rouge1_", "needle"):
        assert part in letters


def test_what_is_wide_goes_on_below_with_the_same_first_columns(monkeypatch):
    table = console.table("", ["layer", "head", *["first token"] * 9], [["7", "3", *["1,234.5"] * 9]], left=0, keys=2)
    blocks = printed(table, 60, monkeypatch).split("layer")[1:]
    assert len(blocks) == 2
    for block in blocks:
        row = block.split("─ \n")[1].splitlines()[0].split()
        assert row[:2] == ["7", "3"]
        assert {*row[2:]} == {"1,234.5"}
    assert sum(block.count("1,234.5") for block in blocks) == 9


def test_a_word_is_broken_only_where_nothing_else_helps(monkeypatch):
    """A long name without a break; a number never is."""
    rows = [["w" * 70, "1,234,567,890.12345"]]
    text = printed(console.table("", ["name", "seconds"], rows), 60, monkeypatch)
    assert "1,234,567,890.12345" in text
    assert "".join(re.findall("w+", text)) == "w" * 70
    assert max(map(len, text.splitlines())) <= 60
    number = "9" * 70
    assert number in printed(console.table("", ["name"], [[number]]), 60, monkeypatch)


def test_a_file_has_lines_of_eighty_columns_whatever_the_terminal_has(monkeypatch):
    table = console.table("", COLUMNS, ROWS, left=2, notes=1)
    file = io.StringIO()
    monkeypatch.delenv("COLUMNS", raising=False)
    Console(file=file, width=200, soft_wrap=True, color_system=None).print(table)
    assert max(map(len, file.getvalue().splitlines())) <= 80


def test_markup_is_text(monkeypatch):
    assert "[bold]a[/bold]" in printed(console.table("", ["name"], [["[bold]a[/bold]"]]), 80, monkeypatch)
