"""How the tiny models that vLLM serves differ from those of the other tests, by family."""

from __future__ import annotations

from typing import Any

from tests.helpers.families import LLAMA_4, MROPE, WITH_STATES

# a tiny Gemma with tied embeddings repeats its last token with a probability of almost 1, whatever attention reads
UNTIED = {"tie_word_embeddings": False}
GEMMA_2 = {"final_logit_softcapping": 4.0}  # vLLM ties its embeddings always

# a layer of streaming heads, one of full heads, and one of both, between two with linear attention
WITH_LINEAR_LAYERS = {
    "num_hidden_layers": 5,
    "layer_types": [kind + "_attention" for kind in ("full", "linear", "full", "full", "linear")],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
# as many frequencies as larger heads have, and interleaved as published; vLLM asks for that, transformers does not
WITH_MROPE = {"rope_parameters": {**MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}}
SECTIONS = {"rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4]}}
INTERLEAVED_SECTIONS = {"rope_scaling": {**SECTIONS["rope_scaling"], "mrope_interleaved": True}}
GEMMA_4 = {**UNTIED, "global_head_dim": 64}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64}
MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(WITH_STATES, WITH_LINEAR_LAYERS),
    # vLLM leaves out biases of the attention
    "qwen3_5": {**WITH_LINEAR_LAYERS, **WITH_MROPE, "attention_bias": False},
    "qwen3_5_moe": {**WITH_LINEAR_LAYERS, **WITH_MROPE},
    "qwen2_vl": SECTIONS,
    "qwen2_5_vl": {**SECTIONS, "use_sliding_window": False},  # as Qwen2
    # as published; vLLM asks for that, transformers does not
    "qwen3_vl": {**INTERLEAVED_SECTIONS, "attention_bias": False},  # vLLM has no bias of the output projection
    "qwen3_vl_moe": {**INTERLEAVED_SECTIONS, "norm_topk_prob": True},
    "cohere2": {"sliding_window": 512},  # which nothing reaches: vLLM's own has a token more
    "qwen2": {"use_sliding_window": False},  # vLLM itself refuses one of which only some layers have windows
    "ernie4_5": {"use_bias": False},  # vLLM has no bias of the output projection
    "gemma2": GEMMA_2,
    "gemma3": UNTIED,
    **dict.fromkeys(("gemma4", "gemma4-moe", "gemma4-shared"), GEMMA_4),
    "gpt_oss": {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "llama4": {"attention_chunk_size": 64},  # whole blocks
    # as published; the config class of transformers has no such fields
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1, "attention_bias": False},
    "hy_v3": {
        "first_k_dense_replace": 1,
        "expert_hidden_dim": 24,
        "route_norm": True,
        "qk_norm": True,
        "attention_bias": False,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 512},
    # vLLM normalizes groups of Mamba 2 apart, transformers does not
    "granitemoehybrid": {**WITH_LINEAR_LAYERS, **MAMBA, "mamba_n_groups": 1},
    # vLLM's CPU build has no experts without a gate
    "nemotron_h": {
        "num_hidden_layers": 5,
        "layers_block_type": ["full_attention", "linear_attention", "full_attention", "full_attention", "mlp"],
    },
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
    # transformers scales queries from this position on, vLLM does not
    "ministral3": {"rope_parameters": {**LLAMA_4, "original_max_position_embeddings": 2048}},
}
# vLLM's CPU build keeps no states of Mamba 2 for its prefix cache
WITHOUT_PREFIX_CACHE = ("falcon_h1", "granitemoehybrid", "nemotron_h")
TOLERANCES = {"apertus": 1e-2}  # vLLM rounds the parameters of its activation to bfloat16
