"""Which facts of a long text are gathered for questions in their words and in others."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.real_model import beyond_context, gathered
from benchmarks.real_model.paraphrases import FACT, FACTS, QUESTION, SUBJECTS, WORDS, texts
from kvsurgery.text.haystack import Haystack
from tests.docs.pages import figures

ROOT = Path(__file__).resolve().parents[2]


def test_questions_in_other_words_share_no_word_with_their_facts(
    beyond_folder: Path, words: PreTrainedTokenizerFast
) -> None:
    for said, other in SUBJECTS:
        fact, question = (set(re.findall(r"\w+", text.lower())) for text in (FACT.format(said, ""), QUESTION + other))
        assert fact & question <= {"of"}
    haystack = Haystack.read(str(beyond_folder / "text.txt"), words, 900)
    for facts in texts(words, haystack, 900, 2):
        assert len(facts.text) == 900
        assert len(facts.spans) == FACTS == len({*facts.spans})
        for index, span in enumerate(facts.spans):
            fact = words.decode(facts.text[span.start : span.stop])
            said, other = (words.decode(facts.questions[kind][index]) for kind in WORDS)
            [subjects] = [pair for pair in SUBJECTS if fact.startswith(FACT.format(pair[0], "").rstrip("."))]
            assert (said, other) == tuple(f"\n\n{QUESTION.format(subject)}" for subject in subjects)


@pytest.mark.usefixtures("small_budgets")
def test_a_run_goes_on_from_its_file(
    beyond_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("bm25s")
    monkeypatch.setattr(gathered, "SETTINGS", beyond_context.SETTINGS)
    monkeypatch.setattr(gathered, "BUDGETS", (160, 600))
    results = tmp_path / "found.json"
    command = ["gathered.py", beyond_folder, "--profile", beyond_folder / "reform.safetensors", "--length", 960]
    command += ["--text", beyond_folder / "text.txt", "--json", results, "--dtype", "float32", "--texts", 1]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    gathered.main()
    written = json.loads(results.read_text())
    [sample] = written["samples"]
    assert [*sample] == ["BM25 retrieval", "REFORM, reform", "REFORM with BM25, reform"]
    for by_words in sample.values():
        for found in by_words.values():
            assert {len(each) for each in found["gathered"].values()} == {FACTS} == {len(found["ranks"])}
            assert sum(found["gathered"]["160"]) < sum(found["gathered"]["600"])
            assert {*found["ranks"]} <= {*range(1, FACTS + 1)}
    own, other = sample["BM25 retrieval"].values()
    assert sum(own["gathered"]["600"]) > sum(other["gathered"]["600"])
    assert sum(own["ranks"]) < sum(other["ranks"])
    sample["BM25 retrieval"] = "kept"
    results.write_text(json.dumps(written))
    sys.argv[-1] = "2"
    monkeypatch.setattr(gathered, "table", lambda found: ["the table"])
    gathered.main()
    kept, new = json.loads(results.read_text())["samples"]
    assert kept["BM25 retrieval"] == "kept"
    assert new["REFORM, reform"] != kept["REFORM, reform"]
    assert "the table" in capsys.readouterr().out
    sys.argv[sys.argv.index("float32")] = "bfloat16"
    with pytest.raises(SystemExit):
        gathered.main()
    sys.argv[sys.argv.index("960")] = "1000"
    with pytest.raises(SystemExit):
        gathered.main()
    assert "a multiple of 64" in capsys.readouterr().err


def test_a_text_is_embedded_once(beyond_folder: Path, words: PreTrainedTokenizerFast) -> None:
    """The question of a copy sees what a reading of text and question at once sees."""
    model = beyond_context.stock(beyond_folder)
    model = beyond_context.emitted(model, beyond_context.dimensions(model.config)[0])
    settings = beyond_context.replace(beyond_context.SETTINGS, chunk=64, encode_budget=128, heads=((1, "k", 0),))
    layout = gathered.KVLayout.from_config(model.config)
    prompt = torch.from_numpy(Haystack.read(str(beyond_folder / "text.txt"), words, 300).tokens[:300])[None]
    whole = gathered.Encoder(model.model, layout, settings).read(input_ids=prompt)
    encoder = gathered.Encoder(model.model, layout, settings)
    text = encoder.read(input_ids=prompt[:, :256])
    for _ in range(2):
        question = gathered.duplicate(encoder, model).read(input_ids=prompt[:, 256:])
        assert torch.allclose(torch.cat([text, question]), whole, atol=1e-5)


def test_the_pages_say_what_is_gathered() -> None:
    """Asked in other words, REFORM gathers more facts than a retriever by words, and than both mixed."""
    page = "docs/results/long-prompts.md"
    retriever, own_heads, mixed = "BM25 retrieval", "REFORM, measured heads", "REFORM with BM25, measured heads"
    own_words, other_words = WORDS
    found = {}
    for name in ("gathered-qwen", "gathered-smollm2"):
        samples = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["samples"]
        found[name] = samples
        reform = gathered.share(samples, own_heads, other_words, 1024)
        assert reform.low > gathered.share(samples, retriever, other_words, 1024).high
        assert reform.low > gathered.share(samples, mixed, other_words, 1024).high
        assert gathered.share(samples, own_heads, other_words).low > 0.5
        assert gathered.share(samples, own_heads, own_words, 1024).mean == 1
        assert f"{gathered.share(samples, retriever, own_words, 1024).mean:.0%}" in figures(
            page, "In the fact's own words"
        )
        assert f"{gathered.share(samples, mixed, other_words, 1024).mean:.0%}" in figures(
            page, "BM25 mixed into REFORM"
        )
        assert f"{gathered.share(samples, own_heads, other_words).mean:.0%}" in figures(page, "ranks first in")
        shares = {f"{gathered.share(samples, each, other_words, 1024).mean:.0%}" for each in (own_heads, retriever)}
        assert shares <= figures(page, "In other words")
    qwen = found["gathered-qwen"]
    shares = {f"{gathered.share(each, own_heads, other_words, 1024).mean:.0%}" for each in found.values()}
    assert shares <= figures("docs/long-prompts.md", "REFORM then gathers")
    papers_heads = gathered.share(qwen, "REFORM, paper's heads", other_words)
    assert f"{papers_heads.mean:.0%}" in figures(page, "ranks first in")
