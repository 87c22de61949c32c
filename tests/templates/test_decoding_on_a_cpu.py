"""Tokens attend to quantized tiles on a CPU by the loop in C where there is one, and by PyTorch elsewhere."""

import sys
from collections.abc import Iterator

import pytest
import torch

from kvsurgery import templates
from kvsurgery.templates import kv_cpu, kv_tiles
from tests.helpers.emitted import BUDGETED, CLASSES, HELD, LOSSLESS, WINDOWS
from tests.helpers.families import largest, stock, tokens
from tests.helpers.loop_in_c import counted, needs_compiler

SIZES = [300, 3, 100, *[1] * 140]  # a prompt, drafts, a chunk, and steps that fill a tile


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype of queries of each call of the loop."""
    return counted(monkeypatch)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Look for the module anew, and again afterwards."""
    kv_tiles._codes_loop.cache_clear()
    yield
    kv_tiles._codes_loop.cache_clear()


@torch.no_grad()
def in_parts(model: torch.nn.Module, sizes: list[int], padding: tuple[int, ...] = (0,), **options) -> torch.Tensor:
    """Logits of the last 144 columns of rows that come in parts."""
    ids, cache, found = tokens(len(padding), sum(sizes)), None, []
    mask = (torch.arange(ids.shape[1]) >= torch.tensor(padding)[:, None]).long()
    begin = 0
    for size in sizes:
        stop = begin + size
        output = model(ids[:, begin:stop], attention_mask=mask[:, :stop], past_key_values=cache, **options)
        cache, begin = output.past_key_values, stop
        found.append(output.logits)
    return torch.cat(found, 1)[:, -144:]


def quantized(family: str, section: dict) -> torch.nn.Module:
    """A random model of two layers with heads of 16 channels."""
    layers = [{"blocks": [[1, 3]], "sink": 3, "recent": 5}, {"blocks": [[4, 0]], "sink": 3, "recent": 5}]
    own = {}
    if family != "llama":
        layers[0] = {"blocks": [[0, 4]], "sink": 0, "recent": 9, "native": True}
        own = {"layer_types": ["sliding_attention", "full_attention"]}
    original = stock(family, num_hidden_layers=2, head_dim=16, **own)
    original.config.kv_surgery = {"version": 2, "head_dim": 16, "layers": layers} | section
    return CLASSES[family].from_pretrained(None, config=original.config, state_dict=original.state_dict()).eval()


def quantization(**changes) -> dict:
    return {"quantization": LOSSLESS | changes}


@needs_compiler
@pytest.mark.parametrize(
    ("family", "section", "padding"),
    [
        ("llama", quantization(), (0, 150)),
        ("gemma2", quantization(bits=4, scheme="kivi", group_size=16), (0,)),
        ("gpt_oss", quantization(bits=3, scheme="kivi", group_size=None, rotate="values"), (0, 90)),
        ("llama", quantization(bits="k8v3", scheme="per-token", group_size=8, clip=True), (0,)),
        ("llama", quantization(bits="k3v2", scheme="kivi", group_size=None), (0, 0)),
        ("llama", BUDGETED | quantization(bits=4), (0, 20)),
        ("llama", HELD | quantization(), (0,)),
        ("llama", WINDOWS | quantization(bits=4, residual=0, streaming=True), (0, 40)),
    ],
    ids=["padded", "softcap", "sinks, 3 bits", "per token", "kivi", "budgets", "hold", "windows"],
)
def test_the_loop_equals_pytorch(family, section, padding, calls, monkeypatch):
    model = quantized(family, section)
    found = in_parts(model, SIZES, padding)
    assert len(calls) >= 100
    monkeypatch.setattr(kv_tiles, "_codes_loop", lambda: None)
    calls.clear()
    expected = in_parts(model, SIZES, padding)
    assert not calls
    assert largest(found - expected, expected) <= 1e-4


@needs_compiler
def test_a_step_calls_the_loop_once_for_each_group(calls):
    """And a few drafts do; a long chunk reads dequantized tiles."""
    model = quantized("llama", quantization())
    groups = 2  # that are quantized, one a layer
    in_parts(model, [300])
    assert not calls
    in_parts(model, [300, 1, 1])
    assert len(calls) == 2 * groups
    calls.clear()
    in_parts(model, [300, 5])
    assert len(calls) == groups
    calls.clear()
    in_parts(model, [300, kv_tiles.LOOP_QUERIES + 1])
    assert not calls


@needs_compiler
def test_states_of_16_bits_go_through_the_loop(calls):
    model = quantized("llama", quantization()).bfloat16()
    in_parts(model, [300, 1])
    assert {*calls} == {torch.bfloat16}


def test_gradients_dropout_and_float64_do_not(calls):
    model = quantized("llama", quantization())
    cache = model(tokens(1, 300)).past_key_values
    for size in (1, 4):
        assert model(tokens(1, size), past_key_values=cache).logits.requires_grad
    for attention in (layer.self_attn for layer in model.model.layers):
        attention.attention_dropout = 0.5
    in_parts(model.train(), [300, 4, 1])
    in_parts(model.eval().double(), [300, 4, 1])
    assert not calls


def test_a_checkpoint_without_the_module_decodes_by_pytorch(monkeypatch, fresh, calls):
    model = quantized("llama", quantization())
    expected = in_parts(model, SIZES)
    monkeypatch.setitem(sys.modules, kv_cpu.__name__, None)
    monkeypatch.delattr(templates, "kv_cpu")
    kv_tiles._codes_loop.cache_clear()
    calls.clear()
    found = in_parts(model, SIZES)
    assert not calls
    assert largest(found - expected, expected) <= 1e-4


@pytest.mark.parametrize("size", [1, 4])
def test_gradients_of_new_tokens_pass_tiles(size):
    """They are those of a cache without tiles, where codes lose nothing."""
    gradients = []
    for section in ({}, quantization()):
        model = quantized("llama", section)
        with torch.no_grad():
            cache = model(tokens(2, 300)).past_key_values
        model(tokens(2, size, seed=1), past_key_values=cache).logits.square().sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    expected, found = gradients
    assert largest(found - expected, expected) <= 1e-4
