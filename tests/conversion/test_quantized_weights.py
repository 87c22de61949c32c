"""Quantized weights are moved as they are: what they stand for is the permuted original's, bit for bit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.conversion.logits import compare_logits
from kvsurgery.conversion.revert import revert
from kvsurgery.conversion.verify import verify
from kvsurgery.errors import CheckpointError, UnsupportedModel
from kvsurgery.evaluate.checkpoint import load
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.policy.memory import Footprint
from tests.helpers.families import largest, make, tokens
from tests.helpers.quantized import FORMATS, matrices, quantize
from tests.helpers.surgery import Converted, convert_folder, random_profile

# whole blocks of 128, groups and integers in each KV head
QUERY, KV, DIM = 8, 4, 128
LARGE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": QUERY,
    "num_key_value_heads": KV,
    "head_dim": DIM,
}
SMALL = LARGE | {"head_dim": 64}
SCORES = np.float32([[0, 1, 0, 1], [1, 0, 0, 1]])  # so that heads move in both layers


PAIRS = np.float32([[0, 0, 1, 1], [0, 0, 0, 1]])  # so that pairs of heads do


def convert_half(source: Path, out: Path, scores: np.ndarray = SCORES, **options: Any) -> Converted:
    return convert_folder(source, out, replace(random_profile(source), scores=scores), sparsity=0.5, **options)


def moved(matrix: torch.Tensor, axis: int, heads: int, order: list[int]) -> torch.Tensor:
    """A matrix whose KV heads, each with its share of these heads along an axis, stand in an order."""
    blocks = matrix.unflatten(axis, (len(order), heads // len(order), -1))
    return blocks.index_select(axis, torch.tensor(order)).flatten(axis, axis + 2)


def expected(before: dict[str, torch.Tensor], orders: list[list[int]], query: int = QUERY) -> dict[str, torch.Tensor]:
    result = dict(before)
    for layer, order in enumerate(orders):
        place = f"model.layers.{layer}.self_attn."
        for name, axis, heads in (("q", 0, query), ("k", 0, KV), ("v", 0, KV), ("o", 1, query)):
            if (key := f"{place}{name}_proj") in result:
                result[key] = moved(result[key], axis, heads, order)
            if (key := f"{place}{name}_proj.bias") in result and name != "o":
                result[key] = moved(result[key], 0, heads, order)
        if (key := f"{place}qkv_proj") in result:
            parts = result[key].split([QUERY * DIM, KV * DIM, KV * DIM])
            result[key] = torch.cat(
                [moved(part, 0, count, order) for part, count in zip(parts, (QUERY, KV, KV), strict=True)]
            )
    return result


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor.float(), right[name].float()), name


def provenance(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "kvsurgery.json").read_text())


@pytest.mark.parametrize("family", ["llama-bias", "phi3"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_weights_stand_for_is_permuted(tmp_path: Path, name: str, family: str) -> None:
    source = make(family, tmp_path / "source", **LARGE)
    quantize(source, name)
    out, back = tmp_path / "out", tmp_path / "back"
    convert_half(source, out)
    orders = provenance(out)["permutation"]
    assert all(order != sorted(order) for order in orders)
    assert_same(matrices(out, name), expected(matrices(source, name), orders))
    verify(out, source)
    revert(out, back)
    for file in ("model.safetensors", "config.json"):
        assert (back / file).read_bytes() == (source / file).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == FORMATS[name].config


def test_modules_that_are_not_quantized_stay_so(tmp_path: Path) -> None:
    for name in ("fp8-block", "modelopt-nvfp4", "compressed-int4", "gptq-4"):
        source = make("llama", tmp_path / name, **LARGE)
        quantize(source, name, skipped=("lm_head", "layers.0.self_attn"))
        convert_half(source, tmp_path / f"{name}-out")
        before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / f"{name}-out"))
        order = provenance(tmp_path / f"{name}-out")["permutation"][0]
        key = "model.layers.0.self_attn.q_proj.weight"
        assert torch.equal(after[key], moved(before[key], 0, QUERY, order))


@pytest.mark.parametrize("name", ["fp8-block", "fp8-tensor"])
def test_transformers_loads_them(tmp_path: Path, name: str) -> None:
    source = make("llama", tmp_path / "source", **LARGE)
    quantize(source, name)
    converted = convert_half(source, tmp_path / "out", sink=50)
    ids = tokens(1, 20)
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(source)(ids).logits
        for options in ({}, {"trust_remote_code": True}):
            model = AutoModelForCausalLM.from_pretrained(converted.folder, **options)
            assert largest(model(ids).logits - wanted, wanted) < 0.02
    config = json.loads((converted.folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", FORMATS)
def test_memory_counts_what_is_stored_and_what_is_computed(tmp_path: Path, name: str) -> None:
    plain = make("llama", tmp_path / "plain", **LARGE)
    source = make("llama", tmp_path / "source", **LARGE)
    quantize(source, name)
    found, expected = (Footprint.of(Checkpoint.open(folder)) for folder in (source, plain))
    assert (found.inner, found.hidden, found.vocabulary) == (expected.inner, expected.hidden, expected.vocabulary)
    assert found.itemsize == 2
    stored = (source / "model.safetensors").stat().st_size
    assert 0.8 * stored < found.weights <= stored  # scales are loaded in 16 bits


@pytest.mark.parametrize("name", ["modelopt-fp8", "modelopt-int4-awq"])
def test_what_transformers_takes_for_weights_is_never_loaded(tmp_path: Path, name: str) -> None:
    source = make("llama", tmp_path / "source", **LARGE)
    quantize(source, name)
    out = convert_half(source, tmp_path / "out").folder
    verify(out, source)
    with pytest.raises(ImportError, match="vLLM"):
        AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert [file.name for file in out.glob("*.py")] == ["modeling_kvsurgery_llama.py"]
    for attempt in (
        lambda: compare_logits(out),
        lambda: load(source, device="cpu"),
        lambda: load(out, device="cpu", stock=True),
        lambda: MeasuredModel.load(str(source)),
    ):
        with pytest.raises(UnsupportedModel, match="modelopt"):
            attempt()


@pytest.mark.parametrize("place", ["self_attn.", "self_attn.k_proj."])
def test_scales_of_a_kv_cache_follow_their_heads(tmp_path: Path, place: str) -> None:
    source = make("llama", tmp_path / "source", **LARGE)
    quantize(source, "fp8-tensor")
    weights = load_file(source / "model.safetensors")
    scales = {"k_scale": torch.rand(KV, 1, 1), "q_scale": torch.rand(QUERY, 1, 1), "v_scale": torch.rand(1)}
    first = f"model.layers.0.{place}"
    save_file(
        weights | {first + name: scale for name, scale in scales.items()},
        source / "model.safetensors",
        {"format": "pt"},
    )
    out = convert_half(source, tmp_path / "out").folder
    after, order = load_file(out / "model.safetensors"), provenance(out)["permutation"][0]
    assert torch.equal(after[f"{first}k_scale"], scales["k_scale"][order])
    assert torch.equal(after[f"{first}q_scale"], moved(scales["q_scale"], 0, QUERY, order))
    assert torch.equal(after[f"{first}v_scale"], scales["v_scale"])


def test_published_gpt_oss(tmp_path: Path) -> None:
    """Its experts are in MXFP4, and its attention is not quantized."""
    source = make("gpt_oss", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.randint(256, (experts, outputs, -(-inputs // 32), 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(256, (experts, outputs, -(-inputs // 32)), dtype=torch.uint8)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (source / "config.json").write_text(json.dumps(config))
    converted = convert_folder(source, tmp_path / "out", sparsity=0.5)
    after = load_file(converted.folder / "model.safetensors")
    changed = {name for name in weights if not torch.equal(weights[name], after[name])}
    assert changed
    assert all("self_attn" in name for name in changed)


# how many heads have to stay together, and the shape where they do
SHARED = {
    "fp8-block": (2, SMALL),  # two KV heads in a block of 128 rows
    "compressed-int4": (2, SMALL | {"num_attention_heads": 4, "head_dim": 32}),  # 32 columns in groups of 64
    "gptq-4": (2, SMALL | {"num_attention_heads": 4, "head_dim": 32}),
    "compressed-nvfp4": (2, SMALL | {"num_attention_heads": 4, "head_dim": 24}),
    "bitsandbytes-nf4": (2, SMALL | {"num_attention_heads": 4, "head_dim": 32, "intermediate_size": 128}),
    # rows of 768 numbers, and 16,384 share a scale of scales: only whole layers are full
    "bitsandbytes-fp4-nested": (4, LARGE | {"head_dim": 96}),
}


@pytest.mark.parametrize("name", SHARED)
def test_heads_that_share_an_element_are_refused_or_stay_together(tmp_path: Path, name: str) -> None:
    least, shape = SHARED[name]
    source, out, back = (tmp_path / folder for folder in ("source", "out", "back"))
    make("llama", source, **shape)
    quantize(source, name)
    unit = 1
    while unit < least:
        with pytest.raises(UnsupportedModel, match="share an element") as caught:
            convert_half(source, out, PAIRS, head_unit=unit)
        assert not out.exists()
        stated = re.search(r"`heads.head_unit` to (\d)", str(caught.value))
        assert stated is not None
        assert unit < int(stated[1]) <= least
        unit = int(stated[1])
    converted = convert_half(source, out, PAIRS, head_unit=unit)
    orders = provenance(out)["permutation"]
    assert orders == ([[2, 3, 0, 1]] * 2 if unit == 2 else [[0, 1, 2, 3]] * 2)
    assert_same(matrices(out, name), expected(matrices(source, name), orders, shape["num_attention_heads"]))
    assert provenance(out)["options"]["head_unit"] == unit
    assert [layer.full for layer in converted.policy.layers] == ([2, 2] if unit == 2 else [4, 0])
    verify(out, source)
    revert(out, back)
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def change(source: Path, settings: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> None:
    """Change quantization_config, and tensors of the first query projection."""
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= settings or {}
    (source / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    for suffix, tensor in tensors.items():
        key = f"model.layers.0.self_attn.q_proj.{suffix}"
        if tensor is None:
            del weights[key]
        else:
            weights[key] = tensor
    save_file(weights, source / "model.safetensors", {"format": "pt"})


LIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a scale is missing": ("fp8-block", {}, {"weight_scale_inv": None}, "q_proj.weight_scale_inv is missing"),
    "zeros are missing": ("gptq-4", {}, {"qzeros": None}, "q_proj.qzeros is missing"),
    "a scale of another shape": ("fp8-block", {}, {"weight_scale_inv": torch.ones(3, 2)}, "has shape"),
    "codes of another width": ("gptq-4", {"bits": 8}, {}, "has shape"),
    "another group size": ("awq", {"group_size": 32}, {}, "has shape"),
    "two layouts": ("gptq-4", {}, {"weight": torch.zeros(1024, 256)}, "twice"),
    "no codes": ("gptq-4", {}, {"qweight": None}, "q_proj.weight is missing"),
    "an unknown method": ("awq", {"quant_method": "hqq"}, {}, "hqq"),
    "marlin": ("gptq-4", {"checkpoint_format": "marlin"}, {}, "marlin"),
    "gemv": ("awq", {"version": "gemv"}, {}, "gemv"),
    "transforms": ("compressed-int4", {"transform_config": {"a": 1}}, {}, "transform_config"),
    "a group without weights": ("compressed-int4", {"config_groups": {"a": {}}}, {}, "without weights"),
    "a group of its own for each scale": (
        "torchao-int8",
        {},
        {"_weight_scale": torch.ones(1024, 4)},
        "has shape",
    ),
    "a scale of each head of another number": ("fp8-tensor", {}, {"k_scale": torch.ones(3, 1, 1)}, "has shape"),
    "neither 4 nor 8 bits": ("bitsandbytes-nf4", {"load_in_4bit": False}, {}, "load_in_4bit"),
    "codes in floats": ("bitsandbytes-nf4", {"bnb_4bit_quant_storage": "bfloat16"}, {}, "quant_storage"),
    "blocks of another size": ("bitsandbytes-nf4", {}, {"weight.absmax": torch.ones(1024)}, "has shape"),
    "codes in tiles": (
        "torchao-int8",
        {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
        {},
        "Int4Weight",
    ),
    "no type of codes": ("torchao-int8", {"quant_type": ["int8"]}, {}, "torchao"),
    "no groups": ("compressed-int4", {"config_groups": []}, {}, "config_groups"),
    "nonsense bits": ("gptq-4", {"bits": 0}, {}, "bits"),
    "nonsense group": ("gptq-4", {"group_size": "all"}, {}, "group_size"),
    "nonsense block": ("fp8-block", {"weight_block_size": [0, 128]}, {}, "weight_block_size"),
    "a list for a strategy": (
        "compressed-int4",
        {"config_groups": {"a": {"weights": {"num_bits": 4, "strategy": ["group"]}}}},
        {},
        "strategy",
    ),
    "a number for a block": (
        "compressed-fp8-block",
        {"config_groups": {"a": {"weights": {"num_bits": 8, "strategy": "block", "block_structure": 128}}}},
        {},
        "block_structure",
    ),
    "a list for a group size": (
        "compressed-int4",
        {"config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "group", "group_size": [64]}}}},
        {},
        "group_size",
    ),
    "a list for an algorithm": ("modelopt-fp8", {"quant_algo": ["FP8"]}, {}, "FP8"),
    "an algorithm": ("modelopt-fp8", {"quant_algo": "W4A8_AWQ"}, {}, "W4A8_AWQ"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_before_anything_is_written(tmp_path: Path, lie: str) -> None:
    name, settings, tensors, named = LIES[lie]
    source = make("llama", tmp_path / "source", **LARGE)
    quantize(source, name)
    change(source, settings, **tensors)
    with pytest.raises((CheckpointError, UnsupportedModel), match=named) as caught:
        convert_half(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
