"""The comparison of caches in long answers: what the small ones keep, what is asked of them, and its tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.real_model import long_answers, selection_cost
from benchmarks.real_model.sessions import H2O, TOVA, Session
from kvsurgery.checkpoint.model import Model
from kvsurgery.display import console
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from kvsurgery.text.haystack import Haystack
from tests.docs.pages import figures
from tests.helpers.deciding import decided
from tests.helpers.families import stock

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/results/caches.md"
PROMPT, NEW, BUDGET, WINDOW, HOLD = 120, 80, 10, 8, 32
FACTS = 2
MOST = BUDGET + WINDOW + HOLD


@pytest.fixture(scope="module")
def model(words: PreTrainedTokenizerFast) -> PreTrainedModel:
    return stock("llama", num_hidden_layers=2, head_dim=8, vocab_size=len(words), attn_implementation="eager")


@pytest.fixture(scope="module")
def command(words: PreTrainedTokenizerFast, model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> list:
    folder = tmp_path_factory.mktemp("answers")
    model.save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(words.decode(Haystack.read(None, words, 900).tokens))
    shape = Model.of(model.config.to_dict()).dimensions
    scores = np.ones((shape.layers, shape.kv_heads), dtype=np.float32)
    HeadProfile(scores, "headkv-er", "kv", "made up", shape).save(folder / "er.safetensors")
    found = ["long_answers.py", folder / "model", "--profile", folder / "er.safetensors"]
    found += ["--text", folder / "text.txt", "--prompt", PROMPT, "--new", NEW, "--budget", BUDGET, "--hold", HOLD]
    return [str(word) for word in found]


@pytest.fixture(autouse=True)
def few_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_answers, "FACTS", FACTS)


@pytest.mark.parametrize("kind", [H2O, TOVA])
def test_who_keeps_everything_is_the_original(model: PreTrainedModel, kind: type[H2O]) -> None:
    tokens = torch.from_numpy(np.random.default_rng(0).integers(5, 300, (1, 40)))
    whole = model(tokens).logits
    for session in (Session(model, tokens[:, :25], 15), kind(model, tokens[:, :25], 15, max_tokens=40)):
        with torch.no_grad():
            logits = torch.cat([session.last, session.read(tokens[:, 25:])], 1)
        torch.testing.assert_close(logits, whole[:, 24:], atol=1e-5, rtol=0)


def test_h2o_keeps_the_recent_and_what_got_most_attention_so_far(model: PreTrainedModel) -> None:
    """Of 20 tokens and 4 more, one at a time, each head of a layer keeps 8: 4 recent and 4 others."""
    tokens = torch.from_numpy(np.random.default_rng(1).integers(5, 300, (1, 24)))
    with torch.no_grad():
        session = H2O(model, tokens[:, :20], 4, max_tokens=8)
        weights = model(tokens[:, :20], output_attentions=True).attentions[0][0]
        heads = session.cache.layers[0].keys.shape[1]
        received = weights.unflatten(0, (heads, -1)).sum((1, 2))
        for head in range(heads):
            expected = sorted([*received[head, :16].topk(4).indices.tolist(), 16, 17, 18, 19])
            every = model(tokens[:, :20]).past_key_values.layers[0].keys[0, head]
            torch.testing.assert_close(session.cache.layers[0].keys[0, head], every[expected], atol=1e-6, rtol=0)
        session.read(tokens[:, 20:])
    assert all(layer.keys.shape[2] == 8 for layer in session.cache.layers)
    states = 2 * len(session.cache.layers) * heads * 8 * session.cache.layers[0].keys.shape[3] * 4
    assert session.kv_bytes == states + len(session.cache.layers) * heads * 8 * 4


def test_tova_drops_what_the_last_query_asked_for_least(model: PreTrainedModel) -> None:
    tokens = torch.from_numpy(np.random.default_rng(2).integers(5, 300, (1, 20)))
    with torch.no_grad():
        session = TOVA(model, tokens, 4, max_tokens=8)
        output = model(tokens, output_attentions=True)
    kept = output.attentions[1][0, :, -1].mean(0).topk(8).indices.sort().values
    every = output.past_key_values.layers[1].values[0, :, kept]
    torch.testing.assert_close(session.cache.layers[1].values[0], every, atol=1e-6, rtol=0)


def test_caches_of_as_many_tokens_take_as_many_bytes(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Facts stand in prompts and in answers; a run goes on from its file."""
    results = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [*command, "--cases", "2", "--steps", "3", "--json", str(results)])
    long_answers.main()
    written = json.loads(results.read_text())
    found, answers = written["results"], written["answers"]
    shape = HeadProfile.load(command[3]).model
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * 4
    held = {name: [case["kv_bytes"] for case in cases] for name, cases in found.items()}
    assert held["original"] == [(PROMPT + NEW) * token] * 2
    for name in (
        "budgets of 10 that hold, blocks of 32",
        "budgets of 34 that hold, blocks of 8",
        "all heads streaming, 4 + 46",
        "TOVA, 50",
    ):
        assert held[name] == [MOST * token] * 2
    assert held["budgets of 10, all that follows is kept"] == [(BUDGET + WINDOW + NEW) * token] * 2
    profile = HeadProfile.load(command[3])
    plain = Recipe.of(rest="budgeted", budget=34, hold=8)
    for bits in (4, 2):  # as many bytes as fit, in 16 bit
        [budget] = (int(name.split()[2]) for name in found if name.endswith(f"{bits} bits"))
        how = plain.changed(kv_bits=bits, kv_scheme="per-token", kv_residual=8)
        taken = [
            long_answers._bytes(Path(command[1]), profile, recipe)
            for recipe in (how.changed(budget=budget), plain, how.changed(budget=budget + 1))
        ]
        assert taken[0] <= taken[1] < taken[2]
    assert not any("kvpress" in name for name in found)  # it is not installed here
    assert all(len(answer) == NEW for answer in answers)
    assert all(case["kl"] == pytest.approx([0] * 4, abs=1e-6) for case in found["original"])
    assert all(case["same"] == [1.0] * 4 for case in found["original"])
    assert all(np.shape(case["right"]) == (4, FACTS) for cases in found.values() for case in cases)
    assert all(np.shape(case["own"]) == (3, FACTS) for cases in found.values() for case in cases)
    del found["TOVA, 50"][1]
    found["H2O, 50"][0]["nats"] = [0.0] * 4
    results.write_text(json.dumps(written))
    long_answers.main()
    again = json.loads(results.read_text())
    assert again["answers"] == answers
    assert again["results"]["H2O, 50"][0]["nats"] == [0.0] * 4
    assert len(again["results"]["TOVA, 50"]) == 2
    assert "| cache | KV bytes | perplexity up to 20 | 40 | 60 | 80 |" in capsys.readouterr().out
    sys.argv[-1], sys.argv[sys.argv.index("--new") + 1] = str(results), "260"
    with pytest.raises(SystemExit):
        long_answers.main()
    assert "was measured with" in capsys.readouterr().err


def test_budgets_that_hold_write_at_a_pace_in_constant_bytes(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The facts of the answer come in between; the cache that wrote the beginning reads them and goes on."""
    results = tmp_path / "found.json"
    options = ["--cases", "2", "--writer", "held", "--first", "1", "--steps", "0", "--json", str(results)]
    monkeypatch.setattr(sys, "argv", [*command, *options])
    monkeypatch.setattr(long_answers, "SPAN", 20)
    long_answers.main()
    found = json.loads(results.read_text())
    assert [len(answer) for answer in found["answers"]] == [NEW, NEW]
    tokens, seconds, held = zip(*found["marks"], strict=True)
    assert tokens[0] == 1
    assert tokens[-1] == NEW
    assert [*seconds] == sorted(seconds)
    shape = HeadProfile.load(command[3]).model
    assert {*held[1:]} == {2 * MOST * 2 * shape.layers * shape.kv_heads * shape.head_dim * 4}


def test_a_given_text_is_read_as_it_is(
    command: list[str],
    words: PreTrainedTokenizerFast,
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Perplexity is that of one forward over prompt and text."""
    results = tmp_path / "found.json"
    options = ["--cases", "1", "--given", "--first", "1", "--steps", "0", "--json", str(results)]
    monkeypatch.setattr(sys, "argv", [*command, *options])
    long_answers.main()
    [case] = long_answers.cases(Path(command[1]), Path(command[5]), (PROMPT, NEW), 1, None, [], [])
    tokens = torch.from_numpy(np.concatenate([case.prompt.text, case.prompt.following]))[None]
    with torch.no_grad():
        logs = model(tokens).logits[0, PROMPT - 1 : -1].log_softmax(-1)
    nats = -logs.gather(1, tokens[0, PROMPT:, None])[:, 0].view(4, -1).mean(1)
    found = json.loads(results.read_text())["results"]
    assert [*found] == ["original"]
    assert found["original"][0]["nats"] == pytest.approx(nats.tolist(), rel=1e-4)


def test_the_table_counts_what_the_original_recalls() -> None:
    def case(nats: float, right: list[int], own: list[int]) -> dict:
        parts = {"nats": [nats] * 4, "same": [0.5] * 4, "kl": [0.25] * 4, "step_ms": [10.0, 11.0, 12.0, 13.0]}
        return {**parts, "right": [right] * 4, "own": [own] * 3, "kv_bytes": 1024}

    results = {
        "original": [case(1.0, [1, 1, 0, 1], [1, 1]), case(2.0, [1, 0, 0, 0], [0, 1])],
        "TOVA, 30": [case(1.5, [1, 0, 0, 1], [1, 0]), case(2.5, [0, 1, 1, 1], [1, 1]), case(9.0, [0] * 4, [0] * 2)],
    }
    assert long_answers.table({"settings": {"new": 400, "steps": 3}, "results": results})[2:] == [
        "| original | 1.00 KiB | 4.5 | 4.5 | 4.5 | 4.5 | 50.0% | 0.2500 | 16 of 16 | 9 of 9 | 10 | 13 |",
        "| TOVA, 30 | 1.00 KiB | 7.4 | 7.4 | 7.4 | 7.4 | 50.0% | 0.2500 | 8 of 16 | 6 of 9 | 10 | 13 |",
    ]


def test_the_pace_is_that_of_the_tokens_before_each_mark() -> None:
    marks = [[1, 0.5, 900], [1024, 102.8, 1024], [2048, 205.2, 1024], [3072, 307.6, 1024], [4096, 512.4, 2048]]
    assert long_answers.pace_table({"settings": {"new": 4096}, "marks": marks}) == [
        "| tokens written | 1,024 | 2,048 | 3,072 | 4,096 |",
        "|---|---|---|---|---|",
        "| ms a token | 100 | 100 | 100 | 200 |",
        "| KV bytes | 1.00 KiB | 1.00 KiB | 1.00 KiB | 2.00 KiB |",
    ]


def test_the_readme_says_what_was_measured() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "long-answers.json").read_text())["results"]
    held = {name: max(case["kv_bytes"] for case in cases) for name, cases in found.items()}
    name = "budgets of 451 that hold, 4 bits"
    small = [other for other in held if held[other] < held["original"] / 10]
    kl = {other: np.mean([case["kl"] for case in found[other]]) for other in small}
    assert min(kl, key=kl.__getitem__) == name
    same = np.mean([case["same"] for case in found[name]])
    right, known = (np.array([case["right"] for case in found[who]]) for who in (name, "original"))
    sizes = (console.size(held[who]).split()[0] for who in (name, "original"))
    shown = {*sizes, f"{same:.0%}", str(known.sum()), str((right * known).sum())}
    assert shown <= figures("README.md", "**Long answers**")


def test_the_docs_say_what_was_measured() -> None:
    """Of budgets that hold as many bytes, and of time over length."""
    results = ROOT / "benchmarks" / "results"
    found = json.loads((results / "long-answers.json").read_text())["results"]
    kl = {name: np.mean([case["kl"] for case in cases]) for name, cases in found.items()}
    plain, *packed = (
        kl[f"budgets of {name}"]
        for name in ("216 that hold, blocks of 32", "451 that hold, 4 bits", "674 that hold, 2 bits")
    )
    assert [each / plain for each in packed] == pytest.approx([1 / 2, 4 / 3], rel=0.1)
    quarters = {name: np.array([case["kl"] for case in cases]) for name, cases in found.items()}
    grow = ("original", "budgets of 120, all that follows is kept")
    packed_quarters = quarters.pop("budgets of 451 that hold, 4 bits")
    assert all((packed_quarters < other).all() for name, other in quarters.items() if name not in grow)
    same = {name: np.mean([case["same"] for case in cases]) for name, cases in found.items()}
    assert (quarters["budgets of 216 that hold, blocks of 32"] < quarters["TOVA, 256"]).sum() == 5
    assert 0 < same["TOVA, 256"] - same["budgets of 216 that hold, blocks of 32"] < 0.005
    prompts, answers = (np.array([case[part] for case in found["original"]]) for part in ("right", "own"))
    facts = (prompts.sum(), prompts.any(1).sum(), answers.sum(), answers.any(1).sum())
    assert {str(count) for count in facts} <= figures(PAGE, "an answer of 4,096 tokens")
    counts = {name: (np.array([case["right"] for case in found[name]]) * prompts).sum() for name in found}
    recalled = counts["budgets of 451 that hold, 4 bits"], prompts.sum(), counts["H2O, 256"]
    assert {str(count) for count in recalled} <= figures(PAGE, "**Recall.**")
    assert sorted(counts.values())[-5] == 2
    for name, [case] in json.loads((results / "long-text.json").read_text())["results"].items():
        growth = case["step_ms"][-1] / case["step_ms"][0]
        assert growth > 2 if name == "original" else growth < 1.1


def test_the_docs_say_what_caches_take_in_16_bit() -> None:
    """Of the recipes that were measured in float32, which the committed bytes confirm."""
    found = json.loads((ROOT / "benchmarks" / "results" / "long-answers.json").read_text())
    profile = HeadProfile.load(ROOT / "examples" / "smollm2" / "er.safetensors")
    plain = Recipe.of(rest="budgeted", budget=216, hold=32)
    packed = plain.changed(kv_bits=4, kv_scheme="per-token", kv_residual=32)
    recipes = {
        "budgets of 216 that hold, blocks of 32": plain,
        "budgets of 451 that hold, 4 bits": packed.changed(budget=451),
        "budgets of 674 that hold, 2 bits": packed.changed(budget=674, kv_bits=2),
    }
    for name, recipe in recipes.items():
        layout = decided(profile, recipe=recipe).layout
        size = found["settings"]["prompt"], found["settings"]["new"]
        assert layout.kv_bytes(1, *size, itemsize=4) == found["results"][name][0]["kv_bytes"]
        assert f"{layout.kv_bytes(1, *size, itemsize=2) / 2**20:.1f}" == "5.6"
    original = found["results"]["original"][0]["kv_bytes"] / 2
    assert {console.size(original).split()[0], "216", "451", "674", "5.6"} <= figures(PAGE, "in 16 bit the original")


@pytest.mark.parametrize("name", ["held-answers", "held-answers-bundled"])
def test_how_budgets_that_hold_write(name: str) -> None:
    """In constant bytes, at a constant pace."""
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    *_, step, _ = long_answers.pace_table(found)
    paces = [float(cell) for cell in step.split("|")[2:-1]]
    assert abs(paces[-1] / paces[0] - 1) < 0.1
    cases = found["results"]["budgets of 216 that hold, blocks of 32"]
    assert {mark[2] for mark in found["marks"][1:]} == {sum(case["kv_bytes"] for case in cases)}


def test_the_docs_compare_caches_within_the_context() -> None:
    """Up to where the context of the model ends, in the first quarters of an answer."""
    results = ROOT / "benchmarks" / "results"
    said = (ROOT / "docs" / "results" / "caches.md").read_text()
    for name, [case] in json.loads((results / "held-answers.json").read_text())["results"].items():
        same, kl = (np.mean(case[part][:2]) for part in ("same", "kl"))
        assert f"| {name} | {same:.1%} | {kl:.4f} |" in said
    bundled = json.loads((results / "held-answers-bundled.json").read_text())["results"]
    kl = {name: np.mean([case["kl"][0] for case in cases]) for name, cases in bundled.items()}
    places = [said.index(f"({value:.4f})") for value in sorted(kl.values())[1:5]]  # the first is the original's
    assert places == sorted(places)


def test_selection_has_its_share_of_a_step(
    command: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "cost.json"
    [model, profile] = command[1], command[3]
    words = ["selection_cost.py", model, "--profile", profile, "--steps", "40", "--json", str(results)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(selection_cost, "BLOCKS", (32,))
    selection_cost.main()
    found = json.loads(results.read_text())["results"]
    assert [*found] == ["unquantized, blocks of 32", "4 bits, blocks of 32"]
    assert all(each["watch"] > 0 and 0 < each["renew"] < each["step"] for each in found.values())
    assert [each["quantize"] > 0 for each in found.values()] == [False, True]
    assert "| heads | ms a step |" in capsys.readouterr().out


def test_the_docs_say_what_selection_costs() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "selection-cost.json").read_text())
    shares = {name: (each["watch"] + each["renew"]) / each["step"] for name, each in found["results"].items()}
    assert max(shares.values()) < 0.02
    wide, narrow = (shares[f"4 bits, blocks of {block}"] for block in (64, 32))
    assert {f"{wide:.2%}", f"{narrow:.2%}"} <= figures("docs/recipes.md", "decode time")
