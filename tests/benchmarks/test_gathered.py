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
        for budgets in by_words.values():
            assert {len(found) for found in budgets.values()} == {FACTS}
            assert sum(budgets["160"]) < sum(budgets["600"])
    by_words = sample["BM25 retrieval"]
    assert sum(by_words["its own words"]["600"]) > sum(by_words["other words"]["600"])
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
