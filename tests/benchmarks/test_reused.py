"""MLP outputs that are computed once for many caches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.real_model.reused import ReusedOutputs

LAYERS = 3
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **SIZES)).eval()


@torch.inference_mode()
def logits(model: LlamaForCausalLM, reused: ReusedOutputs, text: np.ndarray) -> torch.Tensor:
    with reused.reading(model, text):
        return model(torch.from_numpy(text)[None]).logits


def test_the_second_read_and_the_next_run_compute_nothing(model: LlamaForCausalLM, tmp_path: Path) -> None:
    text, other = np.arange(20), np.arange(20)[::-1].copy()
    first = ReusedOutputs(tmp_path)
    expected = logits(model, first, text)
    assert (first.computed, first.reused) == (LAYERS, 0)
    assert torch.equal(logits(model, first, text), expected)
    assert (first.computed, first.reused) == (LAYERS, LAYERS)
    again = ReusedOutputs(tmp_path)
    assert torch.equal(logits(model, again, text), expected)
    assert torch.equal(logits(model, again, other), model(torch.from_numpy(other)[None]).logits)
    assert (again.computed, again.reused) == (LAYERS, LAYERS)


def test_other_states_are_computed(model: LlamaForCausalLM, tmp_path: Path) -> None:
    text = np.arange(20)
    logits(model, ReusedOutputs(tmp_path), text)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight *= 1.1
    expected = model(torch.from_numpy(text)[None]).logits
    reused = ReusedOutputs(tmp_path)
    assert torch.allclose(logits(model, reused, text), expected, atol=1e-6)
    assert (reused.computed, reused.reused) == (2, 1)


@torch.inference_mode()
def test_tokens_after_the_text_are_computed(model: LlamaForCausalLM, tmp_path: Path) -> None:
    text, after = np.arange(20), torch.arange(7)[None]
    logits(model, ReusedOutputs(tmp_path), text)
    reused = ReusedOutputs(tmp_path)
    with reused.reading(model, text):
        cache = model(torch.from_numpy(text)[None]).past_key_values
        following = model(after, past_key_values=cache).logits
    whole = torch.cat((torch.from_numpy(text)[None], after), 1)
    assert torch.allclose(following, model(whole).logits[:, len(text) :], atol=1e-5)
    assert (reused.computed, reused.reused) == (LAYERS, LAYERS)
