"""The benchmark of ways to read long prompts: what they keep, and what it makes of what it finds."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import recurrent
from benchmarks.real_model.gathered import retrieved
from benchmarks.recurrent_methods import (
    BM25,
    Gathered,
    InfiniPot,
    InfLLM,
    Method,
    Recurrent,
    Session,
    Truncation,
)
from benchmarks.recurrent_report import ABOVE, H2O, OURS, RANDOM, WORST, verdicts
from kvsurgery.templates.kv_encode import Encoder
from kvsurgery.templates.kv_gather import gather, mixed, similarity
from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.templates.kv_reform import Reform
from tests.helpers.emitted import emitted_class

HEADS = ((0, "k", 2), (1, "v", 1), (1, "q", 6))
SMALL = replace(recurrent.SETTINGS, heads=HEADS, chunk=64, encode_budget=48, recompute_budget=160, window=8)
COMPRESSORS = {"H2O": {"compressor": "h2o"}, "TOVA": {"compressor": "tova"}, "streaming": {"compressor": "streaming"}}
RECURRENT = {
    **{name: lambda settings, own=own: Recurrent(replace(settings, **own), "") for name, own in COMPRESSORS.items()},
    "InfiniPot": lambda settings: Recurrent(settings, "", partial(InfiniPot, catalyst=[recurrent.task.RECALL])),
    "InfLLM": lambda settings: Recurrent(settings, "", InfLLM),
}
CHOOSING = {"truncation": Truncation, "BM25": BM25, "REFORM": Gathered}


@pytest.fixture(scope="module")
def prompts() -> torch.Tensor:
    return recurrent.task.prompts(3, 2, 450).tokens


def asked(method: Method, prompt: torch.Tensor) -> tuple[Session, torch.Tensor]:
    """A prompt [1, tokens] whose last few tokens are the question."""
    text, question = prompt[:, : -SMALL.query_length], prompt[:, -SMALL.query_length :]
    return method.read(recurrent.recall_model(), text, SMALL.query_length + 2).ask(question)


def made(name: str, settings: Reform) -> Method:
    if name == "BM25":
        pytest.importorskip("bm25s")
    return (RECURRENT | CHOOSING)[name](settings)


@pytest.mark.parametrize("name", [*RECURRENT, *CHOOSING])
def test_what_may_keep_everything_answers_like_full_attention(name: str, prompts: torch.Tensor) -> None:
    method = made(name, replace(SMALL, recompute_budget=1000, encode_budget=1000))
    for prompt in prompts:
        assert recurrent.answer(method, prompt[None]) == recurrent.answer(recurrent.Full(), prompt[None])


@pytest.mark.parametrize("name", CHOOSING)
def test_as_many_tokens_as_the_budget_are_chosen(name: str, prompts: torch.Tensor) -> None:
    method, numbered = made(name, SMALL), prompts[:1]
    _, chosen = asked(method, numbered)
    assert chosen.shape[1] == SMALL.recompute_budget
    assert chosen[:, : SMALL.keep].equal(numbered[:, : SMALL.keep])
    assert chosen[:, -SMALL.keep :].equal(numbered[:, -SMALL.keep :])


@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_no_chunk_sees_more_than_the_budget_and_itself(name: str, prompts: torch.Tensor) -> None:
    session, last = asked(made(name, SMALL), prompts[:1])
    positions = []
    hook = session.model.rotary_emb.register_forward_hook(lambda *call: positions.append(call[2][0].shape[1]))
    session.next(last)
    session.next(last[:, -1:])
    hook.remove()
    assert max(positions) <= SMALL.recompute_budget + last.shape[1] + (name == "InfiniPot")  # its catalyst
    kept = {layer.keys.shape[2] for layer in session.cache.layers}
    assert kept == ({prompts.shape[1] + 2} if name == "InfLLM" else {SMALL.recompute_budget + 1})


def test_the_retriever_finds_the_fact() -> None:
    pytest.importorskip("bm25s")
    tokens, answers = recurrent.task.prompts(5, 8, 900)
    method, found = BM25(SMALL, part=64), 0
    for prompt, expected in zip(tokens, answers, strict=True):
        _, chosen = asked(method, prompt[None])
        found += bool(torch.isin(expected, chosen).all())
    assert found >= 6  # some facts lie across two parts


@pytest.fixture(scope="module")
def converted() -> PreTrainedModel:
    """The model of `recurrent.recall_model` as a checkpoint with REFORM has it."""
    model = recurrent.recall_model()
    config = copy.deepcopy(model.config)
    config.kv_surgery["reform"] = asdict(SMALL)
    gathering = emitted_class("llama", reform=True)(config).eval()
    gathering.load_state_dict(model.state_dict())
    return gathering


def test_reform_is_what_generate_of_a_converted_checkpoint_does(
    prompts: torch.Tensor, converted: PreTrainedModel
) -> None:
    greedy = {"max_new_tokens": recurrent.NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for prompt in prompts[:, None]:
        [output], [places] = converted.generate(prompt, **greedy, return_gathered=True)
        assert asked(Gathered(SMALL), prompt)[1].equal(prompt[:, places])
        assert recurrent.answer(Gathered(SMALL), prompt) == output[prompt.shape[1] :].tolist()


def test_a_retriever_is_mixed_in_as_by_generate(prompts: torch.Tensor, converted: PreTrainedModel) -> None:
    pytest.importorskip("bm25s")
    model = recurrent.recall_model()
    question = prompts.shape[1] - SMALL.query_length
    for prompt in prompts[:, None]:
        scores = retrieved(prompt[0].tolist(), question)
        options = {"max_new_tokens": 1, "pad_token_id": 0, "return_gathered": True, "token_scores": scores[None]}
        embeddings = Encoder(model.model, KVLayout.from_config(model.config), SMALL).read(input_ids=prompt)
        similarities = similarity(embeddings, embeddings[question:])
        assert converted.generate(prompt, **options)[1][0].equal(gather(mixed(similarities, scores), question, SMALL))
        assert not gather(similarities, question, SMALL).equal(gather(mixed(similarities, scores), question, SMALL))


def rows(length: int, **changes: dict) -> list[dict]:
    """Results of which all claims hold, but for changes of single methods."""
    found = {OURS: 1.0, ABOVE: 1.0, WORST: 0.3, f"{RANDOM} 1": 0.9, f"{RANDOM} 2": 0.4, H2O[0]: 0.1, H2O[1]: 0.1}
    facts = {"tokens": length, "new_tokens": 8, "token_s": 0.001, "first_s": length * 1e-6}
    return [
        {"method": name, **facts, "exact": recall, "words": recall, **changes.get(name, {})}
        for name, recall in found.items()
    ]


@pytest.mark.parametrize(
    ("changes", "held", "broken"),
    [
        ({}, 10, []),
        ({OURS: {"exact": 0.94}}, 10, ["REFORM recalls 95% at 65,536"]),
        ({H2O[0]: {"words": 0.3}}, 10, ["H2O recalls less than 30% at 65,536"]),
        ({WORST: {"words": 0.81}}, 10, ["worst heads recall 20 points less at 65,536"]),
        ({f"{RANDOM} 2": {"words": 0.75}}, 10, ["random heads recall 20 points less at 65,536"]),
        ({}, 11, ["reading 65,536 tokens leaves what encode_bytes says"]),
        ({H2O[1]: {"token_s": 0.0009}}, 10, [f"no slower than H2O, encode budget: {name}" for name in (OURS, ABOVE)]),
        ({ABOVE: {"first_s": 0.056, "token_s": 0}}, 10, [f"time is linear within 15%: {ABOVE}"]),
        ({OURS: {"first_s": 0.058, "token_s": 0}}, 10, []),
    ],
)
def test_what_has_to_hold(changes: dict, held: int, broken: list[str]) -> None:
    results = rows(32768) + rows(65536, **changes)
    assert [claim.what for claim in verdicts(results, {ABOVE: (5, 10), OURS: (held, 10)}) if not claim.holds] == broken


def test_a_short_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("bm25s")
    monkeypatch.setattr(recurrent, "process_bytes", lambda compared, length: [length] * len(compared))
    monkeypatch.setattr(recurrent, "RANKED", 300)
    monkeypatch.setattr(recurrent, "NEW", 3)
    report, picture = tmp_path / "recurrent.json", tmp_path / "recurrent.png"
    arguments = ["--lengths", "400", "420", "--samples", "1", "--draws", "1", "--ranking-samples", "1"]
    monkeypatch.setattr(sys, "argv", ["recurrent.py", *arguments, "--json", str(report), "--plot", str(picture)])
    recurrent.main()
    results = json.loads(report.read_text())
    rows = results["results"]
    assert [row["tokens"] for row in rows] == [400] * (len(rows) // 2) + [420] * (len(rows) // 2)
    assert len({row["method"] for row in rows}) == len(rows) // 2 == 13
    assert all(row["samples"] == 1 and row["peak_bytes"] > 0 for row in rows)
    counted, formula = results["held_bytes"][OURS]
    assert 0 < counted <= formula
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "full attention" in capsys.readouterr().out
