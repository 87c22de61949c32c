"""Checkpoints whose weights were quantized by bitsandbytes, torchao and compressed-tensors are permuted as loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    PreTrainedModel,
    TorchAoConfig,
)

from kvsurgery.conversion.revert import revert
from kvsurgery.conversion.verify import verify
from tests.conversion.test_quantized_weights import KV, LARGE, QUERY, convert_half, moved
from tests.helpers.families import make, tokens

PROJECTIONS = {"q_proj": (1, QUERY), "k_proj": (1, KV), "v_proj": (1, KV), "o_proj": (0, QUERY)}  # axis and heads


def bitsandbytes(**options: Any) -> Callable[[Path, Path], None]:
    def save(source: Path, out: Path) -> None:
        pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
        config = BitsAndBytesConfig(**options)
        loaded(source, quantization_config=config, dtype=torch.bfloat16).save_pretrained(out)

    return save


def torchao(name: str) -> Callable[[Path, Path], None]:
    def save(source: Path, out: Path) -> None:
        package = pytest.importorskip("torchao.quantization", reason="pip install torchao")
        config = TorchAoConfig(getattr(package, name)(version=2))
        loaded(source, quantization_config=config, dtype=torch.bfloat16).save_pretrained(out)

    return save


def compressed(kv_cache: str | None = None, **weights: Any) -> Callable[[Path, Path], None]:
    """Weights by a scheme of compressed-tensors, rounded to nearest."""

    def save(source: Path, out: Path) -> None:
        pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
            apply_quantization_config,
        )
        from compressed_tensors.quantization.utils import calculate_qparams

        arguments = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        cache = None if kv_cache is None else QuantizationArgs(num_bits=8, type="float", strategy=kv_cache)
        model = loaded(source, dtype=torch.bfloat16)
        config = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], kv_cache_scheme=cache)
        apply_quantization_config(model, config)
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                groups = module.weight.detach().float().unflatten(1, (-1, arguments.group_size or module.in_features))
                scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
                module.weight_scale.data.copy_(scale)
                if hasattr(module, "weight_zero_point"):
                    module.weight_zero_point.data.copy_(zero)
            for name in ("k_scale", "v_scale"):
                if hasattr(module, name):
                    scale = getattr(module, name)
                    scale.data.copy_(torch.linspace(0.002, 0.02, scale.numel()).view_as(scale))
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(out)
        compressor.update_config(out)

    return save


LIBRARIES = {
    "bitsandbytes-nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes-fp4-nested": bitsandbytes(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    "bitsandbytes-int8": bitsandbytes(load_in_8bit=True),
    "torchao-int8": torchao("Int8WeightOnlyConfig"),
    "torchao-fp8": torchao("Float8WeightOnlyConfig"),
    "compressed-fp8": compressed(num_bits=8, type="float", strategy="channel"),
    "compressed-int4": compressed(num_bits=4, type="int", strategy="group", group_size=64),
    "compressed-int4-asymmetric": compressed(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
    "compressed-kv-scales": compressed("attn_head", num_bits=8, type="float", strategy="channel"),
}


def loaded(folder: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def projections(model: PreTrainedModel) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Of each layer's projections, the outputs for unit vectors: what the loaded layer multiplies by."""
    for index, layer in enumerate(model.model.layers):
        for name in PROJECTIONS:
            projection = getattr(layer.self_attn, name)
            width = projection.in_features
            yield index, name, projection(torch.eye(width, dtype=torch.bfloat16))


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, sums are added in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", LIBRARIES)
def test_quantized_weights_are_permuted_as_loaded(tmp_path: Path, name: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    LIBRARIES[name](make("llama", tmp_path / "plain", **LARGE), source)
    convert_half(source, out, sink=50)
    verify(out, source)
    revert(out, tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    orders = json.loads((out / "kvsurgery.json").read_text())["permutation"]
    ids = tokens(1, 20)
    # compressed-tensors has no product for every scheme, on a CPU
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if name.startswith("compressed") else {}
    with one_thread(), torch.no_grad():
        original, stock = loaded(source, **options), loaded(out, **options)
        emitted = loaded(out, trust_remote_code=True, **options)
        for (layer, projection, before), (_, _, after) in zip(projections(original), projections(stock), strict=True):
            axis, heads = PROJECTIONS[projection]
            assert torch.equal(after, moved(before, axis, heads, orders[layer])), (layer, projection)
        expected = original(ids).logits.float()
        for model in (stock, emitted):
            assert (model(ids).logits.float() - expected).abs().max() < 0.06 * expected.abs().max()
