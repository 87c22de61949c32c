"""The comparison of caches on a real language model: what it asks, what it counts, and what its table says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.real_model import cache_report, trials, which_cache
from kvsurgery.checkpoint.model import Model
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.loading import load_scores
from kvsurgery.recipe import Recipe
from kvsurgery.report.colors import DARK
from kvsurgery.templates.kv_layout import Quantization
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.needle_sets import read_set
from tests.docs.pages import figures
from tests.helpers.deciding import decided
from tests.helpers.families import stock
from tests.helpers.losses import losses
from tests.helpers.vocabularies import tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/results/caches.md"
LENGTH, NEW = 300, 20
CACHES = ["all heads full, 4 bits", "all heads full, 2 bits", "50% of heads full by er", "budgets of 256 by er, 4 bits"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What a run on a small model has found."""
    folder = tmp_path_factory.mktemp("cache")
    words = tokenizer("bytes", [needle.needle for needle in read_set("word")], size=400)
    model = stock("llama", vocab_size=len(words), head_dim=16)
    model.save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(words.decode(Haystack.read(None, words, 800).tokens))
    shape = Model.of(model.config.to_dict()).dimensions
    losses(shape, base_model="made up").save(folder / "losses.safetensors")
    scores = np.random.default_rng(0).random((shape.layers, shape.kv_heads), dtype=np.float32)
    HeadProfile(scores, "ablation", "kv", "made up", shape).save(folder / "er.safetensors")
    command = ["which_cache.py", folder / "model", "--measured", folder / "losses.safetensors"]
    command += ["--profile", folder / "er.safetensors", "--text", folder / "text.txt", "--json", folder / "found.json"]
    command += ["--length", LENGTH, "--facts", 2, "--prompts", 2, "--new", NEW, "--at-end"]
    command += [word for cache in CACHES for word in ("--only", f"kvsurgery, {cache}")]
    argv = [str(word) for word in command]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        which_cache.main()
    haystack = Haystack.read(str(folder / "text.txt"), words, LENGTH + NEW + 1)
    prompts = trials.prompts(words, haystack, LENGTH, 2, 2, 0, NEW)
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2  # bytes in 16 bit
    report = json.loads((folder / "found.json").read_text())
    return {**report, "command": argv, "model": model, "texts": prompts, "token": token}


def test_results_with_and_without_losses_have_a_file_each(
    found: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*found["command"]]
    place = command.index("--measured")
    del command[place : place + 2]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        which_cache.main()
    assert "was measured with" in capsys.readouterr().err


def test_the_original_is_what_others_are_compared_with(found: dict) -> None:
    original = found["results"]["original"]
    assert original["kl"] == pytest.approx([0, 0], abs=1e-6)
    assert original["kv_bytes"] == [LENGTH * found["token"]] * 2
    assert original["right"] == [
        int(each) for text in found["texts"] for each in trials.correct_answers(found["model"], text)
    ]
    for text, nats in zip(found["texts"], original["nats"], strict=True):
        tokens = torch.from_numpy(np.concatenate([text.text, text.following]))
        assert len(text.text) == LENGTH
        assert len(text.following) == NEW + 1
        logs = found["model"](tokens[None, :-1]).logits[0, LENGTH:].log_softmax(-1)
        assert nats == pytest.approx(-logs.gather(1, tokens[LENGTH + 1 :, None]).mean().item(), rel=1e-4)


@pytest.mark.parametrize("bits", [4, 2])
def test_bytes_are_those_of_a_model_in_16_bits(found: dict, bits: int) -> None:
    """One tile of each head is quantized; there is room for four sinks and 256 tokens more that are not."""
    config = found["model"].config
    tiles = config.num_hidden_layers * config.num_key_value_heads * Quantization(bits).tile_bytes(config.head_dim)
    assert found["results"][f"kvsurgery, all heads full, {bits} bits"]["kv_bytes"] == [260 * found["token"] + tiles] * 2


def test_fewer_bits_lose_more(found: dict) -> None:
    four, two = (found["results"][f"kvsurgery, all heads full, {bits} bits"]["kl"] for bits in (4, 2))
    assert all(more > less > 0 for more, less in zip(two, four, strict=True))


def test_a_question_at_the_end_lacks_the_token_that_its_answer_follows(found: dict) -> None:
    for text in found["texts"]:
        for asked, question in zip(trials.asked_at_end(text), text.questions, strict=True):
            [last] = asked.questions
            assert last.answer == question.answer == len(last.tokens) - 1
            assert [*asked.text, *last.tokens] == [*text.text, *question.tokens]


def test_texts_go_on_after_their_facts(found: dict) -> None:
    assert all(len(text.questions) == 2 for text in found["texts"])
    assert not np.array_equal(found["texts"][0].following, found["texts"][1].following)


def test_the_table_and_the_figure(tmp_path: Path) -> None:
    def result(series: str, right: list[int], nats: list[float], size: int) -> dict:
        return {"series": series, "right": right, "nats": nats, "kl": [0.25, 0.75], "kv_bytes": [size, size]}

    results = {
        "original": {**result("original", [1, 1, 1, 0], [3.0, 5.0], 200), "kl": [0, 0]},
        "SnapKVPress, 35%": result("SnapKVPress", [0, 0, 0, 0], [3.2, 5.2], 70),
        "kvsurgery, all heads full, 4 bits": result("kvsurgery, bits", [1, 1, 1, 0], [3.1, 5.1], 80),
    }
    # outside of 64 + 256 tokens stand both facts of the first text, and the first one of the second
    found = {"settings": {"prompts": 2, "length": 1000}, "places": [100, 700, 100, 800], "results": results}
    kl, ratio = "0.5000 [0.2500, 0.7500]", "× 1.105 [1.105, 1.105]"
    assert cache_report.table(found)[2:] == [
        "| original | 100% | 75% [50%, 100%] | 100% | × 1 | 0 |",
        f"| kvsurgery, all heads full, 4 bits | 40% | 75% [50%, 100%] | 100% (+0 [+0, +0]) | {ratio} | {kl} |",
        f"| SnapKVPress, 35% | 35% | 0% [0%, 0%] | 0% (-100 [-100, -100]) | × 1.221 [1.221, 1.221] | {kl} |",
    ]
    for result in results.values():
        result["right_at_end"] = [1, 1, 0, 0]
    at_end = "50% [0%, 100%] | 67%"
    assert cache_report.asked_table(found)[2:] == [
        f"| original | 100% | 75% [50%, 100%] | 100% | {at_end} |",
        f"| kvsurgery, all heads full, 4 bits | 40% | 75% [50%, 100%] | 100% (+0 [+0, +0]) | {at_end} (+0 [+0, +0]) |",
        f"| SnapKVPress, 35% | 35% | 0% [0%, 0%] | 0% (-100 [-100, -100]) | {at_end} (+0 [+0, +0]) |",
    ]
    cache_report.draw(found, DARK).savefig(tmp_path / "cache.svg")
    assert DARK["converted"] in (tmp_path / "cache.svg").read_text()


def test_the_readme_has_rows_of_the_table() -> None:
    """The README has some rows and columns of the table in docs/results/qwen.md."""
    table = cache_report.table(json.loads((ROOT / "benchmarks" / "results" / "which-cache-qwen.json").read_text()))
    heads, _, *shown = (
        (ROOT / "README.md").read_text().partition("| cache | bytes |")[2].partition("\n\n")[0].split("\n")
    )
    names, *rows = (line.strip("| ").split(" | ") for line in (table[0], *table[2:]))
    places = [names.index(name) for name in ("cache", "bytes", *heads.strip("| ").split(" | "))]
    assert len(shown) > 4
    assert set(shown) <= {f"| {' | '.join(row[place] for place in places)} |" for row in rows}


def test_each_other_cache_is_beaten_by_one_of_ours_as_the_docs_say() -> None:
    rows = cache_report.rows(json.loads((ROOT / "benchmarks" / "results" / "which-cache.json").read_text()))
    ours = [row for row in rows if row.name.startswith("kvsurgery, ")]
    others = [row for row in rows if row not in ours and row.name != "original"]
    for other in others:
        assert any(
            own.share <= other.share
            and own.scores.kl.mean < other.scores.kl.mean
            and own.scores.outside.mean >= other.scores.outside.mean
            and own.scores.recall.mean >= other.scores.recall.mean
            for own in ours
        ), other.name
    assert str(len(others)) in figures(PAGE, "**Bytes, divergence and recall together**")


def test_what_the_docs_say_of_facts_and_divergence() -> None:
    rows = {
        row.name: row
        for row in cache_report.rows(json.loads((ROOT / "benchmarks" / "results" / "which-cache.json").read_text()))
    }

    def recall(name: str) -> str:
        return f"{rows[name].scores.recall.mean:.0%}"

    presses = [row.scores.recall.mean for name, row in rows.items() if name.endswith("Press, 20%")]
    at_most = max(mean for mean in presses if mean != rows["AdaKVPress, 20%"].scores.recall.mean)
    budgets, smaller = (f"kvsurgery, budgets of {budget} by er, 4 bits" for budget in (1024, 512))
    assert f"{rows[budgets].share:.0%}" == "20%"
    shown = {recall(budgets), recall("original"), f"{at_most:.0%}", f"{rows[smaller].share:.0%}", recall(smaller)}
    assert shown <= figures(PAGE, "**At a fifth of the bytes**")
    halves = [rows[f"kvsurgery, 50% of heads full by {chosen}"].scores for chosen in ("er", "measured loss", "gates")]
    lost = sorted(-100 * half.more.mean for half in halves)
    worse = sorted(half.ratio.mean - 1 for half in halves)
    shares = sorted(100 * half.outside.mean for half in halves)
    snap = rows["SnapKVPress, 60%"].scores.outside.mean
    shown = {f"{lost[0]:.0f}", f"{lost[-1]:.0f}", f"{worse[0]:.1%}", f"{worse[-1]:.1%}"}
    shown |= {f"{snap:.0%}", f"{shares[0]:.0f}", f"{shares[-1]:.0f}%"}
    assert shown <= figures(PAGE, "half of the heads full and no quantization")
    presses = [row.scores.kl.mean for name, row in rows.items() if name.endswith("Press, 60%") and row.share < 0.99]
    assert all(max(presses) < half.kl.mean for half in halves)
    full = "kvsurgery, {} of heads full by measured loss, 4 bits{}".format
    windows = {recall(full("25%", "")), recall(full("25%", ", window 16 + 64"))}
    assert windows <= figures(PAGE, "Windows of 16 + 64")
    by_layer, quanto = (
        rows["kvsurgery, all heads full, 3.3 bits by layer, residual 0"],
        rows["QuantizedCache, quanto, 4 bits"],
    )
    assert by_layer.share <= quanto.share
    assert by_layer.scores.kl.mean < 0.55 * quanto.scores.kl.mean


def test_presses_answer_at_the_end_and_lose_later_as_the_docs_say() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "which-cache-at-end.json").read_text())
    later, at_end = (
        {row.name: row.scores.more for row in cache_report.rows(report, right) if row.name != "original"}
        for right in ("right", "right_at_end")
    )
    presses = ("SnapKV", "PyramidKV", "AdaKV", "TOVA", "StreamingLLM")
    smallest = "kvsurgery, budgets of 128 by er"
    for name, more in later.items():
        assert more.low <= 0 <= more.high or not name.startswith("kvsurgery") or name == smallest, name
        assert more.high < 0 or not name.startswith(presses), name
    for name, more in at_end.items():
        assert (more.high < 0) == name.startswith(("ExpectedAttention", "StreamingLLM")), name
    expected_attention = [-100 * more.mean for name, more in at_end.items() if name.startswith("ExpectedAttention")]
    shown = {f"{edge(expected_attention):.0f}" for edge in (min, max)}
    assert shown <= figures(PAGE, "**Asked at the end**")
    shown = {f"{-100 * later[name].mean:.0f}" for name in (smallest, "SnapKVPress, 35%", "SnapKVPress, 60%")}
    profile = load_scores(ROOT / "examples" / "smollm2" / "er.safetensors")
    recipe = Recipe.of(rest="budgeted", budget=256)
    layers = decided(profile, recipe=recipe).layout.layers
    budgets = np.array([budget for layer in layers for budget in layer.budgets])
    length = report["settings"]["length"]
    whole, half = (budgets >= length).sum(), ((budgets > length / 2) & (budgets < length)).sum()
    shown |= {str(whole), str(len(budgets)), str(half)}
    assert shown <= figures(PAGE, "**Asked later**")
