"""The bundled model does what its demonstration needs: it recalls, and only through the heads its profile names."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_layout import Quantization
from tests.helpers.surgery import convert_folder
from tests.helpers.tiny_recall import FOLDER, ablation, task


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER / "model").eval()


@settings(max_examples=50)
@given(st.integers(0, 99), st.integers(14, 200), st.integers(1, 60), st.integers(1, 60), st.booleans())
def test_every_query_asks_for_an_earlier_fact(seed, length, facts, queries, at_end):
    tokens, kind = task.texts(np.random.default_rng(seed), 2, length, facts, queries, at_end=at_end)
    assert tokens.shape == kind.shape == (2, length)
    for row, kinds in zip(tokens.tolist(), kind.tolist(), strict=True):
        told, asked = {}, 0
        for t, word in enumerate(row):
            if word == task.REMEMBER:
                assert row[t + 1] not in told
                told[row[t + 1]] = row[t + 2 : t + 6]
            if word == task.RECALL:
                assert row[t + 2 : t + 6] == told[row[t + 1]]
                assert kinds[t : t + 6] == [task.GIVEN] * 2 + [task.RECALLED] * 3 + [task.FILLER]
                asked += 1
        assert told
        assert asked > 0
        assert kinds.count(task.RECALLED) == 3 * asked


def test_prompts_end_in_an_unanswered_query():
    tokens, answers = task.prompts(0, 5, 60)
    assert tokens.shape == (5, 60)
    assert (tokens[:, -2] == task.RECALL).all()
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        told = row.index(row[-1])
        assert row[told - 1] == task.REMEMBER
        assert row[told + 1 : told + 4] == answer


def test_the_tokenizer_knows_the_words():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    words = task.vocabulary()
    assert tokenizer(" ".join(words[4:])).input_ids == [task.BOS, *range(4, len(words))]
    assert tokenizer("nonsense").input_ids == [task.BOS, task.UNK]
    assert tokenizer.decode(range(4, len(words))) == " ".join(words[4:])
    special = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
    assert special == (task.PAD, task.BOS, task.EOS)


def test_the_config_spells_rope_for_every_version(model):
    raw = json.loads((FOLDER / "model" / "config.json").read_text())
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"]
    assert raw["hidden_size"] != raw["num_attention_heads"] * raw["head_dim"]
    rotations = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(rotations, raw["rope_theta"] ** (-torch.arange(0, 32, 2) / 32))


@pytest.mark.slow
def test_recall_lives_in_the_heads_that_the_profile_names(model):
    profile = HeadProfile.load(FOLDER / "profile.safetensors")
    questions = task.prompts(7, 12, 512)
    assert task.exact_match(model, questions) == 1

    best = torch.zeros(profile.scores.size, dtype=torch.bool)
    best[np.argsort(profile.scores, axis=None)[-4:].tolist()] = True
    best = best.view(profile.scores.shape)
    with ablation.restricted(model, ~best, sink=profile.sink, recent=profile.recent):
        assert task.exact_match(model, questions) >= 0.95
    with ablation.restricted(model, best, sink=profile.sink, recent=profile.recent):
        assert task.exact_match(model, questions) <= 0.2


@pytest.mark.slow
def test_recall_from_a_quantized_cache(model, tmp_path):
    """The prompt comes in chunks, so that all but the last one is read from what is quantized."""
    profile, questions = HeadProfile.load(FOLDER / "profile.safetensors"), task.prompts(7, 6, 512)
    tokens = torch.cat([questions.tokens, questions.answers], 1)[:4]
    with torch.no_grad():
        exact = model(tokens).logits[:, -4:]
    for bits in (8, 4):
        converted = convert_folder(
            FOLDER / "model", tmp_path / str(bits), profile, sparsity=0.0, quantization=Quantization(bits)
        ).load()
        cache, parts = None, []
        for part in tokens.split([256, 256, 1, 1, 1], 1):
            with torch.no_grad():
                output = converted(part, past_key_values=cache)
            cache = output.past_key_values
            parts.append(output.logits)
        error = (torch.cat(parts, 1)[:, -4:] - exact).norm() / exact.norm()
        assert error <= (1e-2 if bits == 8 else 1e-1)
        converted.generation_config.prefill_chunk_size = 256
        assert task.exact_match(converted, questions) == 1
