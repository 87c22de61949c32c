"""vLLM serves LoRA adapters that were converted for a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from kvsurgery.conversion.adapter import convert_adapter
from tests.helpers.families import make
from tests.helpers.surgery import convert_folder, random_profile
from tests.vllm.serving import LARGE_HEADS, RECENT, SINK, assert_equal, engine, generate, prompts, reference

RANK = 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
ROWS = prompts()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("lora") / "stock", **LARGE_HEADS)


def adapter_of(original: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Write a random adapter of a checkpoint to a folder; returns the checkpoint's weights with it merged."""
    draw = torch.Generator().manual_seed(0)
    weights = load_file(original / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in list(weights.items()):
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            rows, columns = weight.shape
            first = 0.1 * torch.randn(RANK, columns, generator=draw)
            second = 0.1 * torch.randn(rows, RANK, generator=draw)
            tensors |= {
                f"base_model.model.{module}.lora_{part}.weight": each
                for part, each in {"A": first, "B": second}.items()
            }
            weights[name] = weight + 2 * second @ first
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": [*TARGETS], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return weights


def test_a_converted_adapter_equals_the_merged_model(original: Path, tmp_path: Path) -> None:
    options = {"sink": SINK, "recent": RECENT, "sparsity": 0.5}
    profile = random_profile(original)
    converted = convert_folder(original, tmp_path / "converted", profile, **options)
    merged_weights = adapter_of(original, tmp_path / "adapter")
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_bytes((original / "config.json").read_bytes())
    save_file(merged_weights, merged / "model.safetensors", {"format": "pt"})
    with_adapter = reference(convert_folder(merged, tmp_path / "merged-converted", profile, **options).model, ROWS)
    alone = reference(converted.model, ROWS)
    assert [tokens for tokens, _ in with_adapter] != [tokens for tokens, _ in alone]

    convert_adapter(tmp_path / "adapter", converted.folder, tmp_path / "fitting")
    request = LoRARequest("fitting", 1, str(tmp_path / "fitting"))
    with engine(converted.folder, enable_lora=True, max_lora_rank=RANK) as llm:
        assert_equal(generate(llm, ROWS, lora_request=request), with_adapter)
        assert_equal(generate(llm, ROWS), alone)
