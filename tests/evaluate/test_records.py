"""Files of answers: what a kill may leave of them, and what they belong to."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsurgery.errors import KVSurgeryError, OutputError
from kvsurgery.evaluate.records import append_lines, check_settings, lines, read_lines, write_settings

RECORDS = [{"task": "needle", "sample": str(number), "answer": "so und\u2028 so\r\n\x0b — \x85"} for number in range(3)]


@settings(max_examples=60)
@given(cut=st.integers(0, 300))
def test_of_a_file_cut_anywhere_whole_lines_are_left(cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "answers.jsonl"
    path.write_bytes(lines(RECORDS).encode()[:cut])
    left = read_lines(path)
    assert left == RECORDS[: len(left)]
    append_lines(path, RECORDS[len(left) :])
    assert path.read_bytes() == lines(RECORDS).encode()
    assert read_lines(path) == RECORDS


def test_no_file_is_no_records(tmp_path):
    assert read_lines(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("line", ["{not json", "[1]", "\x00"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "answers.jsonl"
    path.write_text(f'{{"task": "a"}}\n{line}\n')
    with pytest.raises(KVSurgeryError, match=r"answers.jsonl, line 2 is damaged"):
        read_lines(path)


SETTINGS = {"tasks": {"needle": {"lengths": [8]}}, "options": {"seed": 0}, "versions": {"torch": "2"}, "samples": "ab"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tasks": {"needle": {"lengths": [8, 9]}}}, r"tasks.needle.lengths \[8\], this one has \[8, 9\]"),
        ({"tasks": {}}, r"tasks.needle .*, this one has nothing"),
        ({"options": {"seed": 1}}, "options.seed 0, this one has 1"),
        ({"versions": {"torch": "3"}}, 'versions.torch "2", this one has "3"'),
        ({"samples": "cd"}, "a file that samples are made from, has changed"),
    ],
)
def test_other_settings_are_named(tmp_path, change, words):
    write_settings(tmp_path, {**SETTINGS, "models": {"original": {}}})
    check_settings(tmp_path, SETTINGS)
    with pytest.raises(OutputError, match=words):
        check_settings(tmp_path, {**SETTINGS, **change})


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"models": [], "versions": {}})])
def test_settings_of_something_else_are_refused(tmp_path, content):
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(OutputError, match="has no settings of an evaluation"):
        check_settings(tmp_path, SETTINGS)
