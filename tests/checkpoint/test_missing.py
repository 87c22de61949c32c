"""Tensors that the stock class would initialize at random are found by name, in every family."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.source import Checkpoint
from tests.helpers.families import EVERY, FAMILIES, WITH_IMAGES, config_of

# settings that decide which tensors the stock class has
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [{"attention_bias": True}, {"mlp_bias": True}],
    "seed_oss": [{"attention_bias": False}, {"attention_out_bias": False, "mlp_bias": True}],
    "ernie4_5": [{"use_bias": False}],
    "glm4": [{"attention_bias": False}],
    "qwen2_moe": [{"qkv_bias": False, "mlp_only_layers": [1]}, {"num_experts": 0}],
    "qwen3_moe": [{"decoder_sparse_step": 2, "attention_bias": True}],
    "qwen3_next": [{"decoder_sparse_step": 3, "mlp_only_layers": [2]}],
    "glm4_moe": [{"use_qk_norm": False, "first_k_dense_replace": 3}],
    "llama4": [{"interleave_moe_layer_step": 1}, {"moe_layers": [0]}, {"attention_bias": True}],
    "exaone_moe": [{"mlp_layer_types": None, "first_k_dense_replace": 2}],
    "cohere2_moe": [{"num_shared_experts": 0, "attention_bias": False, "mlp_layer_types": ["sparse", "dense"] * 2}],
    "hy_v3": [{"attention_bias": False, "mlp_layer_types": ["sparse", "dense"] * 2}],
    "gpt_oss": [{"attention_bias": False}],
    "gemma4": [{"hidden_size_per_layer_input": 0}, {"attention_k_eq_v": False}, {"attention_bias": True}],
    "nemotron_h": [{"moe_latent_size": None, "mlp_bias": False}, {"use_conv_bias": False, "use_bias": True}],
    "gemma3n": [{"altup_num_inputs": 2}, {"num_kv_shared_layers": 0}],
}
NEVER_TIED = "nemotron_h"
CASES = [(name, {}) for name in EVERY if name != "llama4-images"]
CASES += [(name, settings) for name, variants in VARIANTS.items() for settings in variants if name in FAMILIES]
TIED = {name: FAMILIES[name].get("tie_word_embeddings", False) for name in FAMILIES}
CASES += [(name, {"tie_word_embeddings": not tied}) for name, tied in TIED.items() if name not in NEVER_TIED]


def stock_names(config: Any, auto: Any) -> set[str]:
    """The tensors that the stock class of a config has, apart from an output layer that is the embedding."""
    with torch.device("meta"):
        model = auto.from_config(config)
    names = set(model.state_dict())
    tied = model.get_output_embeddings() and model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return {name for name in names if not (tied and name.endswith("lm_head.weight"))}


def saved(config: Any, architecture: str) -> dict[str, Any]:
    """config.json as `save_pretrained` writes it."""
    return {**json.loads(config.to_json_string()), "architectures": [architecture]}


@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda value: str(value))
def test_every_tensor_of_the_stock_class_is_required(name: str, settings: dict[str, Any]) -> None:
    config = config_of(name, **settings)
    auto = AutoModelForImageTextToText if name in WITH_IMAGES else AutoModelForCausalLM
    names = stock_names(config, auto)
    model = Model.of(saved(config, auto._model_mapping[type(config)].__name__))
    assert [*model.missing(names)] == []
    for half in (sorted(names)[::2], sorted(names)[1::2]):
        assert sorted(model.missing(names.difference(half))) == half


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_a_model_without_an_output_layer_needs_none(name: str) -> None:
    config = config_of(name, tie_word_embeddings=False)
    names = stock_names(config, AutoModel)
    raw = saved(config, AutoModel._model_mapping[type(config)].__name__)
    assert [*Model.of(raw).missing(names)] == []
    raw["architectures"] = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    assert [*Model.of(raw).missing(names)] == ["lm_head.weight"]


@pytest.mark.parametrize("name", [name for name in ("llama", "mixtral", "glm4_moe", "pixtral") if name in EVERY])
def test_saved_checkpoints(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """What `save_pretrained` writes, experts one by one; without one of its tensors, stock has missing keys."""
    source = Checkpoint.open(checkpoint(name))
    names = {tensor.name for tensor in source.tensors}
    assert [*source.model.missing(names)] == []
    for tensor in names:
        assert [*source.model.missing(names - {tensor})] == [tensor]
    weights = load_file(source.folder / "model.safetensors")
    shutil.copy(source.folder / "config.json", tmp_path)
    del weights[max(names)]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    auto = AutoModelForImageTextToText if name in WITH_IMAGES else AutoModelForCausalLM
    assert auto.from_pretrained(tmp_path, output_loading_info=True)[1]["missing_keys"]
