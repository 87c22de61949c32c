"""Files of answers: what a kill may leave of them, and what they belong to."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsurgery.errors import KVSurgeryError, OutputError, cut
from kvsurgery.evaluate.records import check_settings, write_settings
from kvsurgery.evaluate.runner import Evaluation, Options
from kvsurgery.evaluate.sample import Sample
from kvsurgery.system.json_lines import append_lines, lines, read_lines

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


@pytest.mark.parametrize("line", ["{not json", "[1]", "\x00", "[" * 200_000, '{"a": "\\ud83d"}'])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "answers.jsonl"
    path.write_text(f'{{"task": "a"}}\n{line}\n')
    with pytest.raises(KVSurgeryError, match=r"answers.jsonl, line 2 is damaged"):
        read_lines(path)


TOKENS = np.zeros(8, dtype=np.int64)
SAMPLES = (
    Sample("needle", "0", TOKENS, "qa_f1", also=("exact_match",)),
    Sample("text", "0", TOKENS, "perplexity", continuation=4),
)
NEEDLE, TEXT = (
    {"task": "needle", "sample": "0", "scores": {"qa_f1": 0.5, "exact_match": 1}},
    {"task": "text", "sample": "0", "nll": 1.5},
)


def answers(folder, *records):
    append_lines(folder / "answers-converted.jsonl", records)
    return Evaluation(folder, SAMPLES, None, Options(), {}, None).answers("converted")


def test_answers_are_found_by_their_sample(tmp_path):
    skipped = {"task": "needle", "sample": "0", "skipped": "out of memory"}
    assert answers(tmp_path, NEEDLE, TEXT) == {
        sample.key: record for sample, record in zip(SAMPLES, (NEEDLE, TEXT), strict=True)
    }
    assert answers(tmp_path, skipped)["needle", "0"] == skipped


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_null_in_the_file(tmp_path, loss):
    [record] = answers(tmp_path, {**TEXT, "nll": loss}).values()
    assert math.isnan(record["nll"])
    assert '"nll": null}' in (tmp_path / "answers-converted.jsonl").read_text()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({}, r'"task" and "sample" are those of no sample: \(None, None\)'),
        ({"task": 1}, "are those of no sample"),
        ({"task": ["x"], "sample": "0"}, "are those of no sample"),
        ({**NEEDLE, "sample": "1"}, r"are those of no sample: \('needle', '1'\)"),
        ({"task": "needle", "sample": "0"}, '"scores" is missing'),
        ({**NEEDLE, "scores": [0.5, 1]}, '"scores" is missing, or of another type'),
        ({**NEEDLE, "scores": {"qa_f1": 0.5}}, '"scores" is missing'),
        ({**NEEDLE, "scores": {"qa_f1": 0.5, "exact_match": "1"}}, '"scores" is missing'),
        ({**NEEDLE, "scores": {"qa_f1": 0.5, "exact_match": 10**400}}, '"scores" is missing'),
        ({**NEEDLE, "skipped": ""}, '"skipped" is missing'),
        ({**NEEDLE, "skipped": ["x"]}, '"skipped" is missing'),
        ({**TEXT, "nll": "1"}, '"nll" is missing'),
        ({**NEEDLE, "task": "text"}, '"nll" is missing'),
    ],
)
def test_a_record_that_is_no_answer_is_named(tmp_path, record, words):
    with pytest.raises(
        KVSurgeryError, match=f"answers-converted.jsonl, line 2 is damaged: .*{words}.*; remove the file"
    ):
        answers(tmp_path, NEEDLE, record)


MODEL = {"path": "org/model", "fingerprint": "cd", "checkpoint": {}}
SETTINGS = {"tasks": {"needle": {"lengths": [8]}}, "options": {"seed": 0}, "versions": {"torch": "2"}, "samples": "ab"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"tasks": {"needle": {"lengths": [8, 9]}}},
            "`lengths` of needle is 8 there and 8,9 here; give another folder",
        ),
        ({"tasks": {"needle": {"lengths": None}}}, "`lengths` of needle is 8 there and not given here"),
        ({"tasks": {"passkey": {"size": 3}}}, "`tasks` is needle there and passkey here"),
        ({"options": {"seed": 1}}, "`seed` is 0 there and 1 here"),
        ({"versions": {"torch": "3"}}, "the version of torch is 2 there and 3 here"),
        ({"samples": "cd"}, "a file that samples are made from, has changed"),
    ],
)
def test_other_settings_are_named(tmp_path, change, words):
    write_settings(tmp_path, {**SETTINGS, "file": "results.json", "models": {"original": MODEL}})
    check_settings(tmp_path, SETTINGS)
    with pytest.raises(OutputError, match=words):
        check_settings(tmp_path, {**SETTINGS, **change})


def test_a_field_is_called_what_its_option_is(tmp_path):
    write_settings(tmp_path, {**SETTINGS, "tasks": {"passkey": {"size": 3}}, "models": {}})
    with pytest.raises(OutputError, match="with other settings: `passkey_tokens` of passkey is 3 there and 32 here"):
        check_settings(tmp_path, {**SETTINGS, "tasks": {"passkey": {"size": 32}}})


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", "[" * 100_000, json.dumps({"models": [], "versions": {}})),
        *(
            json.dumps({"models": {"original": entry}, "versions": {}})
            for entry in ({}, [], 3, {**MODEL, "path": None})
        ),
    ],
    ids=cut,
)
def test_settings_of_something_else_are_refused(tmp_path, content):
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(OutputError, match="has no settings of an evaluation"):
        check_settings(tmp_path, SETTINGS)
