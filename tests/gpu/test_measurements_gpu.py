"""Scores and losses that are measured on a GPU, against those of the CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kvsurgery.measure.attention import attention_mass
from kvsurgery.measure.cache_trial import CacheTrial, Window
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.training import GateOptions, train_gates
from kvsurgery.templates.kv_layout import Quantization
from tests.helpers.families import stock, tokens
from tests.helpers.measured_models import measured_model

DEVICE = "cuda"


@pytest.fixture(scope="module")
def pair() -> list[MeasuredModel]:
    """A model in float32 on the CPU, and on the GPU."""
    model = stock("llama", num_hidden_layers=4).eval()
    return [measured_model(copy.deepcopy(model).to(device)) for device in ("cpu", DEVICE)]


def prompt(step: int, place: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The last six tokens say what stands at 5 to 10."""
    ids = tokens(1, 40)
    ids[:, -6:] = ids[:, 5:11]
    targets = torch.zeros_like(ids, dtype=torch.bool)
    targets[:, -6:] = True
    passkeys = targets.long()
    passkeys[:, 5:11] = 1
    return ids, targets, passkeys


@pytest.mark.parametrize("loss", ["distill", "lm"])
def test_gates(pair: list[MeasuredModel], loss: str) -> None:
    options = GateOptions(steps=3, lr=0.1, reg=0.5, sink=3, recent=5, loss=loss)
    expected, found = (train_gates(model, prompt, options, data={"prompts": "one"})[0].scores for model in pair)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_attention(pair: list[MeasuredModel]) -> None:
    expected, found = (attention_mass(model, *prompt(0, 0)).cpu() for model in pair)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", [Window(3, 5), Quantization(8, sink=0, residual=20)], ids=["window", "8 bits"])
def test_losses_of_caches(pair: list[MeasuredModel], kind: Window | Quantization) -> None:
    found = [
        CacheTrial(each.model, each.layers, tokens(1, 200).to(each.model.device), 180, [kind])
        .converted_divergence(torch.ones(1, 4, 4, dtype=torch.int64))
        .item()
        for each in pair
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-2)
    assert found[0] > 0
