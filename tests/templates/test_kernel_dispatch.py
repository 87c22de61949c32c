"""A decode step through the kernels, in Triton's interpreter, equals the torch path: `make test-kernels`."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in Triton's interpreter: make test-kernels", allow_module_level=True)

from templates import kv_attention, kv_cuda
from templates.modeling_kvsurgery_gemma2 import Gemma2ForCausalLM
from templates.modeling_kvsurgery_llama import LlamaForCausalLM
from tests.families import largest, stock, tokens

CLASSES = {"llama": LlamaForCausalLM, "gemma2": Gemma2ForCausalLM}


def emitted(family: str, layers: int = 4, **section) -> torch.nn.Module:
    """A random model with one to four full heads a layer, and the family's own sliding layers; more for its layout."""
    original = stock(family, num_hidden_layers=layers)
    config = original.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    config.kv_surgery = {
        "version": 1,
        "head_dim": getattr(config, "head_dim", None) or 6,
        "layers": [
            {"blocks": [[0, 4]], "sink": 0, "recent": 9, "native": True}
            if kind == "sliding_attention"
            else {"blocks": [[index, 4 - index]], "sink": 3, "recent": 5}
            for index, kind in enumerate(kinds)
        ],
        **section,
    }
    model = CLASSES[family](config).eval()
    model.load_state_dict(original.state_dict())
    return model


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    """Turns the kernels on, with 5 programs; returns the list that every launch is noted in."""
    calls = []
    decode = kv_cuda.kv_decode.decode

    def turn_on() -> list[int]:
        monkeypatch.setattr(kv_attention, "_path", lambda query, dropout: kv_cuda)
        monkeypatch.setattr(
            kv_cuda.kv_decode, "decode", lambda *args, **tiles: calls.append(1) or decode(*args, **tiles, programs=5)
        )
        return calls

    return turn_on


@pytest.mark.parametrize(("family", "padded"), [("llama", False), ("gemma2", True)], ids=["llama", "gemma2, padded"])
def test_decode_steps(family: str, padded: bool, kernels) -> None:
    model, ids = emitted(family), tokens(2, 12)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :9] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [0, 2], "output_logits": True}
    options |= {"return_dict_in_generate": True, "attention_mask": mask}
    expected = model.generate(ids * mask, **options)
    calls = kernels()
    found = model.generate(ids * mask, **options)
    assert len(calls) == 3 * 4  # every layer of every step but the prefill
    assert found.sequences.equal(expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert largest(one - other, other) <= 1e-5


def test_a_draft_takes_back_what_kernels_stored(kernels) -> None:
    model, draft, ids = emitted("llama"), emitted("llama"), tokens(1, 20)
    draft.load_state_dict({name: weight + 0.02 for name, weight in draft.state_dict().items()})
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.assistant_confidence_threshold = 0.0
    options = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": [0, 2]}
    expected = model.generate(ids, **options)
    calls = kernels()
    assert model.generate(ids, **options, assistant_model=draft).equal(expected)
    assert len(calls) >= 2 * 4


@pytest.mark.parametrize(("family", "padded"), [("llama", True), ("gemma2", False)], ids=["llama, padded", "gemma2"])
def test_prefill_in_chunks(family: str, padded: bool, kernels) -> None:
    model, ids, mask = emitted(family), tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    if padded:
        mask[1, :11] = 0
    expected = in_parts(model, ids, mask, [17, 2, 11])
    kernels()
    found = in_parts(model, ids, mask, [17, 2, 11])
    assert largest((found - expected) * mask[:, :, None], expected) <= 1e-5


# a scale for every element loses nothing; budgets keep more than a tile
LOSSLESS = {"bits": 8, "scheme": "per-token", "group_size": 1, "residual": 5}
BUDGETED = {
    "selection": {"window": 4, "kernel_size": 3, "pool": "max"},
    "layers": [{"blocks": [[1, 3]], "budgets": [4, 150, 140]}, {"blocks": [[0, 4]], "budgets": [9, 8, 0, 160]}],
}


@pytest.mark.parametrize(
    ("section", "quantisation"),
    [({}, LOSSLESS), (BUDGETED, None), (BUDGETED, LOSSLESS), ({}, {**LOSSLESS, "scheme": "kivi", "group_size": None})],
    ids=["quantised", "budgeted", "budgeted, quantised", "kivi"],
)
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_chunks_and_steps_over_tiles_and_budgets(
    section: dict, quantisation: dict | None, padded: bool, kernels
) -> None:
    """Prompt, chunks that read tiles, and steps that pack some: what torch does, kernels do."""
    model = emitted("llama", 2, **section, **({"quantisation": quantisation} if quantisation else {}))
    sizes = [200, 57, 3, *[1] * 4]
    ids, mask = tokens(2, sum(sizes)), torch.ones(2, sum(sizes), dtype=torch.long)
    if padded:
        mask[1, :127] = 0
    expected = in_parts(model, ids, mask, sizes)
    calls = kernels()
    found = in_parts(model, ids, mask, sizes)
    assert len(calls) == 4 * 2
    assert largest((found - expected) * mask[:, :, None], expected) <= 1e-5


def in_parts(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Logits of tokens that come in parts of some sizes, through a cache."""
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, parts, start = None, [], 0
    for size in sizes:
        stop = start + size
        with torch.no_grad():
            output = model(
                (ids * mask)[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=position_ids[:, start:stop],
                past_key_values=cache,
            )
        cache, start = output.past_key_values, stop
        parts.append(output.logits)
    return torch.cat(parts, 1)
