"""The benchmark of RULER, BABILong and cloze: whom it asks, how scores are paired, and what the page says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "real_model"))

import tasks as benchmark

from kvsurgery.evaluate.tasks.passkey import PasskeyTask
from tests.evaluate.recall import MODEL, PASSKEYS, convert, write_language

ROOT = Path(__file__).resolve().parents[2]


def test_models_answer_once_and_the_same_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_language(tmp_path)
    task = PasskeyTask((96,), prompts=2, text=str(tmp_path / "text.txt"), **PASSKEYS)
    group = benchmark.Group("passkeys", "passkey", task, 3)
    original = benchmark.ask([group], tmp_path / "answers", MODEL, "original", MODEL)
    assert len(original["passkeys"]) == 3
    assert benchmark.ask([group], tmp_path / "answers", convert(tmp_path / "full"), "full", MODEL) == original
    monkeypatch.setattr("kvsurgery.evaluate.runner.load", None)
    assert benchmark.ask([group], tmp_path / "answers", MODEL, "original", MODEL) == original


def test_rulers_prompts_have_a_group_for_each_length() -> None:
    headings = [group.heading for group in benchmark.groups("text.txt", "babilong", [1024, 2048])]
    assert headings == ["cloze, 512 tokens", "RULER, 1,024 tokens", "RULER, 2,048 tokens", "BABILong, 0k"]


def test_differences_are_paired_by_sample() -> None:
    scores, original = {"a": 1.0, "b": 0.0, "c": 0.0}, {"c": 0.0, "b": 1.0, "a": 1.0}
    mean, more = benchmark.difference(scores, original)
    assert (mean.mean, more.mean) == pytest.approx((1 / 3, -1 / 3))
    assert (more.low, more.high) == (-1, 0)
    _, none = benchmark.difference(original, original)
    assert (none.low, none.high) == (0, 0)


def test_the_page_has_the_table() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "real-model-tasks.json").read_text())
    assert all(len(scores) >= 100 for result in found["results"].values() for scores in result.values())
    page = (ROOT / "docs" / "results.md").read_text()
    assert "\n".join(benchmark.table(found)) in page
    original, gates, *others = found["results"].values()
    less = [
        benchmark.difference(each["RULER, 1,024 tokens"], original["RULER, 1,024 tokens"])[1]
        for each in found["results"].values()
    ]
    said = [f"{-100 * each.mean:.0f}" for each in less]
    assert f"gates lose {said[1]} points, and their interval includes 0" in page
    assert less[1].high >= 0
    assert len({*said[2:]}) == 1
    assert f"the first layers and this draw of random heads lose {said[2]}." in " ".join(page.split())
    for each in (gates, *others):
        more = benchmark.difference(each["cloze, 512 tokens"], original["cloze, 512 tokens"])[1]
        assert more.low <= 0 <= more.high
