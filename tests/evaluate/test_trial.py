"""The needles of an evaluation are chosen once, on the original, and the choice is recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvsurgery.errors import OutputError, TextError
from kvsurgery.evaluate import trial
from kvsurgery.evaluate.runner import Evaluation, Options, evaluate
from kvsurgery.evaluate.tasks.needle import NeedleTask
from kvsurgery.text import needle_sets
from kvsurgery.text.needle_sets import AUTO
from tests.evaluate.recall import MODEL, tasks
from tests.helpers.needle_sets import COUNT

BATCH = Options(batch=4)
FEW = Options(batch=4, limit=2)
TRIALS = 2


@pytest.fixture
def task(language, monkeypatch):
    monkeypatch.setattr(needle_sets, "TRIALS", TRIALS)
    return {"needle": replace(tasks(language)["needle"], needles=AUTO, count=None)}


@pytest.fixture
def loaded(monkeypatch):
    """Which checkpoints were tried."""
    found, load = [], trial.load
    monkeypatch.setattr(trial, "load", lambda folder, **options: found.append(folder) or load(folder, **options))
    return found


@pytest.mark.parametrize("answered", ["word", "fact", "phrase"])
def test_the_hardest_answered_set_is_asked_and_recorded(answered, task, sets, tmp_path):
    sets(answered)
    lines, steps = [], []
    told = {"progress": lambda *step: steps.append(step), "note": lines.append}
    results = evaluate({"original": MODEL}, task, tmp_path / "report", FEW, device="cpu", **told)
    assert results.tasks[0].scores["original"].mean == 1
    assert results.tasks[0].count == FEW.limit
    chosen = results.settings["tasks"]["needle"]
    assert (chosen["needles"], chosen["choice"]["name"]) == ("auto", answered)
    assert chosen["choice"]["right"][answered] == chosen["choice"]["trials"] == TRIALS
    assert chosen["choice"]["tokens"] == 96
    line, plan = lines
    assert plan.startswith("2 prompts for each model, of at most 96 tokens: 2 of needle")
    assert line.startswith(f"needles: {answered}, ")
    assert {(0, None, f"trying needles: {answered}, {number} of {TRIALS}") for number in range(1, TRIALS + 1)} <= {
        *steps
    }
    assert json.loads((tmp_path / "report" / "settings.json").read_text())["tasks"]["needle"] == chosen


def test_the_original_chooses_where_it_is_there(task, sets, full, budgeted, tmp_path, loaded):
    sets("phrase")
    evaluate({"original": MODEL, "converted": full}, task, tmp_path / "two", FEW, device="cpu")
    assert loaded == [MODEL]
    lines = []
    alone = evaluate({"converted": budgeted}, task, tmp_path / "one", FEW, device="cpu", note=lines.append)
    assert loaded == [MODEL, budgeted]
    assert alone.settings["tasks"]["needle"]["choice"]["model"] == "converted"
    assert "the original was not available" in lines[0]


def test_needles_beyond_the_positions_are_not_tried(task, sets, tmp_path):
    sets("word")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(2 * [Path(task["needle"].text).read_text()]))
    longer = {"needle": replace(task["needle"], lengths=(4096,), text=str(text))}
    with pytest.raises(
        TextError, match="4,096 tokens cannot be asked for: prompt and answer are beyond 4096 positions"
    ):
        evaluate({"original": MODEL}, longer, tmp_path / "report", BATCH, device="cpu")


def test_a_run_that_goes_on_does_not_choose_again(task, sets, full, tmp_path, loaded):
    sets("phrase")
    Evaluation.open(tmp_path / "report", MODEL, task, BATCH)
    assert loaded == [MODEL]
    lines = []
    again = Evaluation.open(tmp_path / "report", MODEL, task, BATCH, note=lines.append)
    assert loaded == [MODEL]
    assert again.tasks["needle"]["choice"]["name"] == "phrase"
    assert len(lines) == 1
    with pytest.raises(OutputError, match="`needles` of needle is auto there and word here"):
        Evaluation.open(tmp_path / "report", MODEL, {"needle": replace(task["needle"], needles="word")}, BATCH)


def test_a_set_that_is_named_is_not_tried(task, sets, tmp_path, loaded):
    sets()
    evaluation = Evaluation.open(tmp_path / "report", MODEL, {"needle": replace(task["needle"], needles="fact")}, BATCH)
    assert len(evaluation.samples) == COUNT * 4
    assert not loaded
    with pytest.raises(TextError, match="no needle set has been chosen"):
        next(NeedleTask().samples(evaluation.reader))


def test_nothing_is_begun_where_no_set_is_answered(task, sets, tmp_path):
    sets("reasoning")
    with pytest.raises(TextError, match=r"no set of retrieval needles .* phrase 0, fact 0, word 0\).* out of `tasks`$"):
        evaluate({"original": MODEL}, task, tmp_path / "report", BATCH, device="cpu")
    assert not (tmp_path / "report").exists()
