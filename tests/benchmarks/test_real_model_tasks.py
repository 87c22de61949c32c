"""The benchmark of RULER, BABILong and cloze: whom it asks, how scores are paired, and what the page says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real_model import tasks as benchmark
from kvsurgery.evaluate.results import Interval
from kvsurgery.evaluate.tasks.passkey import PasskeyTask
from kvsurgery.profile.head_profile import HeadProfile
from tests.docs.pages import figures
from tests.evaluate.recall import MODEL, PASSKEYS, convert, write_language

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/results/heads.md"
STEPS_400 = "gates of longer prompts, 400 steps"


def test_models_answer_once_and_the_same_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_language(tmp_path)
    task = PasskeyTask((96,), prompts=2, text=str(tmp_path / "text.txt"), **PASSKEYS)
    group = benchmark.Group("passkeys", "passkey", task, 3)
    original = benchmark.ask([group], tmp_path / "answers", MODEL, "original", MODEL)
    assert len(original["passkeys"]) == 3
    assert benchmark.ask([group], tmp_path / "answers", convert(tmp_path / "full"), "full", MODEL) == original
    monkeypatch.setattr("kvsurgery.evaluate.runner.load", None)
    assert benchmark.ask([group], tmp_path / "answers", MODEL, "original", MODEL) == original


def test_prompts_have_a_group_for_each_length() -> None:
    lengths = benchmark.Lengths([], [1024, 2048], ["0k"])
    headings = [group.heading for group in benchmark.groups("text.txt", lengths)]
    assert headings == ["RULER, 1,024 tokens", "RULER, 2,048 tokens", "BABILong, 0k"]


def test_differences_are_paired_by_sample() -> None:
    scores, original = {"a": 1.0, "b": 0.0, "c": 0.0}, {"c": 0.0, "b": 1.0, "a": 1.0}
    mean, more = benchmark.difference(scores, original)
    assert (mean.mean, more.mean) == pytest.approx((1 / 3, -1 / 3))
    assert (more.low, more.high) == (-1, 0)
    _, none = benchmark.difference(original, original)
    assert (none.low, none.high) == (0, 0)


@pytest.mark.parametrize("name", ["real-model-tasks", "real-model-tasks-4096"])
def test_every_share_is_of_a_hundred_questions_or_more(name: str) -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    assert all(len(scores) >= 100 for result in found["results"].values() for scores in result.values())


def best_half(name: str) -> set[tuple[int, int]]:
    """Layers and KV heads that a profile of SmolLM2 keeps full at a sparsity of 0.5."""
    scores = HeadProfile.load(ROOT / "examples" / "smollm2" / f"{name}.safetensors").head_scores
    best = np.argsort(-scores, axis=None, kind="stable")[: scores.size // 2]
    return {(int(layer), int(head)) for layer, head in zip(*np.unravel_index(best, scores.shape), strict=True)}


def test_the_page_says_what_half_of_the_heads_lose() -> None:
    short, long = (
        json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]
        for name in ("real-model-tasks", "real-model-tasks-4096")
    )
    original = {
        heading: np.mean([*scores.values()]) for heading, scores in (short["original"] | long["original"]).items()
    }

    def less(results: dict, name: str, heading: str) -> Interval:
        """How much a choice of heads is below the original, in points."""
        more = benchmark.difference(results[f"{name}, 50% full, 64+256"][heading], results["original"][heading])[1]
        return Interval(-100 * more.mean, -100 * more.high, -100 * more.low)

    def points(*values: float) -> set[str]:
        return {f"{value:.0f}" for value in values}

    names = ("gates", "gates of longer prompts", "attention", "er", "first layers")
    ruler = "RULER, 1,024 tokens"
    gates, longer, attention, er, first = (less(short, name, ruler) for name in names)
    random = [less(short, f"random {draw}", ruler).mean for draw in range(5)]
    shown = points(gates.mean, longer.mean, attention.mean, er.mean, er.low, er.high, first.mean)
    shown |= {f"{original[ruler]:.0%}", *points(min(random), max(random))}
    assert shown <= figures(PAGE, f"**{ruler}**")
    assert max(gates.low, longer.low, attention.low) <= 0 < er.low

    ruler = "RULER, 4,096 tokens"
    gates, longer, attention, er, first = (less(long, name, ruler) for name in names)
    random = [less(long, f"random {draw}", ruler).mean for draw in range(5)]
    shown = points(-attention.mean, first.mean, min(random), max(random))
    for loss in (longer, er, gates):
        shown |= points(loss.mean, loss.low, loss.high)
    assert {f"{original[ruler]:.0%}", *shown} <= figures(PAGE, f"**{ruler}**")
    assert min(gates.low, longer.low, er.low) > 0 > attention.low
    trained = [less(long, name, ruler).mean for name in ("gates", "gates of longer prompts", STEPS_400)]
    assert {f"{original[ruler]:.0%}", *points(min(trained), max(trained))} <= figures("README.md", "**Fewer heads**")

    more_steps, steps = (long[f"{name}, 50% full, 64+256"][ruler] for name in (STEPS_400, "gates of longer prompts"))
    fewer = benchmark.difference(more_steps, steps)[1]
    shown = points(-100 * fewer.mean, -100 * fewer.high, -100 * fewer.low)
    kept = [best_half(name) for name in ("longer", "longer-400")]
    [[before], [after]] = kept[0] - kept[1], kept[1] - kept[0]
    assert {*shown, *map(str, (*before, *after))} <= figures(PAGE, "**One head**")

    assert [round(1 / original[f"BABILong, {length}"]) for length in ("0k", "1k")] == [4, 6]
    cloze = [less(short, name.partition(",")[0], "cloze, 512 tokens") for name in short if name != "original"]
    assert max(round(loss.mean) for loss in cloze) == 3
    assert all(loss.low <= 0 for loss in cloze)
