"""The comparison of quantized caches on generated answers: what is generated, compared and counted."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import caches, generated_answers
from kvsurgery.templates.kv_layout import Quantization
from kvsurgery.text.haystack import Haystack
from tests.helpers.families import stock
from tests.helpers.vocabularies import tokenizer

ROOT = Path(__file__).resolve().parents[2]

PROMPT, NEW, PIECES = 280, 24, 2


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return stock("llama", vocab_size=400, head_dim=16)


@pytest.fixture(scope="module")
def run(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict, torch.Tensor]:
    """A command on a small model, what it found with two of our caches, and its prompts."""
    folder = tmp_path_factory.mktemp("generated")
    words = tokenizer("bytes", ["the baker carried a basket"], size=400, chat=True)
    model.save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    text = folder / "text.txt"
    text.write_text(words.decode(Haystack.read(None, words, 900).tokens))
    names = ["kvsurgery, unquantized", "kvsurgery, scheme of version 0.1.0, 2 bits"]
    command = ["generated_answers.py", folder / "model", text, "--prompt", PROMPT, "--new", NEW, "--pieces", PIECES]
    command = [str(word) for word in [*command, "--json", folder / "found.json"]]
    settings = {name: how for name, how in caches.settings().items() if name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command)
        patch.setattr(caches, "settings", lambda: settings)
        patch.setattr(generated_answers, "unusable", lambda make: "not tested")
        generated_answers.main()
    prompts = generated_answers.prompts(words, [text], PROMPT, PIECES)
    return command, json.loads((folder / "found.json").read_text()), prompts


def test_answers_are_greedy_and_as_long_as_is_asked(model: PreTrainedModel, run: tuple) -> None:
    _, found, prompts = run
    assert prompts.shape == (PIECES, PROMPT)
    answers = torch.tensor([[int(token) for token in answer.split()] for answer in found["answers"]])
    logits = model(torch.cat([prompts, answers], 1)).logits[:, PROMPT - 1 : -1]
    logits[:, :, 1] = -torch.inf  # the end of the text
    assert torch.equal(answers, logits.argmax(-1))


def test_an_unquantized_cache_gives_the_same_answers(model: PreTrainedModel, run: tuple) -> None:
    _, found, _ = run
    original, same = found["results"]["original"], found["results"]["kvsurgery, unquantized"]
    assert original["kl"] == pytest.approx([0] * 4, abs=1e-6)
    assert same["kl"] == pytest.approx([0] * 4, abs=1e-6)
    assert (same["first_difference"], same["agreement"]) == ([NEW] * PIECES, [1] * PIECES)
    config = model.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2  # bytes in 16 bit
    assert original["kv_bytes"] == PIECES * (PROMPT + NEW) * token


def test_a_quantized_cache_diverges_and_packs_tiles(model: PreTrainedModel, run: tuple) -> None:
    _, found, _ = run
    config, result = model.config, found["results"]["kvsurgery, scheme of version 0.1.0, 2 bits"]
    heads = config.num_hidden_layers * config.num_key_value_heads
    tiles = heads * Quantization(2).tile_bytes(config.head_dim)
    assert min(result["kl"]) > 1e-6
    assert result["kv_bytes"] == PIECES * (256 * 2 * heads * config.head_dim * 2 + tiles)


def test_a_run_goes_on_from_its_file(run: tuple, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    command, found, _ = run
    results = Path(command[-1])
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(generated_answers, "contenders", lambda stock, emitted: {})
    generated_answers.main()
    assert json.loads(results.read_text()) == found
    sys.argv[sys.argv.index("--new") + 1] = "25"
    with pytest.raises(SystemExit):
        generated_answers.main()
    assert "was measured with" in capsys.readouterr().err


def test_the_table(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "settings": {"new": 512},
        "results": {
            "original": {"kl": [0, 0, 0, 0], "same": [1, 1, 1, 1], "kv_bytes": 200},
            "kvsurgery, 4 bits": {
                "kl": [0.001, 0.002, 0.003, 0.004],
                "same": [1, 0.98, 0.99, 0.99],
                "kv_bytes": 70,
                "first_difference": [20, 40],
                "agreement": [0.25, 0.75],
            },
        },
    }
    (tmp_path / "found.json").write_text(json.dumps(found))
    monkeypatch.setattr(sys, "argv", ["generated_answers.py", "--show", str(tmp_path / "found.json")])
    generated_answers.main()
    assert capsys.readouterr().out.splitlines() == [
        "| cache | bytes | KL up to 128 | 256 | 384 | 512 | same next token | first difference | same tokens |",
        "|---|---|---|---|---|---|---|---|---|",
        "| original | 100% | 0.0000 | 0.0000 | 0.0000 | 0.0000 | 100.0% |  |  |",
        "| kvsurgery, 4 bits | 35% | 0.0010 | 0.0020 | 0.0030 | 0.0040 | 99.0% | 30 | 50% [25%, 75%] |",
    ]


def test_the_docs_say_how_many_answers_are_the_original_s() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "generated-answers.json").read_text())
    page = (ROOT / "docs" / "results" / "quantized.md").read_text()
    same = [
        found["results"][f"kvsurgery, 8 bits{scheme}"]["first_difference"].count(found["settings"]["new"])
        for scheme in ("", " per token")
    ]
    assert same == [7, 3]
    assert re.search(r"8 bits and `kivi`, seven of [^.]*; with 8 bits per token, three ", " ".join(page.split()))
