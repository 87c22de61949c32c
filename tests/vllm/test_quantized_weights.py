"""vLLM serves converted checkpoints whose weights are quantized, with the original's tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm import _custom_ops  # noqa: F401  # loads the operators

from tests.helpers.families import make
from tests.helpers.quantized import quantize
from tests.helpers.surgery import convert_folder, random_profile
from tests.vllm.serving import LARGE_HEADS, engine, generate, prompts

ROWS = prompts(lengths=(5, 45))
SCORES = np.float32([[0, 1, 0, 1], [1, 0, 0, 1], [0, 0, 1, 1], [1, 0, 1, 0]])  # so that heads move in every layer


# layouts that vLLM's CPU build computes with, and the operator that it has for them on some processors only
LAYOUTS = {"compressed-int8": "create_onednn_scaled_mm_handler", "compressed-int4": "cpu_gemm_wna16"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_original_and_its_conversion_answer_alike(tmp_path: Path, name: str) -> None:
    """Windows are longer than all that is read."""
    if not hasattr(torch.ops._C, LAYOUTS[name]):
        pytest.skip(f"vLLM has no {LAYOUTS[name]} for this processor")
    source = make("llama", tmp_path / "source", **LARGE_HEADS | {"intermediate_size": 256, "num_attention_heads": 16})
    quantize(source, name)
    profile = replace(random_profile(source), scores=SCORES)
    converted = convert_folder(source, tmp_path / "out", profile, sparsity=0.5, sink=20, recent=200)
    answers = []
    for folder in (source, converted.folder):
        with engine(folder, dtype="bfloat16") as llm:
            answers.append(generate(llm, ROWS, new=8))
    for (tokens, steps), (other_tokens, other_steps) in zip(*answers, strict=True):
        assert tokens == other_tokens
        for token, step, other in zip(tokens, steps, other_steps, strict=True):
            assert step[token] == pytest.approx(other[token], abs=0.1)
