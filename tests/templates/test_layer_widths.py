"""Layers whose caches differ in bits: the emitted model computes what a reference with the same widths does."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvsurgery.templates.kv_layout import TILE, KVLayout, Quantization
from tests.helpers.families import tokens
from tests.helpers.losses import losses
from tests.helpers.slow_cache import SlowCache
from tests.helpers.surgery import Converted, convert_folder, random_profile
from tests.templates.test_exactness import logits
from tests.templates.test_kv_cache import module_of
from tests.templates.test_quantized import GREEDY, PROMPT

RESIDUAL = 4


class SlowLayers(SlowCache):
    """The reference cache, with a quantization for each layer."""

    def __init__(self, by_layer, config):
        super().__init__(None, config)
        self.by_layer = by_layer

    def pack(self, layer, settled):
        self.quantization = self.by_layer[layer]
        if self.quantization:
            super().pack(layer, settled)


@pytest.fixture(scope="module")
def differing(checkpoint, tmp_path_factory):
    """Conversions by sparsity, whose layers differ in bits; at 0.0 one of them keeps the model's dtype."""
    source, folder = checkpoint("qwen3"), tmp_path_factory.mktemp("layers")
    profile, path = random_profile(source), folder / "losses.safetensors"
    made = losses(profile.model, str(source), seed=1, measured=(8, "k3v2", 2))
    uneven = np.float32([[1], [30], [900], [27000]])
    replace(made, heads={name: harm * uneven for name, harm in made.heads.items()}).save(path)
    options = {"kv_bits": "auto", "kv_measured": str(path), "kv_residual": RESIDUAL}
    return {
        sparsity: convert_folder(
            source, folder / f"{sparsity}", profile, sparsity=sparsity, kv_budget=budget, **options
        )
        for sparsity, budget in ((0.0, 9.0), (0.5, 3.5))
    }


def bits(converted: Converted) -> list[int | str | None]:
    return [layer.quantization and layer.quantization.bits for layer in converted.policy.layers]


def test_generate_equals_a_reference_with_the_bits_of_each_layer(differing) -> None:
    converted = differing[0.0]
    assert {8, "k3v2", None} <= {*bits(converted)}
    ids, new = tokens(2, PROMPT), 150
    found = converted.model.generate(
        ids, **GREEDY, max_new_tokens=new, return_dict_in_generate=True, output_logits=True
    )
    quantizations = [layer.quantization for layer in converted.policy.layers]
    cache, expected = SlowLayers(quantizations, converted.stock.config), []
    with torch.no_grad():
        for part in found.sequences[:, :-1].split([PROMPT, *[1] * (new - 1)], 1):
            expected.append(converted.stock(part, past_key_values=cache).logits[:, -1])
    found, expected, exact = (
        torch.stack(found.logits, 1),
        torch.stack(expected, 1),
        logits(converted.stock, found.sequences[:, :-1])[:, PROMPT - 1 :],
    )
    assert (exact - expected).norm() > 1e-3 * expected.norm()
    # not nearer, since a state on the edge of two codes may take the other one
    assert (found - expected).norm() <= 0.05 * (exact - expected).norm()


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
@pytest.mark.parametrize(("batch", "prompt", "new"), [(1, PROMPT, 40), (2, 133, 1)])
def test_allocated_bytes_are_the_predicted_ones(differing, sparsity, batch, prompt, new) -> None:
    converted = differing[sparsity]
    cache = converted.model.generate(
        tokens(batch, prompt), **GREEDY, max_new_tokens=new, return_dict_in_generate=True
    ).past_key_values
    layout = KVLayout.from_config(converted.model.config.to_dict())
    assert cache.allocated_bytes() == layout.kv_bytes(batch, prompt, new, itemsize=4)
    # by hand: 16 channels, 4 bytes a scale, streaming heads of 3 + 5 tokens
    total, expected = prompt + new, 0
    for layer, width in zip(layout.layers, bits(converted), strict=True):
        tail = total if width is None else min(total, 4 + RESIDUAL + TILE)
        tiles = 0 if width is None else max(0, total - 5 - RESIDUAL) // TILE
        pair_bits = 5 if width == "k3v2" else 2 * (width or 0)
        tile = TILE * 16 * pair_bits // 8 + (2 * 16 + 2 * TILE) * 4
        expected += layer.full * (tail * 2 * 16 * 4 + tiles * tile) + layer.streaming * 8 * 2 * 16 * 4
    assert cache.allocated_bytes() == batch * expected


def test_a_saved_checkpoint_keeps_the_bits(differing, tmp_path) -> None:
    converted = differing[0.5]
    converted.model.save_pretrained(tmp_path)
    again = Converted(converted.source, tmp_path, converted.policy)
    options = GREEDY | {"max_new_tokens": 20}
    ids = tokens(2, PROMPT)
    assert again.model.generate(ids, **options).equal(converted.model.generate(ids, **options))
    stored = KVLayout.from_config(again.model.config.to_dict())
    assert [layer.quantization for layer in stored.layers] == [layer.quantization for layer in converted.policy.layers]


def test_bits_for_one_call_are_those_of_every_layer(differing) -> None:
    model, stored = differing[0.5].model, {width for width in bits(differing[0.5]) if width}
    requested = module_of(model, "kv_kinds").quantized_code().requested_quantization
    for width in (8, 4, 3, "k3v2", "k2v4", 2):
        steps = {"rotate": "both", "clip": False} if width in stored else {}
        expected = Quantization(width, residual=RESIDUAL, **steps)
        assert vars(requested({"nbits": width}, model.config)) == vars(expected)
    assert 0 < len(stored) < 4
    with pytest.raises(ValueError, match="give nbits"):
        model.generate(tokens(1, 4), cache_implementation="quantized", cache_config={"residual_length": 8})


@pytest.mark.parametrize(
    "change",
    [
        {"bits": [4]},
        {"bits": []},
        {"bits": [4, 3, 5, 2]},
        {"bits": [4, 3, None, "2"]},
        {"bits": ["k3v2", 3, 4, "v3"]},
        {"rotate": ["keys"] * 4},
    ],
    ids=str,
)
def test_lists_that_do_not_fit_the_layers_are_refused(differing, change) -> None:
    config = copy.deepcopy(differing[0.5].model.config.to_dict())
    config["kv_surgery"]["quantization"] |= {"bits": [4, "k3v2", None, 2]}
    found = KVLayout.from_config(config)
    assert [layer.quantization and layer.quantization.bits for layer in found.layers] == [4, "k3v2", None, 2]
    config["kv_surgery"]["quantization"] |= change
    with pytest.raises(ValueError, match="malformed"):
        KVLayout.from_config(config)
