"""Every family that the plugin serves, served in chunks of 48 tokens, and once more from the prefix cache."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvsurgery.checkpoint.family import load_family, supported
from kvsurgery.vllm import ARCHITECTURES, DENSE
from tests.helpers.families import FAMILIES, LLAMA_4, MROPE, WITH_STATES
from tests.vllm.serving import (
    BLOCK,
    GEMMA_2,
    UNTIED,
    assert_equal,
    cached_tokens,
    converted,
    engine,
    fill_caches,
    generate,
    prompts,
    reference,
)
from tests.vllm.substitutes import substitute

# a layer of streaming heads, one of full heads, and one of both, between two with linear attention
WITH_LINEAR_LAYERS = {
    "num_hidden_layers": 5,
    "layer_types": [kind + "_attention" for kind in ("full", "linear", "full", "full", "linear")],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
# as many frequencies as larger heads have
WITH_MROPE = {"rope_parameters": {**MROPE, "mrope_section": [4, 2, 2]}}
GEMMA_4 = {**UNTIED, "global_head_dim": 64}
MODELS = {
    **dict.fromkeys(WITH_STATES, WITH_LINEAR_LAYERS),
    # vLLM leaves out biases of the attention
    "qwen3_5": {**WITH_LINEAR_LAYERS, **WITH_MROPE, "attention_bias": False},
    "qwen3_5_moe": {**WITH_LINEAR_LAYERS, **WITH_MROPE},
    "cohere2": {"sliding_window": 512},  # which nothing reaches: vLLM's own has a token more
    "qwen2": {"use_sliding_window": False},  # vLLM itself refuses one of which only some layers have windows
    "ernie4_5": {"use_bias": False},  # vLLM has no bias of the output projection
    "gemma2": GEMMA_2,
    "gemma3": UNTIED,
    **dict.fromkeys(("gemma4", "gemma4-moe", "gemma4-shared"), GEMMA_4),
    "gpt_oss": {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "llama4": {"attention_chunk_size": 64},  # whole blocks
    # as published; the config class of transformers has no such fields
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
    # transformers scales queries from this position on, vLLM does not
    "ministral3": {"rope_parameters": {**LLAMA_4, "original_max_position_embeddings": 2048}},
}
TOLERANCES = {"apertus": 1e-2}  # vLLM rounds the parameters of its activation to bfloat16


def architectures(model_type: str) -> set[str]:
    """The classes of a family that generate."""
    return {name for name in load_family(model_type).classes.values() if name.endswith(("CausalLM", "Generation"))}


@pytest.mark.parametrize(
    "family", [name for name, model in FAMILIES.items() if architectures(model["model_type"]) <= {*ARCHITECTURES}]
)
def test_tokens_are_those_of_the_emitted_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    substitute(monkeypatch)
    checkpoint = converted(family, tmp_path, model=MODELS.get(family))
    rows, tolerance = prompts(), TOLERANCES.get(family, 1e-3)
    wanted = reference(checkpoint.model, rows)
    # tokens that are not certain, so that attention counts
    assert all(min(max(place.values()) for place in places) < -0.01 for _, places in wanted)
    with engine(checkpoint.folder, max_num_batched_tokens=48, long_prefill_token_threshold=48) as llm:
        if family in WITH_STATES:  # nothing reads what a block held before
            fill_caches(llm, float("nan"))
        assert_equal(generate(llm, rows), wanted, tolerance)
        before = cached_tokens(llm)
        assert_equal(generate(llm, rows), wanted, tolerance)
        assert cached_tokens(llm) - before >= sum((len(row) - 1) // BLOCK * BLOCK for row in rows) - 2 * BLOCK


def test_every_architecture_of_the_converter_is_registered() -> None:
    assert not {*ARCHITECTURES} & {*DENSE}
    assert {*ARCHITECTURES, *DENSE} == set().union(*(architectures(name) for name in supported()))


def test_an_architecture_that_is_not_split_is_served_as_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.kvsurgery"), "warning", lambda line, *values, **_: lines.append(line % values)
    )
    # vLLM takes the last two layers with a cache of their own for a sliding one and a full one, as in published models
    checkpoint, rows = converted("gemma3n", tmp_path, model={"num_kv_shared_layers": 2}), prompts()
    with engine(tmp_path / "stock") as llm:
        wanted = generate(llm, rows)
    assert lines == []
    with engine(checkpoint.folder) as llm:
        assert_equal(generate(llm, rows), wanted)
    assert len(lines) == 1
    assert "does not know Gemma3nForCausalLM" in lines[0]
