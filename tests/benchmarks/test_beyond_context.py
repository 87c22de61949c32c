"""The comparison of ways to read prompts beyond the context of a real language model."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.real_model import beyond_context
from benchmarks.real_model.trials import listing_prompts, prompts
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.text.haystack import Haystack
from tests.docs.pages import figures

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/results/long-prompts.md"
FEW = ["full attention", "REFORM", "BM25 retrieval", "truncation"]
NAMES = [*FEW, "H2O", "StreamingLLM", "InfiniPot", "InfLLM-like blocks"]


@pytest.mark.usefixtures("small_budgets")
def test_a_run_goes_on_from_its_file(
    beyond_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Full attention is left out where the model has no positions for it; a text may be read by more methods later."""
    results = tmp_path / "found.json"
    command = ["beyond_context.py", beyond_folder, "--profile", beyond_folder / "reform.safetensors"]
    command += ["--text", beyond_folder / "text.txt", "--lengths", 180, 220, "--texts", 2, "--recurrent-texts", 1]
    command += ["--json", results, "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    beyond_context.main()
    written = json.loads(results.read_text())
    found = written["results"]
    assert [sorted(sample) for sample in found["180"]] == [sorted(NAMES), sorted(FEW)]
    assert [sorted(sample) for sample in found["220"]] == [sorted(NAMES[1:]), sorted(FEW[1:])]
    assert {len(answers["right"]) for sample in found["220"] for answers in sample.values()} == {4}
    found["180"][0]["REFORM"]["right"] = "kept"
    del found["220"][1]
    results.write_text(json.dumps(written))
    monkeypatch.setattr(beyond_context, "table", lambda found: ["the table"])
    beyond_context.main()
    again = json.loads(results.read_text())["results"]
    assert again["180"][0]["REFORM"]["right"] == "kept"
    assert len(again["220"]) == 2
    assert "the table" in capsys.readouterr().out
    sys.argv[sys.argv.index("--recurrent-texts") + 1] = "2"
    beyond_context.main()
    more = json.loads(results.read_text())["results"]
    assert more["180"][0] == again["180"][0]
    assert [sorted(sample) for sample in more["180"]] == [sorted(NAMES)] * 2
    assert all(more["180"][1][name] == again["180"][1][name] for name in FEW)
    sys.argv[-1] = "bfloat16"
    with pytest.raises(SystemExit):
        beyond_context.main()
    assert "measured with other settings" in capsys.readouterr().err
    sys.argv[-1] = "float32"
    sys.argv[sys.argv.index("--texts") + 1] = "3"
    with pytest.raises(SystemExit):
        beyond_context.main()
    assert "measured with other settings" in capsys.readouterr().err


@pytest.mark.usefixtures("small_budgets")
def test_a_run_measures_only_the_methods_that_are_named(
    beyond_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "found.json"
    command = ["beyond_context.py", beyond_folder, "--profile", beyond_folder / "reform.safetensors"]
    command += ["--text", beyond_folder / "text.txt", "--lengths", 180, "--texts", 1, "--json", results]
    command += ["--dtype", "float32", "--only", "H2O", "--only", "truncation"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    beyond_context.main()
    [sample] = json.loads(results.read_text())["results"]["180"]
    assert sample.keys() == {"H2O", "truncation"}


def test_what_fits_is_answered_as_by_the_model(beyond_folder: Path, words: PreTrainedTokenizerFast) -> None:
    """A method with room for all of a prompt gives the stock model's greedy answer, to each of two questions."""
    model = beyond_context.stock(beyond_folder)
    [prompt] = prompts(words, Haystack.read(str(beyond_folder / "text.txt"), words, 600), 600, 4, 1, 0)
    tokens = torch.from_numpy(prompt.text)[None]
    questions = tokens[:, 5:12], tokens[:, 40:49]
    expected = [
        model.generate(torch.cat([tokens, question], 1), max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, -4:]
        for question in questions
    ]
    emitted = beyond_context.emitted(model, beyond_context.dimensions(model.config)[0])
    settings = beyond_context.replace(beyond_context.SETTINGS, heads=((0, "q", 1),))
    for method in [*beyond_context.choosing(settings), *beyond_context.recurrent(settings, [1])]:
        if method.name not in ("REFORM", "BM25 retrieval"):  # which gather, and fill what is left
            with torch.inference_mode():
                reading = method.read(emitted, tokens, 16)
                for question, answer in zip(questions, expected, strict=True):
                    own = beyond_context.duplicate(reading, emitted)
                    assert beyond_context.answer(own, question, 4)[0] == answer.tolist()


def test_a_list_counts_the_words_that_an_answer_holds(
    beyond_folder: Path, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    [prompt] = listing_prompts(words, Haystack.read(str(beyond_folder / "text.txt"), words, 600), 600, 4, 1, 0)
    listed = prompt.questions[0].listed
    said = [1, *listed[2], 2, *listed[0], 3, *listed[3][:-1]]
    monkeypatch.setattr(beyond_context, "answer", lambda reading, asked, count: (said, 0.5))
    model = beyond_context.stock(beyond_folder)
    emitted = beyond_context.emitted(model, beyond_context.dimensions(model.config)[0])
    found = beyond_context.measure(beyond_context.Truncation(beyond_context.SETTINGS), emitted, prompt)
    assert found["right"] == [True, False, True, False]
    assert len(found["seconds"]) == 1


def names(page: str) -> set[str]:
    """The heads that a page names."""
    return set(re.findall(r"\b[qkv]\d+\.\d+", (ROOT / page).read_text()))


def heads_of(name: str) -> set[str]:
    """The embedding heads that REFORM had in a measurement."""
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return {f"{state}{layer}.{head}" for layer, state, head in found["settings"]["heads"]}


def test_the_heads_are_those_that_the_docs_name() -> None:
    """Of the measurements, and of the profile that ships: which has another one, of about the same rank."""
    assert heads_of("beyond-context") == heads_of("two-hops") == {"v3.2", "v6.1", "k8.1", "v14.2"}
    profile = HeadProfile.load(ROOT / "examples" / "smollm2" / "reform.safetensors")
    assert heads_of("lists") == {*map(str, profile.embedding_heads)} == {"v3.2", "v6.1", "k7.0", "v14.2"}
    assert all(heads_of(name) <= names(PAGE) for name in ("beyond-context", "lists"))
    ranks = profile.ranking.mnr["pattern"]["k"]
    assert {f"{ranks[8, 1]:.4f}", f"{ranks[7, 0]:.4f}"} <= figures("examples/smollm2/README.md", "mean ranks")


def test_the_table_has_a_share_for_each_length(tmp_path: Path) -> None:
    def sample(right: bool, seconds: float, names: list[str] = NAMES) -> dict:
        return {name: {"right": [right, True], "seconds": [seconds, seconds]} for name in names}

    results = {"4000": [sample(True, 1.0), sample(True, 2.0)], "16000": [sample(False, 5.0, NAMES[1:])], "32000": []}
    table = beyond_context.table({"results": results})
    assert table[0] == "| method | texts | 4,000 tokens | 16,000 tokens | seconds at 16,000 |"
    assert table[2] == "| full attention | 2 | 100% [100%, 100%] | - | - |"
    assert table[3] == "| REFORM | 2, 1 | 100% [100%, 100%] | 50% [50%, 50%] | 5.0 |"
    del results["16000"][0]["REFORM"]["seconds"]  # read on a GPU
    assert beyond_context.table({"results": results})[3] == table[3].replace("5.0", "-")
    beyond_context.plot({"results": {length: own for length, own in results.items() if own}}, tmp_path / "beyond.png")
    assert (tmp_path / "beyond.png").stat().st_size > 10_000


def test_the_documents_say_what_was_measured() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "beyond-context.json").read_text())
    results = found["results"]
    assert {len(samples) for samples in results.values()} == {found["texts"]} == {25}
    names = {*NAMES[1:]}
    assert all(names <= {*sample} for samples in results.values() for sample in samples)
    right = {
        (length, name): beyond_context.recalled(samples, name).mean
        for length, samples in results.items()
        for name in names
    }
    reform = right["64000", "REFORM"]
    assert reform > 0.9 * right["4000", "REFORM"]
    others = {f"{right['64000', name]:.0%}" for name in ("BM25 retrieval", "StreamingLLM")}
    assert {"64,000", f"{reform:.0%}", *others} <= figures("README.md", "**Beyond the context**")
    assert right["64000", "H2O"] == right["64000", "StreamingLLM"]
    than_full = beyond_context.recalled(results["8000"], "REFORM", "full attention")
    shown = {f"{100 * value:.0f}" for value in (than_full.mean, than_full.low, than_full.high)}
    assert shown <= figures(PAGE, "**REFORM** finds")
    beyond = [sample for length in ("16000", "32000", "64000") for sample in results[length]]
    than_bm25 = beyond_context.recalled(beyond, "REFORM", "BM25 retrieval")
    shown = {f"{100 * value:.3g}" for value in (than_bm25.mean, than_bm25.low, than_bm25.high)}
    assert shown <= figures(PAGE, "**BM25** finds")


def test_several_facts_of_a_text_are_found_as_often_as_the_docs_say() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "beyond-context.json").read_text())["results"]

    def texts(name: str, facts: int) -> tuple[int, int]:
        counts = [
            sum(sum(sample[name]["right"]) >= facts for sample in results[length] if name in sample)
            for length in ("16000", "32000", "64000")
        ]
        return min(counts), max(counts)

    assert {texts(name, 3) for name in ("H2O", "StreamingLLM", "InfiniPot")} == {(0, 0)}
    counts = [texts(name, facts) for name in ("REFORM", "BM25 retrieval") for facts in (3, 4)]
    assert {str(count) for ends in counts for count in ends} <= figures(PAGE, "**Several facts of a text**")


def test_lists_hold_as_many_words_as_the_docs_say() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "lists.json").read_text())
    results = found["results"]
    assert {len(samples) for samples in results.values()} == {found["texts"]} == {25}
    assert all({*FEW[1:]} <= {*sample} for samples in results.values() for sample in samples)

    def ahead(name: str, other: str, *lengths: str) -> set[str]:
        words = beyond_context.recalled([sample for length in lengths for sample in results[length]], name, other)
        return {f"{100 * value:.0f}" for value in (words.mean, words.low, words.high)}

    assert ahead("BM25 retrieval", "REFORM", "16000", "32000") <= figures(PAGE, "**REFORM and BM25**")
    for name, length in itertools.product(("REFORM", "BM25 retrieval"), ("4000", "8000")):
        assert ahead(name, "full attention", length) <= figures(PAGE, "**Full attention**")


def test_two_hops_are_guessed_as_the_docs_say() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "two-hops.json").read_text())
    [(length, samples)] = found["results"].items()
    full = recalled_by_text(samples, "full attention")
    assert {str(sum(full)), str(len(full)), length} <= figures(PAGE, "**Two hops**")
    around = beyond_context.recalled(samples, "full attention")
    assert around.low < 1 / beyond_context.FACTS < around.high


def recalled_by_text(samples: list[dict], name: str) -> list[bool]:
    return [right for sample in samples for right in sample[name]["right"]]
