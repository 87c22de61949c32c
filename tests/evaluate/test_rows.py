"""Rows of benchmark data: read as they are taken, and what is wrong with them is said with its place."""

import json
import re
import sys
from types import SimpleNamespace

import pytest

from kvsurgery.errors import TextError
from kvsurgery.evaluate import rows
from kvsurgery.evaluate.rows import in_folder, read_json, read_rows

FIELDS = {"text": str, "number": int, "answers": list}
ROW = {"text": "Where?", "number": 3, "answers": ["here", "there"], "more": None}


def read(source):
    return list(read_rows(str(source), FIELDS, config="4k", split="test"))


def write(folder, *lines, name="rows.jsonl"):
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def dataset(monkeypatch):
    """A stand-in for `datasets`: rows to fill in, and what was asked for."""
    made = SimpleNamespace(rows=[], asked=[])

    def load_dataset(*source, split, streaming):
        made.asked.append((*source, split))
        return iter(made.rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return made


def test_lines_and_lists_are_the_same_rows(tmp_path):
    other = {**ROW, "text": "Lines\u2028do not end here"}
    lines = write(tmp_path, ROW, "", json.dumps(other, ensure_ascii=False), "")
    listed = write(tmp_path, "\ufeff " + json.dumps([ROW, other], indent=1), name="rows.json")
    assert read(lines) == read(listed) == [ROW, other]


def test_lines_are_read_as_they_are_taken(tmp_path):
    taken = read_rows(str(write(tmp_path, ROW, "{")), FIELDS, config="", split="")
    assert next(taken) == ROW
    with pytest.raises(TextError, match="line 2: not JSON"):
        next(taken)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: "),
        ("[" * 200_000, "not JSON: "),
        ("9" * 5000, "not JSON: "),
        ({**ROW, "text": "Where \ud83d?"}, r"not JSON: \\ud83d is half of a character; write both halves, or leave it"),
        ({**ROW, "answers": ["here", "\ude00\ud83d"]}, r"not JSON: \\ude00 is half of a character"),
        ({**ROW, "more": {"\\\ud83d": 1}}, r"not JSON: \\ud83d is half of a character"),
        ("[1]", "not a JSON object with the fields text, number, answers"),
        *[
            ({key: ROW[key] for key in FIELDS if key != left}, f'"{left}" is missing; the fields are text, number, ')
            for left in FIELDS
        ],
        ({**ROW, "text": None}, '"text" must be text, got None'),
        ({**ROW, "number": "3"}, "\"number\" must be a whole number, got '3'"),
        ({**ROW, "number": True}, '"number" must be a whole number, got True'),
        ({**ROW, "answers": "here"}, "\"answers\" must be a list of texts, got 'here'"),
        ({**ROW, "answers": ["here", 3]}, r'"answers" must be a list of texts, got ' r"\['here', 3\]"),
        ({**ROW, "text": ["x" * 99]}, r'"text" must be text, got ' r"\['x{55}\.\.\.$"),
    ],
)
def test_a_bad_row_is_named(tmp_path, line, message):
    path = write(tmp_path, ROW, "", line)
    with pytest.raises(TextError, match=f"^{re.escape(str(path))}, line 3: {message}") as raised:
        read(path)
    assert "\n" not in str(raised.value)
    assert "`" not in str(raised.value)  # a column is not a setting
    if isinstance(line, dict) and "not JSON" not in message:
        path = write(tmp_path, json.dumps([ROW, line]), name="rows.json")
        with pytest.raises(TextError, match=f"rows.json, row 2: {message}"):
            read(path)


def test_a_row_of_no_fixed_columns_is_an_object(tmp_path):
    path = write(tmp_path, "[1]")
    with pytest.raises(TextError, match=r"row 1: not a JSON object$"):
        next(read_rows(path, {}, config="all", split="test"))


def test_files_that_are_none(tmp_path, monkeypatch):
    for name in ("none.jsonl", "./none/rows", "a\0b"):
        with pytest.raises(TextError, match=r"cannot read rows of .*: there is no such file, and it is not the Hub id"):
            read(tmp_path / name)
    for content in ("", " \n\n", "[]"):
        with pytest.raises(TextError, match=r"rows.jsonl holds no rows"):
            read(write(tmp_path, content))
    (tmp_path / "rows.jsonl").write_bytes(b"\x89PNG\r\n\0\0")
    with pytest.raises(TextError, match="is not UTF-8 text"):
        read(tmp_path / "rows.jsonl")
    monkeypatch.setattr(rows, "LONGEST_LINE", 100)
    with pytest.raises(TextError, match=r"line 2: over .* characters; this is not a row"):
        read(write(tmp_path, ROW, {**ROW, "text": "x" * 100}))


def test_one_piece_of_json(tmp_path, monkeypatch):
    assert read_json(write(tmp_path, '{"data": [1]}')) == {"data": [1]}
    with pytest.raises(TextError, match=r"rows.jsonl is not JSON: Expecting"):
        read_json(write(tmp_path, '{"data": ['))
    with pytest.raises(TextError, match=r"cannot read .*: Is a directory"):
        read_json(tmp_path)
    monkeypatch.setattr(rows, "LARGEST_FILE", 5)
    with pytest.raises(TextError, match=r"is over .* MiB; give JSON lines, or fewer of them"):
        read_json(write(tmp_path, '{"data": [1]}'))


def test_a_whole_character_may_be_escaped(tmp_path):
    row = {**ROW, "text": "\U0001f600 \\ud83d \\\U0001f600", "answers": ["\uffff", "\U0010ffff\U00010000"]}
    assert read(write(tmp_path, row)) == read(write(tmp_path, [row], name="rows.json")) == [row]


def test_half_of_a_character_has_a_place_in_its_file(tmp_path):
    with pytest.raises(
        TextError, match=r"rows.jsonl is not JSON: \\uD83D is half of a character; .*: line 2 column 7 "
    ):
        read_json(write(tmp_path, '{"data":', '["one \\uD83D\\ud83d\\ude00"]}'))


def test_a_folder_has_files_by_name(tmp_path):
    write(tmp_path, ROW, name="one.json")
    path = write(tmp_path, ROW, name="two.jsonl")
    assert in_folder(str(tmp_path), "one") == str(tmp_path / "one.json")
    assert in_folder(str(tmp_path), "two") == in_folder(str(path), "one") == str(path)
    assert in_folder("owner/name", "one") == "owner/name"
    with pytest.raises(TextError, match=r"has no three.jsonl or three.json"):
        in_folder(str(tmp_path), "three")


def test_rows_of_a_dataset(dataset):
    with pytest.raises(TextError, match="owner/name holds no rows"):
        read("owner/name")
    dataset.rows += [ROW, {"text": "x"}]
    taken = read_rows("owner/name", FIELDS, config="4k", split="qa1")
    assert next(taken) == ROW
    assert dataset.asked[-1] == ("owner/name", "4k", "qa1")
    with pytest.raises(TextError, match='owner/name 4k/qa1, row 2: "number" is missing'):
        next(taken)
