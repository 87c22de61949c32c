"""Heads whose older tokens lie in quantized tiles, in vLLM's pages: the tokens are those of the emitted model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvsurgery.vllm.codes import CodesAttention
from tests.vllm.serving import (
    Generated,
    assert_equal,
    cached_tokens,
    converted,
    engine,
    generate,
    preemptions,
    prompts,
    reference,
)

# a state on the border of two codes may get either, as sums of another order differ in their last bits
TOLERANCE = 3e-2
# the emitted model reads codes where it decodes; prompts within a tile are none
SHORT = (5, 45, 100)
NEW = 260
CACHES: dict[str, dict[str, Any]] = {
    "kivi-4": {"kv_bits": 4, "sparsity": 0.0},
    "streaming-2": {"kv_bits": 2, "sparsity": 0.5, "kv_residual": 32},
    "per-token-8": {"kv_bits": 8, "sparsity": 0.0, "kv_scheme": "per-token", "kv_residual": 0, "kv_sink": 0},
    "groups-3": {"kv_bits": 3, "sparsity": 0.5, "kv_group_size": 32, "kv_residual": 0, "kv_rotate": "both"},
}


def by_token(model: torch.nn.Module, row: list[int], new: int) -> Generated:
    """What a model generates greedily that reads a prompt token by token, thus from codes."""
    tokens, likelihoods, cache = [*row], [], None
    with torch.inference_mode():
        for place in range(len(row) + new - 1):
            step = model(torch.tensor([[tokens[place]]]), past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            if place >= len(row) - 1:
                likeliest = step.logits[0, -1].float().log_softmax(-1).topk(4)
                tokens.append(int(likeliest.indices[0]))
                likelihoods.append(dict(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)))
    return [(tokens[len(row) :], likelihoods)]


def codes(llm: Any) -> list[CodesAttention]:
    """The attentions of an engine over tiles."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if isinstance(layer, CodesAttention)]


@pytest.mark.parametrize("kind", CACHES)
def test_tokens_are_those_of_the_emitted_model(kind: str, tmp_path: Path) -> None:
    checkpoint = converted("llama", tmp_path, **CACHES[kind])
    rows = prompts(lengths=SHORT)[:3]
    (long,) = prompts(lengths=(430,))[:1]
    with engine(checkpoint.folder) as llm:
        assert all(layer.kv_cache.dtype == torch.uint8 for layer in codes(llm))
        assert codes(llm)
        assert_equal(generate(llm, rows, NEW), reference(checkpoint.model, rows, NEW), TOLERANCE)
        assert_equal(generate(llm, [long], 30), by_token(checkpoint.model, long, 30), TOLERANCE)
        quantized = generate(llm, [long], 8)
    with torch.inference_mode():
        exact = checkpoint.model(torch.tensor([long])).logits[0, -1].float().log_softmax(-1)
    differences = [abs(exact[token].item() - found) for token, found in quantized[0][1][0].items()]
    print(kind, max(differences))


def test_tokens_do_not_depend_on_chunks_hits_preemption_or_company(tmp_path: Path) -> None:
    checkpoint = converted("llama", tmp_path, **CACHES["streaming-2"])
    rows = prompts(lengths=(200, 260, 300, 380))
    with engine(checkpoint.folder, enable_prefix_caching=False) as llm:
        alone = [generate(llm, [row], 100)[0] for row in rows]
    with engine(checkpoint.folder, max_num_batched_tokens=96, num_gpu_blocks_override=90) as llm:
        for _ in range(2):
            assert_equal(generate(llm, rows, 100), alone, TOLERANCE)
        print(cached_tokens(llm), preemptions(llm))
        assert cached_tokens(llm) > 500
        assert preemptions(llm) > 0
