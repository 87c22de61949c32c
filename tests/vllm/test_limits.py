"""What cannot be served is refused in one line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.plugins import load_general_plugins
from vllm.v1.engine.async_llm import AsyncLLM

from kvsurgery.errors import ServingError
from kvsurgery.templates.kv_layout import LayerLayout, Quantization
from kvsurgery.vllm import limits, register, supports
from kvsurgery.vllm.architectures import ARCHITECTURES, DENSE
from kvsurgery.vllm.forecast import servable_layout, serving_limits
from kvsurgery.vllm.limits import checked_layout
from kvsurgery.vllm.quantized import in_pages
from tests.vllm.serving import converted, engine

SELECTION = {"window": 4, "kernel_size": 3, "pool": "max"}
BUDGETS = {"selection": SELECTION, "layers": [{"blocks": [[1, 3]], "budgets": [4, 4, 4]}] * 2}
UNEVEN_BUDGETS = {"blocks": [[1, 1], [0, 2]], "budgets": [4, 4, 4]}
IN_BLOCKS = {"blocks": [[1, 1], [1, 1]], "sink": 4, "recent": 8}
NATIVE = {"blocks": [[0, 4]], "sink": 0, "recent": 8, "native": True}
TILES = asdict(Quantization(8)) | {"sink": [4, 8]}  # pages hold no codes where sinks differ
BIDIRECTIONAL = {"use_bidirectional_attention": "vision"}


def settings(section: dict[str, Any] | None = None, **changes: Any) -> Any:
    """vLLM's config of a checkpoint of 2 layers with 4 KV heads; `changes` are of its parts, by their names."""
    layers = [{"blocks": [[1, 3]], "sink": 4, "recent": 8}] * 2
    config = SimpleNamespace(
        kv_surgery={"version": 2, "head_dim": 32, "layers": layers, **(section or {})},
        num_hidden_layers=2,
        num_key_value_heads=4,
        num_attention_heads=8,
        max_position_embeddings=1024,
        architectures=[changes.pop("architecture", "LlamaForCausalLM")],
    )
    if text := changes.pop("text", None):
        config.text_config = SimpleNamespace(**vars(config), **text)
    images = SimpleNamespace(language_model_only=changes.pop("language_model_only", False))
    sizes = ("tensor", "pipeline", "decode_context", "prefill_context")
    parallel = {f"{kind}_parallel_size": 1 for kind in sizes} | {"use_ubatching": False}
    cache = {
        "enable_prefix_caching": True,
        "cache_dtype": "auto",
        "kv_sharing_fast_prefill": False,
        "kv_offloading_size": None,
    }
    parts = {
        "model_config": SimpleNamespace(hf_config=config, multimodal_config=images, dtype=torch.float32),
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
    "uneven budgets": (
        settings({**BUDGETS, "layers": [UNEVEN_BUDGETS] * 2}, parallel={"tensor_parallel_size": 2}),
        "without --tp-uneven",
    ),
    "budgets that hold": (
        settings({**BUDGETS, "selection": {**SELECTION, "hold": 4}}),
        "hold after the prompt: .* convert without .* use transformers",
    ),
    "budgets smaller than sinks": (
        settings({**BUDGETS, "quantization": asdict(Quantization(8, sink=9))}),
        "first 9 tokens .* larger .budgeted.window. or a smaller --kv-sink",
    ),
    "budgets beside streaming heads": (
        settings({**BUDGETS, "layers": [*BUDGETS["layers"][:1], {"blocks": [[2, 2]], "sink": 4, "recent": 8}]}),
        "no streaming heads beside budgeted ones",
    ),
    "budgets beside windows": (
        settings({**BUDGETS, "layers": [*BUDGETS["layers"][:1], NATIVE]}),
        "no sliding window of the model",
    ),
    "budgets and n-grams": (
        settings(BUDGETS, speculative_config=SimpleNamespace(method="ngram")),
        "speculative decoding .* leave it out",
    ),
    "budgets without the hybrid manager": (
        settings(BUDGETS, scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True)),
        "leave out --disable-hybrid-kv-cache-manager",
    ),
    "connector": (settings(kv_transfer_config=object()), "KV connectors"),
    "offloading": (settings(cache={"kv_offloading_size": 1.0}), "KV offloading"),
    "eagle": (settings(speculative_config=SimpleNamespace(method="eagle")), "eagle needs a drafter, .* use ngram"),
    "suffix": (settings(speculative_config=SimpleNamespace(method="suffix")), "suffix has not been tested; use ngram"),
    "context": (settings(parallel={"decode_context_parallel_size": 2}), "context parallelism"),
    "pipeline": (settings(parallel={"pipeline_parallel_size": 2}), "pipeline parallelism"),
    "micro-batches": (settings(parallel={"use_ubatching": True}), "leave out --enable-dbo and --ubatch-size"),
    "fp8": (settings(cache={"cache_dtype": "fp8"}), "fp8 KV cache .* leave out --kv-cache-dtype"),
    "int4": (settings(cache={"cache_dtype": "int4_per_token_head"}), "int4_per_token_head KV cache"),
    "fast prefill": (
        settings(cache={"kv_sharing_fast_prefill": True}),
        "fast-prefill has not been tested; leave it out",
    ),
    "processes": (settings(parallel={"tensor_parallel_size": 2}), "convert with --tp 2"),
    "more processes than heads": (
        settings({"layers": [IN_BLOCKS] * 2}, parallel={"tensor_parallel_size": 8}),
        "the 4 KV heads of a layer do not divide over 8 processes, .* use --tensor-parallel-size 1 or 2",
    ),
    "uneven": (
        settings(
            {"layers": [{"blocks": [[2, 0], [0, 2]], "sink": 4, "recent": 8}] * 2},
            parallel={"tensor_parallel_size": 2},
        ),
        "without --tp-uneven",
    ),
    "learned sinks": (
        settings({"layers": [IN_BLOCKS] * 2}, architecture="GptOssForCausalLM"),
        "use --tensor-parallel-size 2",
    ),
    "bidirectional images": (settings(text=BIDIRECTIONAL), "in both directions .* --language-model-only"),
    "version": (settings({"version": 99}), "version 99 is unknown"),
}


@pytest.fixture(autouse=True)
def _plugin() -> None:
    load_general_plugins()  # once in a process


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged as a warning."""
    found = []
    monkeypatch.setattr(limits.logger, "warning", lambda line, *values: found.append(line % values))
    return found


def start(config: Any) -> None:
    """What vLLM does first with the config of a user's command."""
    limits.config_class(VerifyAndUpdateConfig).verify_and_update_config(config)


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_to_do_before_anything_is_started(case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(ServingError, match=message) as refusal:
        start(config)
    assert "\n" not in str(refusal.value)
    assert not isinstance(refusal.value, ValueError)  # which vLLM would print in several lines


WITH_SETTINGS = {
    "connector": ({"kv_offloading_size": 1.0}, "KV offloading"),
    "processes": ({"tensor_parallel_size": 2}, "convert with --tp 2"),
    "dtype": ({"kv_cache_dtype": "fp8"}, "leave out --kv-cache-dtype"),
    "scales": ({}, "remove kv_cache_scheme from quantization_config"),
}


@pytest.mark.parametrize("case", WITH_SETTINGS)
def test_vllms_own_config_passes_refusals_on(case: str, tmp_path: Path) -> None:
    options, message = WITH_SETTINGS[case]
    folder = converted("llama", tmp_path).folder
    if case == "scales":
        config = json.loads((folder / "config.json").read_text())
        scheme = {"num_bits": 8, "type": "float"}
        groups = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": groups}))
    with pytest.raises(ServingError, match=message), engine(folder, **options):
        pass


def move_to(kind: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's platform be another one."""
    platform = SimpleNamespace(
        is_cpu=lambda: kind == "cpu",
        is_cuda=lambda: kind == "cuda",
        has_device_capability=lambda least: capability >= least,
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", platform)
    monkeypatch.setattr(limits, "current_platform", platform)


@pytest.mark.parametrize("dtype", ["fp8", "int4_per_token_head", "nvfp4"])
def test_no_cache_is_quantized_for_streaming_heads_on_a_gpu(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    with pytest.raises(ServingError, match=f"{dtype} KV cache"):
        start(settings(cache={"cache_dtype": dtype}))
    full = {"layers": [{"blocks": [[4, 0]], "sink": 4, "recent": 8}] * 2}
    start(settings(full, cache={"cache_dtype": dtype}))


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "expected"),
    [
        ("cuda", 90, torch.bfloat16, True),
        ("cuda", 80, torch.float16, True),
        ("cuda", 75, torch.float16, False),
        ("cuda", 90, torch.float32, False),
        ("rocm", 90, torch.bfloat16, False),
        ("cpu", 0, torch.float32, True),
    ],
)
def test_where_pages_hold_codes(
    kind: str, capability: int, dtype: torch.dtype, expected: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    move_to(kind, capability, monkeypatch)
    config = settings({"quantization": asdict(Quantization(4))})
    config.model_config.dtype, config.model_config.is_hybrid = dtype, False
    layout = servable_layout(config.model_config.hf_config)
    assert in_pages(layout, config) == expected
    start(config)
    assert any("have not run on a GPU" in line for line in lines) == (expected and kind != "cpu")
    config.cache_config.cache_dtype = "fp8"
    assert not in_pages(layout, config)


@pytest.mark.parametrize(("budgets", "dtype"), [(True, "bfloat16"), (False, "float16")])
def test_where_new_tokens_are_copied_the_cache_has_the_models_dtype(budgets: bool, dtype: str) -> None:
    with pytest.raises(ServingError, match=f"{dtype} KV cache .* leave out --kv-cache-dtype"):
        start(settings(BUDGETS if budgets else {}, cache={"cache_dtype": dtype}))
    start(settings(BUDGETS if budgets else {}, cache={"cache_dtype": "float32"}))


def test_budgeted_heads_are_served_on_a_gpu_that_has_kernels(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = {**BUDGETS, "quantization": asdict(Quantization(8))}
    for section in (BUDGETS, tiles):
        config = settings(section)
        config.model_config.is_hybrid = False
        for capability, dtype in ((90, torch.float32), (75, torch.float16)):
            config.model_config.dtype = dtype
            move_to("cuda", capability, monkeypatch)
            with pytest.raises(ServingError, match=r"a kernel in 16 bit on NVIDIA's .* use transformers"):
                start(config)
        move_to("cuda", 80, monkeypatch)
        lines.clear()
        start(config)
        kind = "quantized caches" if section == tiles else "budgeted heads"
        assert any(f"read {kind} in vLLM's pages have not run on a GPU" in line for line in lines)
        assert not any("ignores the quantized cache" in line for line in lines)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("section", [{}, BUDGETS], ids=["streaming", "budgets"])
def test_the_prefix_cache_is_on_or_off_as_asked_for(section: dict[str, Any], cached: bool) -> None:
    config = settings(section, cache={"enable_prefix_caching": cached})
    start(config)
    assert config.cache_config.enable_prefix_caching == cached


def unused(*args: Any, **options: Any) -> Any:
    """What computes no request."""
    raise AssertionError("a request was let in")


REQUESTS = {
    "beams of a server": (BeamSearchOnlineMixin, "beam_search", "engine_client", "ask for samples"),
    "beams of a process": (BeamSearchOfflineMixin, "beam_search", "llm_engine", "ask for samples"),
    "prompts in parts": (AsyncLLM, "_add_streaming_input_request", None, "send the whole prompt"),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_requests_that_would_select_again_are_refused_for_budgets_only(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, part, message = REQUESTS[kind]
    monkeypatch.setattr(owner, name, unused)
    for section, error in ((BUDGETS, VLLMValidationError), ({}, AssertionError)):
        config = settings(section)
        start(config)
        engine = SimpleNamespace(vllm_config=config)
        asked = engine if part is None else SimpleNamespace(**{part: engine})
        with pytest.raises(error, match=message if section else "let in") as refusal:
            getattr(owner, name)(asked, prompt=[5])
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *DENSE])
def test_what_is_not_converted_is_left_to_vllm(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = MODELS_CONFIG_MAP[architecture]
    (base,) = checked.__bases__
    seen = []
    monkeypatch.setattr(base, "verify_and_update_config", staticmethod(seen.append))
    plain = settings(cache={"cache_dtype": "fp8"}, architecture=architecture)
    del plain.model_config.hf_config.kv_surgery
    checked.verify_and_update_config(plain)
    assert seen == [plain]
    assert checked.verify_and_update_model_config == base.verify_and_update_model_config


def test_processes_may_have_budgets_of_their_own() -> None:
    layer = {"blocks": [[1, 1], [1, 1]], "budgets": [4, 9]}
    parallel = {"tensor_parallel_size": 2}
    layout = checked_layout(settings({**BUDGETS, "layers": [layer] * 2}, parallel=parallel))
    assert [layer.budgets for layer in layout.layers] == [(4, 9)] * 2


def test_text_is_served_where_images_are_refused() -> None:
    assert checked_layout(settings(text=BIDIRECTIONAL, language_model_only=True))


def test_learned_sinks_are_served_where_full_heads_lie_together() -> None:
    from kvsurgery.vllm.split import learned_sinks

    stock: Any = SimpleNamespace(impl=SimpleNamespace(sinks=torch.arange(8.0)), num_heads=8, num_kv_heads=4)
    full, streaming = learned_sinks(stock, LayerLayout(((1, 3),), 4, 8))
    stock.impl.sinks += 1  # weights load later
    assert (full["sinks"].tolist(), streaming["sinks"].tolist()) == ([1, 2], [3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize(
    ("section", "word"),
    [({"quantization": TILES}, "quantized cache"), ({"reform": {}}, "REFORM"), (BUDGETS, "beams")],
)
def test_what_is_left_out_is_said_once_in_the_words_of_convert(
    section: dict[str, Any], word: str, lines: list[str]
) -> None:
    config = settings(section)
    start(config)
    (line,) = serving_limits(vars(config.model_config.hf_config))
    assert lines == [f"kvsurgery: {line}"]
    assert word in line


def test_adapters_are_served_with_a_warning(lines: list[str]) -> None:
    start(settings(lora_config=object()))
    assert len(lines) == 1
    assert "convert --adapter" in lines[0]


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
