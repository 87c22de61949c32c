"""The quantized caches that benchmarks compare on a language model: ours, those of transformers, and fp8."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache
from transformers.cache_utils import DynamicLayer

from benchmarks.filling import append
from benchmarks.real_model.models import converted
from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.source import read_config
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from kvsurgery.templates.kv_codes import rotated
from kvsurgery.templates.kv_layout import Quantization

ORIGINAL = "original"
# backend of QuantizedCache -> its axes for keys and values: with quanto's, keys have a scale for each channel and some
# tokens, with HQQ's for each token
BACKENDS = {"quanto": (-1, 0), "hqq": (1, 1)}
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


class Fp8Layer(DynamicLayer):
    """Keys and values of a layer, one byte for each number; larger ones are stored as the largest there is."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        super().lazy_initialization(key_states, key_states if value_states is None else value_states)
        self.keys, self.values = (key_states[:, :, :0].to(FP8) for _ in range(2))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None  # for the checker: both are initialized now
        assert self.values is not None
        keys, values = (states.clamp(-LARGEST, LARGEST).to(FP8) for states in (key_states, value_states))
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        return self.keys.to(key_states.dtype), self.values.to(value_states.dtype)


def settings() -> dict[str, Quantization | None]:
    """Our caches, by name; first those whose comparison says most."""
    unrotated = partial(Quantization, sink=0, rotate="none", clip=False)
    quantizations: dict[str, Quantization | None] = {}
    for bits in (4, 2):
        quantizations[f"kvsurgery, {bits} bits"] = Quantization(bits)
        quantizations[f"kvsurgery, scheme of version 0.1.0, {bits} bits"] = unrotated(bits)
        quantizations[f"KIVI in groups of 32, {bits} bits"] = unrotated(bits, group_size=32)
    quantizations |= {f"kvsurgery, {bits} bits": Quantization(bits) for bits in (3, 8)}
    quantizations["kvsurgery, unquantized"] = None
    for bits in (2, 3, 4):
        quantizations[f"kvsurgery, {bits} bits, keys rotated"] = Quantization(bits, rotate="both", clip=bits == 2)
    return quantizations | {
        f"kvsurgery, {bits} bits per token": Quantization(bits, "per-token") for bits in (8, 4, 3, 2)
    }


def contenders(
    stock: PreTrainedModel, emitted: PreTrainedModel
) -> dict[str, tuple[PreTrainedModel, Callable[[], Any]]]:
    """Models with what makes an empty cache, by name: the original first, then ours, fp8, and those of transformers."""
    contenders_by_name: dict[str, tuple[PreTrainedModel, Callable[[], Any]]] = {
        ORIGINAL: (stock, partial(DynamicCache, config=stock.config))
    }
    cache = type(emitted(torch.zeros(1, 1, dtype=torch.long)).past_key_values)
    for name, quantization in settings().items():
        contenders_by_name[name] = emitted, partial(cache, emitted.config, quantization=quantization)
    contenders_by_name["fp8, as vLLM has it"] = stock, partial(Cache, layer_class_to_replicate=Fp8Layer)
    for backend, (keys, values) in BACKENDS.items():
        for bits in (4, 2):
            options = {"nbits": bits, "axis_key": keys, "axis_value": values}
            make = partial(QuantizedCache, backend, stock.config, **options)
            contenders_by_name[f"QuantizedCache, {backend}, {bits} bits"] = stock, make
    return contenders_by_name


def all_full(source: Path) -> PreTrainedModel:
    """The model after conversion with every head full, in float32."""
    config = read_config(source)
    model = Model.of(config).dimensions
    scores = np.ones((model.layers, model.kv_heads), dtype=np.float32)
    profile = HeadProfile(scores, "ablation", "kv", str(source), model)
    return converted(source, profile, Recipe.of(sparsity=0.0, quantized=True))


@torch.inference_mode()
def filled(cache: Any, states: list[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor | None = None) -> Any:
    """An empty cache, filled with a prompt's keys and values by layer, as the prompt's own forward fills it.

    Args:
        mask: of left padding, [rows, tokens].
    """
    if hasattr(cache, "begin"):  # a converted model's; others quantize what comes first in `update`
        cache.begin(mask, *states[0][0].shape[::2])
    for number, (keys, values) in enumerate(states):
        if not hasattr(cache, "begin"):
            cache.update(keys, values, number)
            continue
        layer = cache.layers[number]
        quantization = layer.layout.quantization
        rotate, heads = "none" if quantization is None else quantization.rotate, keys.shape[1]
        keys = rotated(keys, heads) if rotate == "both" else keys
        layer.lazy_initialization(keys)
        append(layer, keys, values if rotate == "none" else rotated(values, heads))
    return cache
