"""What cannot be served is refused in one line."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm

from kvsurgery.templates.kv_layout import LayerLayout, Quantization
from kvsurgery.vllm import register, supports
from kvsurgery.vllm.architectures import ARCHITECTURES
from kvsurgery.vllm.limits import Refused, check, checked_layout

SELECTION = {"window": 4, "kernel_size": 3, "pool": "max"}
TILES = asdict(Quantization(4))
BIDIRECTIONAL = {"use_bidirectional_attention": "vision"}


def settings(section: dict[str, Any] | None = None, **changes: Any) -> Any:
    """vLLM's config of a checkpoint of 2 layers with 4 KV heads; `changes` are of its parts, by their names."""
    layers = [{"blocks": [[1, 3]], "sink": 4, "recent": 8}] * 2
    config = SimpleNamespace(
        kv_surgery={"version": 2, "head_dim": 32, "layers": layers, **(section or {})},
        num_hidden_layers=2,
        num_key_value_heads=4,
        num_attention_heads=8,
    )
    if text := changes.pop("text", None):
        config.text_config = SimpleNamespace(**vars(config), **text)
    images = SimpleNamespace(language_model_only=changes.pop("language_model_only", False))
    sizes = ("tensor", "pipeline", "decode_context", "prefill_context")
    parallel = {f"{kind}_parallel_size": 1 for kind in sizes}
    cache = {"cache_dtype": "auto", "kv_sharing_fast_prefill": False}
    parts = {
        "model_config": SimpleNamespace(hf_config=config, multimodal_config=images),
        "parallel_config": SimpleNamespace(**{**parallel, **changes.pop("parallel", {})}),
        "cache_config": SimpleNamespace(**{**cache, **changes.pop("cache", {})}),
        "scheduler_config": SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        "kv_transfer_config": None,
        "lora_config": None,
        "speculative_config": None,
    }
    return SimpleNamespace(**{**parts, **changes})


def with_kv_scales(name: str) -> Any:
    """vLLM's config of a checkpoint whose original has scales for a KV cache of 8 bits."""
    result = settings()
    result.model_config.hf_config.quantization_config = {"quant_method": "fp8", name: {"num_bits": 8}}
    return result


REFUSED = {
    "scales of the KV cache": (with_kv_scales("kv_cache_scheme"), "scales that split heads do not have"),
    "ModelOpt's scales": (with_kv_scales("kv_cache_quant_algo"), "scales that split heads do not have"),
    "budgets": (
        settings({"selection": SELECTION, "layers": [{"blocks": [[1, 3]], "budgets": [4, 4, 4]}] * 2}),
        "budgeted heads; use transformers .* VLLM_PLUGINS=none",
    ),
    "connector": (settings(kv_transfer_config=object()), "KV connectors"),
    "eagle": (settings(speculative_config=SimpleNamespace(method="eagle")), "eagle is refused; use ngram"),
    "context": (settings(parallel={"decode_context_parallel_size": 2}), "context parallelism"),
    "pipeline": (settings(parallel={"pipeline_parallel_size": 2}), "pipeline parallelism"),
    "fp8": (settings(cache={"cache_dtype": "fp8"}), "fp8 KV cache .* leave out --kv-cache-dtype"),
    "fast prefill": (
        settings(cache={"kv_sharing_fast_prefill": True}),
        "fast-prefill has not been tested; leave it out",
    ),
    "processes": (settings(parallel={"tensor_parallel_size": 2}), "convert with --tp 2"),
    "uneven": (
        settings(
            {"layers": [{"blocks": [[2, 0], [0, 2]], "sink": 4, "recent": 8}] * 2},
            parallel={"tensor_parallel_size": 2},
        ),
        "without --tp-uneven",
    ),
    "bidirectional images": (settings(text=BIDIRECTIONAL), "in both directions .* --language-model-only"),
    "version": (settings({"version": 99}), "version 99 is unknown"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_to_do(case: str) -> None:
    config, message = REFUSED[case]
    for refuse in (check, checked_layout):
        with pytest.raises(Refused, match=message) as refusal:
            refuse(config)
        assert "\n" not in str(refusal.value)


def test_vllm_refuses_while_it_reads_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    register()
    config, message = REFUSED["budgets"]
    for architecture in ARCHITECTURES:
        with pytest.raises(Refused, match=message):
            MODELS_CONFIG_MAP[architecture].verify_and_update_config(config)
    # of what is not converted, the stock check alone is asked
    asked = []
    stock = type("Stock", (), {"verify_and_update_config": staticmethod(asked.append)})
    monkeypatch.setitem(MODELS_CONFIG_MAP, "LlamaForCausalLM", stock)
    register()
    original = settings()
    original.model_config.hf_config.kv_surgery = None
    served = settings()
    for config in (original, served):
        MODELS_CONFIG_MAP["LlamaForCausalLM"].verify_and_update_config(config)
    assert asked == [original, served]


def test_a_quantized_cache_of_vllm_is_refused_on_every_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsurgery.vllm import limits

    monkeypatch.setattr(limits, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    for name in ("fp8", "int8_per_token_head", "nvfp4", "turboquant_4bit_nc"):
        with pytest.raises(Refused, match=name):
            check(settings(cache={"cache_dtype": name}))
        full = {"layers": [{"blocks": [[4, 0]], "sink": 0, "recent": 1}] * 2}
        assert check(settings(full, cache={"cache_dtype": name}))


def test_each_process_has_its_part_of_the_heads() -> None:
    layers = [{"blocks": [[1, 1], [1, 1]], "sink": 4, "recent": 8}] * 2
    layout = checked_layout(settings({"layers": layers}, parallel={"tensor_parallel_size": 2}))
    assert [layer.blocks for layer in layout.layers] == [((1, 1),)] * 2


def test_text_is_served_where_images_are_refused() -> None:
    assert checked_layout(settings(text=BIDIRECTIONAL, language_model_only=True))


def test_learned_sinks_are_served_where_full_heads_lie_together() -> None:
    from kvsurgery.vllm.split import learned_sinks

    stock: Any = SimpleNamespace(impl=SimpleNamespace(sinks=torch.arange(8.0)), num_heads=8, num_kv_heads=4)
    full, streaming = learned_sinks(stock, LayerLayout(((1, 3),), 4, 8))
    stock.impl.sinks += 1  # weights load later
    assert (full["sinks"].tolist(), streaming["sinks"].tolist()) == ([1, 2], [3, 4, 5, 6, 7, 8])
    with pytest.raises(Refused, match="use --tensor-parallel-size 2"):
        learned_sinks(stock, LayerLayout(((1, 1), (1, 1)), 4, 8))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (settings({"quantization": TILES}), ("quantized KV cache", "--kv-cache-dtype")),
        (settings(lora_config=object()), ("convert --adapter",)),
        (settings({"reform": {}}), ("REFORM", "within the context")),
    ],
    ids=["a quantized cache", "adapters", "REFORM"],
)
def test_what_is_served_otherwise_is_said_once(
    monkeypatch: pytest.MonkeyPatch, config: Any, words: tuple[str, ...]
) -> None:
    from kvsurgery.vllm import limits

    lines = []
    monkeypatch.setattr(limits.logger, "warning_once", lambda line, *values: lines.append(line % values))
    checked_layout(config)
    assert len(lines) == 1
    assert all(word in lines[0] for word in words)


def test_supported_versions() -> None:
    assert all(supports(version) for version in ("0.30.0", "0.32.0+cpu", "0.33.1", "0.33.0rc1"))
    assert not any(supports(version) for version in ("0.29.1", "0.34.0", "1.0.0", "0.1.dev1+g123", "dev", ""))


def test_the_plugin_imports_nothing_before_vllm_asks() -> None:
    code = "import sys, kvsurgery.vllm; print({'vllm', 'torch', 'transformers', 'numpy'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_other_versions_of_vllm_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    before = dict(vllm.ModelRegistry.models)
    with caplog.at_level(logging.WARNING):
        register()
    assert before == vllm.ModelRegistry.models
    assert "vLLM 0.34.0 is not supported" in caplog.text
