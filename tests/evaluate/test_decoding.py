"""Answers and likelihoods through the cache, against forwards over all tokens and against plain `generate`."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvsurgery.conversion.convert import convert
from kvsurgery.conversion.prepared import PreparedConversion
from kvsurgery.evaluate.checkpoint import load
from kvsurgery.evaluate.decoding import LAST_TOKENS, answers, later_answers, mean_nll
from kvsurgery.evaluate.sample import SHORT_ANSWER
from kvsurgery.policy.evidence import Evidence
from kvsurgery.profile.embedding_heads import EmbeddingHead
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe, ReformSizes
from kvsurgery.templates.kv_layout import Selection
from tests.evaluate import recall
from tests.helpers.families import tokens
from tests.helpers.surgery import convert_folder, random_profile
from tests.helpers.tiny_recall import task
from tests.helpers.vocabularies import tokenizer

FAMILIES = ["llama", "gemma2", "qwen2"]
PROMPTS = [row[:length].numpy() for row, length in zip(tokens(3, 70, seed=5), (70, 61, 66), strict=True)]
FEW = Selection(window=4, kernel_size=3, pool="max")
SPELLING = tokenizer("words", [" ".join(f"w{number}" for number in range(97))])  # of 101 tokens


def naive(model, prompt, limit):
    """Greedy decoding without a cache: all tokens go through the model for every new one."""
    ends, ids = set(model.generation_config.eos_token_id or ()), torch.from_numpy(prompt)[None]
    said = []
    with torch.no_grad():
        for _ in range(limit):
            token = model(ids, use_cache=False).logits[0, -1].argmax().item()
            if token in ends:
                break
            said.append(token)
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
    return said


@pytest.fixture(scope="module")
def stock(checkpoint):
    return {family: load(checkpoint(family), device="cpu") for family in FAMILIES}


@pytest.mark.parametrize(("family", "limit"), [*((family, 6) for family in FAMILIES), ("llama", SHORT_ANSWER + 1)])
def test_answers_are_those_of_forwards_without_a_cache(family, limit, stock, all_full):
    converted = load(all_full(family).folder, device="cpu")
    short = min(limit, 12)  # of the long ones only the beginning is compared
    expected = [naive(stock[family], prompt, short) for prompt in PROMPTS]
    for model in (stock[family], converted):
        found = answers(model, SPELLING, PROMPTS, limit)
        assert [row[:short] for row in found] == expected


def test_an_answer_ends_before_any_end_token(stock):
    model = stock["llama"]
    free = naive(model, PROMPTS[0], 8)
    saved = model.generation_config.eos_token_id
    try:
        model.generation_config.eos_token_id = [100, free[5], free[3]]
        expected = free[: min(free.index(free[3]), free.index(free[5]))]
        assert answers(model, SPELLING, PROMPTS[:1], 8) == [expected]
    finally:
        model.generation_config.eos_token_id = saved


def test_a_text_stops_the_rows_that_say_it(stock):
    model = stock["llama"]
    free = answers(model, SPELLING, PROMPTS, 8)
    words = [SPELLING.decode(row) for row in free]
    stop = words[0].split()[2]
    found = answers(model, SPELLING, PROMPTS, 8, stops=(stop,))
    assert len(found[0]) < 8
    for row, text in zip(found, words, strict=True):
        said = SPELLING.decode(row)
        assert text.startswith(said)
        assert (stop in said) == (stop in text)
        assert stop not in SPELLING.decode(row[:-1])


@pytest.mark.parametrize("policy", [{"sparsity": 0.5}, {"rest": "budgeted", "budget": 7, "selection": FEW}])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_emitted_models_answer_as_plain_generate_does(family, policy, checkpoint, tmp_path):
    """Tokens that come one by one belong to the prompt: budgeted heads choose with the last of them in sight."""
    name = f"{family}-{policy.get('rest', 'mixed')}"
    model = load(convert_folder(checkpoint(family), tmp_path / name, **policy).folder, device="cpu")
    with torch.no_grad():
        plain = [
            model.generate(torch.from_numpy(prompt)[None], max_new_tokens=10)[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]
    ends = model.generation_config.eos_token_id
    plain = [row[: min([row.index(end) for end in ends if end in row], default=10)] for row in plain]
    assert answers(model, SPELLING, PROMPTS, 10) == plain
    assert answers(model, SPELLING, PROMPTS, 10, chunk=16) == plain
    assert [answers(model, SPELLING, [prompt], 10)[0] for prompt in PROMPTS] == plain


def test_budgeted_heads_choose_with_the_question_in_sight(budgeted):
    """Told where the prompt ends, 16 tokens a head recall; chosen before the last 50 tokens, the question among them,
    they would not be the ones that it needs."""
    model = load(budgeted, device="cpu")
    tokens, right = task.prompts(4, 6, 400)
    found = answers(model, SPELLING, list(tokens.numpy()), task.VALUES)
    assert found == right.tolist()
    blind = []
    for row in tokens:
        with torch.no_grad():
            cache = model(row[None, :-LAST_TOKENS]).past_key_values
            output = model.generate(row[None], past_key_values=cache, max_new_tokens=task.VALUES)
        blind.append(output[0, len(row) :].tolist())
    assert sum(said == values for said, values in zip(blind, right.tolist(), strict=True)) < len(tokens)


CONTEXT = 60  # tokens that three questions of different lengths share
ASKED = [np.concatenate([PROMPTS[0][:CONTEXT], tokens]) for tokens in (PROMPTS[1][:9], PROMPTS[2][:1], PROMPTS[1][:3])]


def test_questions_after_a_context_are_answered_as_whole_prompts_are(stock, all_full):
    expected = [naive(stock["llama"], prompt, limit) for prompt, limit in zip(ASKED, (6, 9, 2), strict=True)]
    for model in (stock["llama"], load(all_full("llama").folder, device="cpu")):
        for chunk in (None, 16):
            assert later_answers(model, SPELLING, ASKED, (6, 9, 2), CONTEXT, chunk=chunk) == expected


def asked_alone(model, prompt, context):
    """8 tokens of plain `generate` after a forward of the context."""
    ids, ends = torch.from_numpy(prompt)[None], set(model.generation_config.eos_token_id or ())
    with torch.no_grad():
        cache = model(ids[:, :context], use_cache=True).past_key_values
        said = model.generate(ids, past_key_values=cache, max_new_tokens=8)[0, len(prompt) :]
    return list(takewhile(lambda token: token not in ends, said.tolist()))


@pytest.mark.parametrize("policy", [{"sparsity": 0.5}, {"rest": "budgeted", "budget": 7, "selection": FEW}])
def test_each_question_is_asked_on_the_cache_that_the_context_left(policy, checkpoint, tmp_path):
    """Not on what other questions made of it, and not on one that was compressed with a question in sight."""
    name = "llama-later-" + "-".join(policy)
    model = load(convert_folder(checkpoint("llama"), tmp_path / name, **policy).folder, device="cpu")
    expected = [asked_alone(model, prompt, CONTEXT) for prompt in ASKED]
    assert later_answers(model, SPELLING, ASKED, [8] * 3, CONTEXT) == expected
    assert later_answers(model, SPELLING, ASKED[::-1], [8] * 3, CONTEXT) == expected[::-1]
    assert later_answers(model, SPELLING, ASKED[1:2], [8], CONTEXT, chunk=16) == expected[1:2]


def test_tiles_of_a_quantized_context_are_copied(tmp_path):
    model = load(recall.convert(tmp_path / "recall-4", kv_bits=4), device="cpu")
    context = task.prompts(1, 6, 400)[0][0].numpy()
    asked = [np.concatenate([context, tokens]) for tokens in ASKED]
    expected = [asked_alone(model, prompt, len(context)) for prompt in asked]
    assert later_answers(model, SPELLING, asked, [8] * 3, len(context)) == expected


def test_budgeted_heads_choose_before_a_later_question_is_known(budgeted):
    """The 16 tokens a head that recall with the question in sight do not when it comes later."""
    model = load(budgeted, device="cpu")
    tokens, right = task.prompts(4, 6, 400)
    asked = 4
    found = [later_answers(model, SPELLING, [row], [task.VALUES], len(row) - asked)[0] for row in tokens.numpy()]
    assert sum(said == values for said, values in zip(found, right.tolist(), strict=True)) < len(tokens)


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_nll_is_that_of_one_forward(family, chunk, stock, mixed):
    """Streaming is exact however tokens come, so one forward of the emitted model is a reference too."""
    for model in (stock[family], load(mixed(family).folder, device="cpu")):
        expected = []
        for row in PROMPTS:
            ids = torch.from_numpy(row)
            with torch.no_grad():
                logits = model(ids[None], use_cache=False).logits[0].float()
            expected.append(F.cross_entropy(logits[-10:-1], ids[-9:]).item())
        assert mean_nll(model, PROMPTS, 9, chunk=chunk) == pytest.approx(expected, rel=1e-5)


def test_nll_is_of_tokens_after_budgeted_heads_have_chosen(checkpoint, tmp_path):
    folder = convert_folder(
        checkpoint("llama"), tmp_path / "llama-few", rest="budgeted", budget=2, selection=FEW
    ).folder
    model, row = load(folder, device="cpu"), PROMPTS[0]
    ids = torch.from_numpy(row)[None]
    cache, parts = None, []
    with torch.no_grad():
        for part in ids.split([len(row) - 9] + [1] * 9, 1):
            output = model(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
    logits = torch.cat(parts, 1)
    expected = F.cross_entropy(logits[0, -10:-1], ids[0, -9:]).item()
    assert mean_nll(model, [row], 9) == pytest.approx([expected], rel=1e-5)
    with torch.no_grad():
        whole = model(ids).logits[0]
    assert F.cross_entropy(whole[-10:-1], ids[0, -9:]).item() != pytest.approx(expected, rel=1e-3)


def test_prompts_that_reform_reads_go_to_generate(checkpoint, tmp_path):
    """Of a batch with one that is longer than the recompute budget, each is read as if alone."""
    folder, out = checkpoint("llama"), tmp_path / "llama-reform"
    scores = random_profile(folder)
    heads = (EmbeddingHead(0, "q", 5), EmbeddingHead(1, "k", 2))
    reform = HeadProfile(None, "reform", None, "llama", scores.model, embedding_heads=heads)
    sizes = {
        "chunk": 16,
        "encode_budget": 24,
        "keep": 4,
        "window": 5,
        "pool": 3,
        "recompute_budget": 64,
        "query_length": 8,
    }
    prepared = PreparedConversion.prepare(
        folder, Recipe.of(sparsity=0.0, reform=ReformSizes(**sizes)), Evidence(scores, embedding=reform)
    )
    convert(prepared.checkpoint, prepared.plan, out, prepared.emitted.files)
    model = load(out, device="cpu")
    expected = []
    for prompt in PROMPTS:
        with torch.no_grad():
            output = model.generate(torch.from_numpy(prompt)[None], max_new_tokens=5)
        expected.append(output[0, len(prompt) :].tolist())
    assert answers(model, SPELLING, PROMPTS, 5) == expected
    unconverted = answers(load(folder, device="cpu"), SPELLING, PROMPTS, 5)
    assert unconverted[1] == expected[1]
    assert unconverted[0] != expected[0]


def test_steps_are_reported(stock):
    seen = []
    mean_nll(stock["llama"], PROMPTS, 40, progress=seen.append)
    assert seen == [16, 32]
