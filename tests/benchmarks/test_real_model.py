"""What the benchmark on a real language model asks, how it is marked, and what its tables say."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.real_model import heads_report, paired, selections, trials, which_heads
from kvsurgery.checkpoint.model import Model
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.measure.cache_losses import TrialSizes
from kvsurgery.measure.cache_trial import next_token_divergence
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.text.haystack import Haystack
from tests.helpers.families import stock

ROOT = Path(__file__).resolve().parents[2]
LENGTH, FACTS = 120, 3


@pytest.fixture(scope="module")
def haystack(words: PreTrainedTokenizerFast) -> Haystack:
    return Haystack.read(None, words, 5 * LENGTH)


@pytest.fixture(scope="module")
def model(words: PreTrainedTokenizerFast) -> PreTrainedModel:
    return stock("llama", vocab_size=len(words))


def greedy(model: PreTrainedModel, tokens: np.ndarray, count: int) -> list[int]:
    ids = torch.from_numpy(tokens)[None]
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[0, -count:].tolist()


def test_every_fact_is_stated_once_and_asked_for(words: PreTrainedTokenizerFast, haystack: Haystack) -> None:
    for prompt in trials.prompts(words, haystack, LENGTH, FACTS, count=4, seed=0):
        text = words.decode(prompt.text)
        assert len(prompt.text) == LENGTH
        assert len(prompt.questions) == FACTS
        for question in prompt.questions:
            asked = words.decode(question.tokens)
            assert asked.startswith("\n\nThe secret word of the ")
            assert text.count(f"{asked.strip()}.") == 1


def test_draws_are_those_of_committed_results(words: PreTrainedTokenizerFast, haystack: Haystack) -> None:
    """A results file continues with the prompts and windows that it was begun with."""
    drawn_prompts = {
        "single": trials.prompts(words, haystack, LENGTH, FACTS, count=4, seed=0, new=8),
        "two-hops": trials.chained_prompts(words, haystack, 3 * LENGTH, FACTS, count=4, seed=0),
        "list": trials.listing_prompts(words, haystack, LENGTH, FACTS, count=4, seed=0),
    }
    drawn_tokens = {
        name: [tokens for prompt in prompts for tokens in (prompt.text, prompt.following, *_asked(prompt))]
        for name, prompts in drawn_prompts.items()
    }
    drawn_tokens["windows"] = [window.tokens for window in trials.windows(haystack, prompt=50, new=20, count=3)]
    drawn_tokens["passages"] = TrialSizes(passages=5, context=50, scored=13).of(haystack.tokens, [1])
    hashes = {name: blake3(np.concatenate(parts).tobytes()).hexdigest()[:8] for name, parts in drawn_tokens.items()}
    assert hashes == {
        "single": "cb093b81",
        "two-hops": "79f3119f",
        "list": "72463432",
        "windows": "9d2c751c",
        "passages": "05565533",
    }


def _asked(prompt: trials.Prompt) -> list[np.ndarray]:
    return [np.array(question.tokens) for question in prompt.questions]


def test_an_answer_is_right_where_greedy_decoding_says_it(
    words: PreTrainedTokenizerFast, haystack: Haystack, model: PreTrainedModel
) -> None:
    [prompt] = trials.prompts(words, haystack, LENGTH, FACTS, count=1, seed=0)
    told, questions = [], []
    for number, question in enumerate(prompt.questions):
        ask = question.tokens[: -question.answer]
        said = greedy(model, np.concatenate([prompt.text, ask]), 2)
        right = number != 1
        questions.append(trials.Question([*ask, *(said if right else [said[0], said[1] ^ 1])], 2))
        told.append(right)
    assert trials.correct_answers(model, replace(prompt, questions=tuple(questions))) == told


def test_likelihoods_are_those_of_one_forward(haystack: Haystack, model: PreTrainedModel) -> None:
    first, second = trials.windows(haystack, prompt=50, new=20, count=2)
    logs, whole = trials.next_tokens(model, first), model(torch.from_numpy(first.tokens)[None]).logits[0, 50:-1]
    torch.testing.assert_close(logs, whole.log_softmax(-1), atol=1e-5, rtol=0)
    assert next_token_divergence(logs, logs) == pytest.approx(0, abs=1e-6)
    assert next_token_divergence(trials.next_tokens(model, second), logs) > 0
    picked = [logs[place, token] for place, token in enumerate(first.tokens[51:])]
    assert trials.nats(logs, first) == pytest.approx(-float(np.mean(picked)), rel=1e-5)


def written(model: PreTrainedModel, words: PreTrainedTokenizerFast, source: Path, text: Path) -> ModelDimensions:
    """Write a model with its tokenizer, and a text."""
    model.save_pretrained(source)
    words.save_pretrained(source)
    text.write_text(words.decode(Haystack.read(None, words, 600).tokens))
    return Model.of(model.config.to_dict()).dimensions


def test_a_run_goes_on_from_its_file(
    words: PreTrainedTokenizerFast,
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, text, results = tmp_path / "model", tmp_path / "text.txt", tmp_path / "found.json"
    shape = written(model, words, source, text)
    scores = np.random.default_rng(0).random((shape.layers, shape.kv_heads), dtype=np.float32)
    HeadProfile(scores, "ablation", "kv", str(source), shape).save(tmp_path / "gates.safetensors")
    command = ["which_heads.py", source, "--profile", tmp_path / "gates.safetensors", "--facts-in", text]
    command += ["--text", text, "--length", LENGTH, "--prompts", 2, "--prompt", 60, "--new", 20, "--windows", 2]
    (tmp_path / "answers.jsonl").write_text(json.dumps({"prompt": [*range(5, 45)], "answer": [*range(9, 30)]}))
    command += ["--answers", tmp_path / "answers.jsonl", "--size", "2+4", "--shares", "0.5", "--draws", 1]
    monkeypatch.setattr(sys, "argv", [str(word) for word in [*command, "--json", results]])
    which_heads.main()
    found = json.loads(results.read_text())
    names = ["original", *(f"{heads}, 50% full, 2+4" for heads in ("gates", "first layers", "random 0"))]
    assert list(found["results"]) == names
    assert found["settings"]["answers"] == 1
    assert found["results"]["original"]["kl"] == pytest.approx([0, 0, 0], abs=1e-6)
    assert all(len(result["right"]) == 2 * 4 and min(result["kl"]) > 0 for result in [*found["results"].values()][1:])
    del found["results"][names[2]]
    found["results"]["original"]["right"] = [1] * 8  # kept, not computed again
    results.write_text(json.dumps(found))
    which_heads.main()
    again = json.loads(results.read_text())["results"]
    assert again["original"]["right"] == [1] * 8
    assert set(again) == set(names)
    del again[names[1]]
    results.write_text(json.dumps(found | {"results": again}))
    sys.argv += ["--only", names[1]]
    capsys.readouterr()
    which_heads.main()
    assert f"2 of 2: {names[1]}: " in capsys.readouterr().err
    sys.argv[sys.argv.index("--prompts") + 1] = "3"
    with pytest.raises(SystemExit, match="was measured with"):
        which_heads.main()


def test_places_are_where_facts_end(words: PreTrainedTokenizerFast, haystack: Haystack) -> None:
    for prompt in trials.prompts(words, haystack, LENGTH, FACTS, count=4, seed=0):
        assert len(prompt.places) == FACTS
        for place, question in zip(prompt.places, prompt.questions, strict=True):
            assert words.decode(prompt.text[: place + 1]).endswith(f"{words.decode(question.tokens).strip()}.")


def test_two_hops_take_two_facts(words: PreTrainedTokenizerFast, haystack: Haystack) -> None:
    for prompt in trials.chained_prompts(words, haystack, 3 * LENGTH, FACTS, count=4, seed=0):
        text = words.decode(prompt.text)
        assert (len(prompt.text), len(prompt.places)) == (3 * LENGTH, 2 * FACTS)
        for question in prompt.questions:
            asked = words.decode(question.tokens).strip()
            place, word = asked.removeprefix("The secret word of the ").split(" is ")
            [(_, other)] = [
                link
                for link in re.findall(r"The (\w+) has the same secret word as the (\w+)\.", text)
                if link[0] == place
            ]
            assert f"{asked}." not in text
            assert text.count(f"The secret word of the {other} is {word}.") == 1


def test_a_list_takes_all_facts(words: PreTrainedTokenizerFast, haystack: Haystack) -> None:
    for prompt in trials.listing_prompts(words, haystack, LENGTH, FACTS, count=4, seed=0):
        [question] = prompt.questions
        text, asked = words.decode(prompt.text), words.decode(question.tokens)
        assert (len(prompt.text), len(question.listed)) == (LENGTH, FACTS)
        for place, word in zip(prompt.places, question.listed, strict=True):
            [subject] = re.findall(rf"The secret word of the (\w+) is {words.decode(word).strip()}\.", text)
            assert words.decode(prompt.text[: place + 1]).endswith(f" of the {subject} is{words.decode(word)}.")
            assert f"the {subject}" in asked.split(", one after another:")[0]
        assert asked.endswith(" is")


def result(right: list[int], nats: list[float]) -> dict:
    return {"right": right, "nats": nats, "kl": [0.25, 0.75]}


FOUND = {
    "settings": {"prompts": 2, "length": 100},
    "places": [2, 30, 40, 90],  # sinks or the window of 4 + 20 tokens hold the first and the last
    "results": {
        "original": {"right": [1, 1, 1, 0], "nats": [3.0, 5.0], "kl": [0, 0]},
        "gates, 50% full, 4+20": result([1, 1, 1, 0], [3.1, 5.1]),
        "random 0, 50% full, 4+20": result([0, 0, 0, 0], [3.5, 5.5]),
        "random 1, 50% full, 4+20": result([1, 1, 0, 0], [3.7, 5.7]),
        "gates, 50% full, 4+60": result([1, 0, 1, 0], [3.0, 5.0]),
    },
}


def test_the_table_counts_by_prompt_and_pairs_by_window(tmp_path: Path) -> None:
    assert heads_report.windows(FOUND) == ["4+20", "4+60"]
    original, gates, random = heads_report.rows(FOUND, "4+20")
    assert (original.scores.recall.mean, original.scores.ratio.mean, original.share) == (0.75, 1, None)
    recall = gates.scores.recall
    assert (recall.mean, recall.low, recall.high) == (0.75, 0.5, 1)
    # paired: windows differ in what they cost, not in how much more a choice of heads costs
    assert gates.scores.ratio.low == pytest.approx(gates.scores.ratio.high) == pytest.approx(np.exp(0.1))
    assert (random.scores.recall.mean, random.draws) == (0.25, (0, 0.5))
    assert heads_report.table(FOUND, "4+20")[2:] == [
        "| all | original | 75% [50%, 100%] | 100% | × 1 | 0 |",
        "| 50% | gates | 75% [50%, 100%] | 100% (+0 [+0, +0]) | × 1.105 [1.105, 1.105] | 0.5000 [0.2500, 0.7500] |",
        "| 50% | random | 25% [0%, 100%] (0% to 50% in 2 draws) | 25% (-75 [-100, +0]) | × 1.822 [1.649, 2.014] | "
        "0.5000 [0.2500, 0.7500] |",
    ]
    assert "| 50% | gates | 50% [50%, 50%] | " in heads_report.table(FOUND, "4+60")[3]
    heads_report.plot(FOUND, "4+20", tmp_path / "heads.png")
    heads_report.plot_lengths([FOUND, FOUND], "4+20", tmp_path / "lengths.png")
    assert min((tmp_path / name).stat().st_size for name in ("heads.png", "lengths.png")) > 10_000


def test_seeds_of_a_training_are_one_row() -> None:
    results = {
        "original": FOUND["results"]["original"],
        "gates, 50% full, 4+20": result([1, 1, 1, 0], [3.1, 5.1]),
        "gates, seed 1, 50% full, 4+20": result([0, 0, 1, 0], [3.1, 5.1]),
    }
    [_, row] = heads_report.rows(FOUND | {"results": results}, "4+20")
    assert (row.heads, row.scores.recall.mean, row.draws) == ("gates", 0.5, (0.25, 0.75))
    [*_, line] = heads_report.table(FOUND | {"results": results}, "4+20")
    assert line.startswith("| 50% | gates | 50% [0%, 100%] (25% to 75% in 2 seeds) | ")
    del results["gates, 50% full, 4+20"]
    results["top 5, 50% full, 4+20"] = results["top 10, 50% full, 4+20"] = result([1, 0, 1, 0], [3.1, 5.1])
    [_, *alone] = heads_report.rows(FOUND | {"results": results}, "4+20")
    assert [(row.heads, row.draws) for row in alone] == [("gates, seed 1", ()), ("top 5", ()), ("top 10", ())]


def test_draws_widen_an_interval() -> None:
    """Draws that differ by more than texts do: the interval reaches from the one to the other."""
    far = np.ones(40, dtype=bool)
    right = [result([value] * 40, [1.0, 1.0]) for value in (0, 1)]
    whole = paired.scores(right, result([1] * 40, [1.0, 1.0]), 10, far)
    assert (whole.recall.mean, whole.recall.low, whole.recall.high) == (0.5, 0, 1)
    assert (whole.more.mean, whole.more.low, whole.more.high) == (-0.5, -1, 0)
    alone = paired.scores(right[:1], result([1] * 40, [1.0, 1.0]), 10, far)
    assert (alone.recall.low, alone.recall.high) == (0, 0)


def test_selections_are_compared_at_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """On the bundled model. What is measured is not measured again."""
    results = tmp_path / "found.json"
    command = ["selections.py", "--prompt", 60, "--new", 40, "--budget", 10, "--beta", 10, "--hold", 12, "--cases", 2]
    monkeypatch.setattr(sys, "argv", [str(word) for word in (*command, "--json", results)])
    selections.main()
    found = json.loads(results.read_text())["results"]
    assert [*found] == ["original", *selections.SELECTS]
    held = {name: [case["kv_bytes"] for case in cases] for name, cases in found.items()}
    token = 2 * 32 * 4  # of a head
    assert held["attention"] == held["value-norm"] == [3 * 4 * 30 * token] * 2
    assert [np.shape(case["right"]) for cases in found.values() for case in cases] == [(3, 4)] * 6
    assert np.mean([case["right"] for case in found["original"]]) > 0.9
    del found["value-norm"][1]
    found["original"][0]["nats"] = [0.0] * 4
    results.write_text(json.dumps(json.loads(results.read_text()) | {"results": found}))
    selections.main()
    again = json.loads(results.read_text())["results"]
    assert again["original"][0]["nats"] == [0.0] * 4
    assert len(again["value-norm"]) == 2
    assert "| selected by | KV bytes | perplexity up to 10 | 20 | 30 | 40 |" in capsys.readouterr().out


def test_selections_count_what_the_original_recalls() -> None:
    def result(right: list[int], nats: float) -> dict:
        return {"right": [right] * 3, "nats": [nats] * 4, "kv_bytes": 1024}

    results = {
        "original": [result([1, 1, 0, 1], 1.0), result([1, 0, 0, 0], 2.0), result([1, 0, 0, 0], 2.0)],
        "attention": [result([1, 0, 0, 1], 1.5), result([0, 0, 0, 0], 2.5)],
        "value-norm": [result([1, 1, 1, 1], 1.4), result([0, 0, 1, 0], 2.4)],
    }
    assert selections.table({"settings": {"new": 400}, "results": results})[2:] == [
        "| original | 1.00 KiB | 4.48 | 4.48 | 4.48 | 4.48 |  | 4 of 4 | 4 of 4 | 4 of 4 |  |",
        "| attention | 1.00 KiB | 7.39 | 7.39 | 7.39 | 7.39 |  | 2 of 4 | 2 of 4 | 2 of 4 |  |",
        "| value-norm | 1.00 KiB | 6.69 | 6.69 | 6.69 | 6.69 | × 0.905 [0.905, 0.905] | 3 of 4 | 3 of 4 | 3 of 4 | "
        "+17% [+0%, +33%] |",
    ]


def test_facts_are_counted_by_depth() -> None:
    places, right = [0, 99, 100, 250, 399], [1, 0, 1, 1, 0]
    found = {
        "settings": {"length": 400},
        "places": places,
        "results": {
            "original": {"right": right},
            "gates, 50% full, 4+8": {"right": [0] * 5},
            "random 0, 50% full, 4+8": {"right": [1] * 5},
            "random 1, 50% full, 4+8": {"right": right},
            "gates, 25% full, 4+8": {"right": [1] * 5},
            "gates, 50% full, 4+16": {"right": [1] * 5},
        },
    }
    assert heads_report.depth_table(found, "4+8", 50)[2:] == [
        "| original | 1 of 2 | 1 of 1 | 1 of 1 | 0 of 1 |",
        "| gates | 0 of 2 | 0 of 1 | 0 of 1 | 0 of 1 |",
        "| random | 1.5 of 2 | 1 of 1 | 1 of 1 | 0.5 of 1 |",
    ]
