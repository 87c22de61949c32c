"""One tiny stock model per supported family, with random weights: the matrix that every behavior is tested over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from kvsurgery.checkpoint.family import load_family

SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM = {"attention_bias": True, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
DEEPSEEK = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
GRANITE = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0}
INTERLEAVED = ["sliding_attention", "full_attention"] * 2
CONVOLUTIONS = ["conv"] * 2 + ["full_attention"] * 2
HYBRID = {
    "layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
GEMMA_4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "layer_types": INTERLEAVED,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 101,
    "tie_word_embeddings": True,
}
# positions of time, height and width
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
# queries have a factor from position 16 on
LLAMA_4 = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
}

# family -> what differs from SMALL
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-tied-mha": {"model_type": "llama", "num_key_value_heads": 8, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "head_dim": 10, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3, "sliding_window": 9},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "phi3": {"model_type": "phi3", "sliding_window": None},
    "olmo2": {"model_type": "olmo2"},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 9, "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 9,
        "layer_types": INTERLEAVED,
        "tie_word_embeddings": True,
    },
    "mixtral": {"model_type": "mixtral", **MIXTRAL},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, **MOE},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16, "attention_out_bias": True},
    "olmo3": {"model_type": "olmo3", "sliding_window": 9, "layer_types": INTERLEAVED},
    "granite": {"model_type": "granite", "attention_multiplier": 0.3, **GRANITE},
    "glm4": {"model_type": "glm4", "head_dim": 16},
    "glm": {"model_type": "glm", "head_dim": 16},
    "arcee": {"model_type": "arcee", "attention_bias": True, "mlp_bias": True},
    "ministral3": {"model_type": "ministral3", "head_dim": 16, "rope_parameters": LLAMA_4},
    "exaone4": {"model_type": "exaone4", "sliding_window": 9, "layer_types": INTERLEAVED},
    "cohere2": {"model_type": "cohere2", "sliding_window": 9, "layer_types": INTERLEAVED, "tie_word_embeddings": True},
    "hunyuan": {"model_type": "hunyuan_v1_dense", "head_dim": 16},
    "apertus": {"model_type": "apertus"},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16, "use_bias": True},
    "qwen2_moe": {"model_type": "qwen2_moe", "num_experts": 4, "shared_expert_intermediate_size": 32, **MOE},
    "glm4_moe": {"model_type": "glm4_moe", "head_dim": 16, "use_qk_norm": True, "n_routed_experts": 4, **GLM, **MOE},
    "gpt_oss": {"model_type": "gpt_oss", "head_dim": 16, "sliding_window": 9, "layer_types": INTERLEAVED, **MIXTRAL},
    # layers without RoPE are the full ones; two chunks and a half in 40 tokens
    "llama4": {
        "model_type": "llama4_text",
        "head_dim": 16,
        "intermediate_size_mlp": 56,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
        "no_rope_layer_interval": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    },
    "gemma": {"model_type": "gemma", "head_dim": 16, "tie_word_embeddings": True},
    "cohere": {"model_type": "cohere", "use_qk_norm": True, "tie_word_embeddings": True},
    "nemotron": {"model_type": "nemotron", "head_dim": 16},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": None},
    "dots1": {"model_type": "dots1", "head_dim": 16, "n_routed_experts": 4, **DEEPSEEK, **GLM, **MOE},
    "solar_open": {"model_type": "solar_open", "head_dim": 16, "n_routed_experts": 4, **DEEPSEEK, **MOE},
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_moe": {"model_type": "hunyuan_v1_moe", "head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "ernie4_5_moe": {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "granitemoe": {"model_type": "granitemoe", "attention_multiplier": 0.3, **GRANITE, **MIXTRAL},
    "phimoe": {"model_type": "phimoe", "attention_bias": True, "lm_head_bias": True, **MIXTRAL},
    "minimax_m2": {"model_type": "minimax_m2", "head_dim": 16, "rotary_dim": 8, **MIXTRAL},
    "exaone_moe": {
        "model_type": "exaone_moe",
        "head_dim": 16,
        "sliding_window": 9,
        "layer_types": INTERLEAVED,
        "num_experts": 4,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        **MOE,
    },
    # the first layer has full attention with RoPE, the third without
    "cohere2_moe": {
        "model_type": "cohere2_moe",
        "head_dim": 16,
        "attention_bias": True,
        "sliding_window": 9,
        "layer_types": [kind + "_attention" for kind in ("full", "sliding", "full", "sliding")],
        "num_experts": 4,
        "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "prefix_dense_intermediate_size": 56,
        "tie_word_embeddings": True,
    },
    "afmoe": {
        "model_type": "afmoe",
        "head_dim": 16,
        "attention_bias": True,
        "sliding_window": 9,
        "layer_types": INTERLEAVED,
        "num_experts": 4,
        "num_shared_experts": 1,
        "mup_enabled": True,
        **MOE,
    },
    "hy_v3": {"model_type": "hy_v3", "head_dim": 16, "attention_bias": True, "num_experts": 4, **MOE},
    "qwen3_next": {
        "model_type": "qwen3_next",
        "head_dim": 16,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        **MOE,
        **HYBRID,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "attention_bias": True,
        "rope_parameters": MROPE,
        **HYBRID,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        "head_dim": 16,
        "rope_parameters": MROPE,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        **MOE,
        **HYBRID,
    },
    "lfm2": {"model_type": "lfm2", "head_dim": 16, "layer_types": CONVOLUTIONS},
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "head_dim": 16,
        "layer_types": CONVOLUTIONS,
        "num_experts": 4,
        "num_dense_layers": 1,
        **MOE,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "layer_types": HYBRID["layer_types"],
        "attention_multiplier": 0.3,
        "shared_intermediate_size": 32,
        "head_dim": 16,
        **GRANITE,
        **MIXTRAL,
        **MAMBA,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "head_dim": 16,
        "mamba_d_ssm": 96,
        "key_multiplier": 0.5,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 1.2,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.7,
        "ssm_multipliers": [0.5, 0.8, 1.2, 0.9, 1.1],
        "mlp_multipliers": [0.9, 1.3],
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.4,
        **MAMBA,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "head_dim": 16,
        "layers_block_type": ["moe", "linear_attention", "full_attention", "full_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 16,
        "time_step_min": 1e-6,  # below this, stock code cuts time steps of several tokens, but not those of single ones
        "mlp_bias": True,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 20,
        **MOE,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        **GEMMA_4,
        "attention_k_eq_v": True,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 4,
    },
    "gemma4-moe": {
        "model_type": "gemma4_text",
        **GEMMA_4,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "gemma4-shared": {
        "model_type": "gemma4_text",
        **GEMMA_4,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "gemma3n": {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3,
        "head_dim": 16,
        "sliding_window": 9,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 101,
        "laurel_rank": 4,
        "altup_num_inputs": 3,
        "activation_sparsity_pattern": [0.5, 0.0] * 3,
        "tie_word_embeddings": True,
    },
}


def available(settings: dict[str, Any]) -> bool:
    """Whether the installed transformers has a family, and runs its emitted code."""
    name = settings["model_type"]
    oldest = load_family(name).modeling.oldest or 4
    return name in CONFIG_MAPPING_NAMES and oldest <= int(transformers.__version__.split(".")[0])


FAMILIES = {name: settings for name, settings in FAMILIES.items() if available(settings)}

# text models that exist only inside models that read images
INSIDE: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"model_type": "qwen2_vl_text", "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 1]}},
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl_text",
        "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 1]},
        "use_sliding_window": True,
        "max_window_layers": 3,
        "sliding_window": 9,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl_text",
        "head_dim": 16,
        "attention_bias": True,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe_text",
        "head_dim": 16,
        "num_experts": 4,
        "decoder_sparse_step": 2,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
    },
    "glm4v": {"model_type": "glm4v_text", "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 1]}},
    "glm4v_moe": {
        "model_type": "glm4v_moe_text",
        "head_dim": 16,
        "n_routed_experts": 4,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},  # RoPE turns half of a head
        "n_shared_experts": 1,
        **GLM,
        **MOE,
    },
}

# models that read images, 8 pixels wide and 12 or 16 high: family of the text model, and what lies beside it
IMAGE, START = 100, 99  # tokens of an image, and before it
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": START}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
MISTRAL_3 = {
    "model_type": "mistral3",
    "vision_config": {**TOWER, "model_type": "pixtral", "patch_size": 4},
    "spatial_merge_size": 1,
}
QWEN = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 1,
    "spatial_merge_size": 1,
    "num_position_embeddings": 16,
    "out_hidden_size": None,  # that of the text model
}
GLM_4V = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "image_size": 8,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "intermediate_size": 24,
    "out_hidden_size": None,  # that of the text model
}
GLM_TOKENS = {"image_token_id": IMAGE, "image_start_token_id": START, "image_end_token_id": START - 1}
# what its layers see is added in layers of the text model
DEEPSTACK = {**QWEN, "deepstack_visual_indexes": [0, 1]}
QWEN_2 = {
    "depth": 2,
    "embed_dim": 16,
    "hidden_size": None,  # that of the text model
    "num_heads": 2,
    "patch_size": 2,
    "temporal_patch_size": 1,
    "spatial_merge_size": 2,  # vLLM knows no other
}
LLAMA_4_TOWER = {
    **{**TOWER, "intermediate_size": 16},  # as wide as what the pixel shuffle makes
    "patch_size": 4,
    "pixel_shuffle_ratio": 1.0,
    "projector_input_dim": 24,
    "projector_output_dim": 24,
    "vision_output_dim": 24,
}
GEMMA_4_TOWER = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 48,
    "default_output_length": 70,  # as published; vLLM reads it
}
WITH_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "pixtral": (
        "mistral",
        {
            "vision_config": {**TOWER, "model_type": "pixtral", "patch_size": 4},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    "mistral3": ("mistral", MISTRAL_3),
    "mistral3-ministral": ("ministral3", MISTRAL_3),
    "llava": ("llama-bias", {"vision_config": {**TOWER, "model_type": "clip_vision_model", "patch_size": 4}}),
    "llava-qwen2-tied": (
        "qwen2",
        {
            "vision_config": {**TOWER, "model_type": "siglip_vision_model", "patch_size": 4},
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5-images": (
        "qwen3_5",
        {"model_type": "qwen3_5", **TOKENS, "vision_config": {**QWEN, "model_type": "qwen3_5_vision"}},
    ),
    "qwen3_5_moe-images": (
        "qwen3_5_moe",
        {"model_type": "qwen3_5_moe", **TOKENS, "vision_config": {**QWEN, "model_type": "qwen3_5_moe_vision"}},
    ),
    "qwen2_vl-images": (
        "qwen2_vl",
        {"model_type": "qwen2_vl", **TOKENS, "vision_config": QWEN_2},
    ),
    "qwen2_5_vl-images": (
        "qwen2_5_vl",
        {
            "model_type": "qwen2_5_vl",
            **TOKENS,
            "vision_config": {**QWEN, "window_size": 8, "fullatt_block_indexes": [1]},
        },
    ),
    "qwen3_vl-images": (
        "qwen3_vl",
        {"model_type": "qwen3_vl", **TOKENS, "vision_config": DEEPSTACK},
    ),
    "qwen3_vl_moe-images": (
        "qwen3_vl_moe",
        {"model_type": "qwen3_vl_moe", **TOKENS, "vision_config": DEEPSTACK},
    ),
    "glm4v-images": ("glm4v", {"model_type": "glm4v", **GLM_TOKENS, "vision_config": GLM_4V}),
    "glm46v-images": (
        "glm4v",
        {
            "model_type": "glm46v",
            **GLM_TOKENS,
            "vision_config": {**GLM_4V, "model_type": "glm4v_vision", "attention_bias": True},
        },
    ),
    "glm4v_moe-images": ("glm4v_moe", {"model_type": "glm4v_moe", **GLM_TOKENS, "vision_config": GLM_4V}),
    # without `token_type_ids`, tokens of an image do not see later ones
    "gemma3-images": (
        "gemma3",
        {
            "model_type": "gemma3",
            "vision_config": {**TOWER, "model_type": "siglip_vision_model", "patch_size": 4, "vision_use_head": False},
            "mm_tokens_per_image": 16,
            "tie_word_embeddings": True,
            "text_config": {"sliding_window": 20},  # longer than an image, as published
        },
    ),
    "llama4-images": ("llama4", {"model_type": "llama4", "vision_config": LLAMA_4_TOWER}),
    "gemma4-images": (
        "gemma4",
        {
            "model_type": "gemma4",
            "image_token_id": IMAGE,
            "boi_token_id": IMAGE - 1,
            "eoi_token_id": IMAGE - 2,
            "vision_config": GEMMA_4_TOWER,
            "audio_config": None,
            "tie_word_embeddings": True,
        },
    ),
}
WITH_IMAGES["gemma4-shared-images"] = ("gemma4-shared", WITH_IMAGES["gemma4-images"][1])
BOTH_WAYS = {"text_config": {"use_bidirectional_attention": "vision"}}
WITH_IMAGES["gemma4-vision-images"] = ("gemma4", {**WITH_IMAGES["gemma4-images"][1], **BOTH_WAYS})
WITH_IMAGES = {
    name: (text, beside)
    for name, (text, beside) in WITH_IMAGES.items()
    if text in FAMILIES or (text in INSIDE and available(beside))
}
EVERY = [*FAMILIES, *WITH_IMAGES]
REFORM = [name for name in FAMILIES if not load_family(FAMILIES[name]["model_type"]).no_reform]  # can read by REFORM


# whose last layers share the KV cache of earlier ones
SHARED_CACHE = [name for name in FAMILIES if FAMILIES[name].get("num_kv_shared_layers")]
# whose heads are measured
MEASURED = [*FAMILIES, *(name for name, (text, _) in WITH_IMAGES.items() if text in INSIDE)]
# whose layers with full attention have heads of another number or size
LAYER_HEADS = [
    name for name in FAMILIES if load_family(FAMILIES[name]["model_type"]).full_attention and name not in SHARED_CACHE
]
# whose draft cannot be taken back: layers have one state of all tokens
WITH_STATES = [name for name in FAMILIES if load_family(FAMILIES[name]["model_type"]).states]
# of which every layer has it beside its KV cache, and some layers in place of one
STATES_BESIDE = [name for name in WITH_STATES if load_family(FAMILIES[name]["model_type"]).states.beside]
STATES_ALONE = [name for name in WITH_STATES if name not in STATES_BESIDE]

# one for each way to call the emitted attention and cache: what depends on these alone is not tested on every family.
CACHE_PATHS = {
    "llama": "full attention",
    "llama-tied-mha": "one query head for each KV head",
    "qwen2": "last layers slide",
    "gemma2": "soft caps",
    "gemma3": "a RoPE for each kind of layers",
    "olmo3": "scaled RoPE in full layers alone",
    "smollm3": "layers without RoPE",
    "cohere2": "RoPE in sliding layers alone",
    "ministral3": "queries with a factor by position",
    "gpt_oss": "learned sinks",
    "llama4": "chunked attention",
    "qwen3_next": "linear attention",
    "qwen3_5": "positions of three axes",
    "lfm2": "convolutions",
    "granitemoehybrid": "state space layers",
    "falcon_h1": "a state space beside the attention of each layer",
    "nemotron_h": "attention, a state space or experts alone in a layer",
    "gemma4": "keys are values, heads by layer type",
    "gemma4-moe": "head sizes by layer type",
    "gemma4-shared": "shared caches",
    "gemma3n": "shared caches, several streams",
}
CACHE_PATHS = {name: path for name, path in CACHE_PATHS.items() if name in FAMILIES}


def rounding(name: str) -> float:
    """How far logits of a family may differ between chunks.

    Stock linear attention rounds its states elsewhere. Rounding to float32 alone moves the logits of the tiny Gemma 4
    with shared caches by about 1e-5, on some processors by more.
    """
    return 1e-4 if name in (*WITH_STATES, "gemma4-shared") else 1e-5


def config_of(name: str, **overrides: Any) -> Any:
    """The config of a tiny model; `overrides` are of its text model."""
    text, beside = WITH_IMAGES.get(name, (name, None))
    if beside is None:
        settings = {**SMALL, **FAMILIES[text], **overrides}
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    settings = {**SMALL, **(FAMILIES | INSIDE)[text], **beside.get("text_config", {}), **overrides}
    vision = beside["vision_config"].items()
    vision = {key: settings["hidden_size"] if value is None else value for key, value in vision}
    tied = overrides.get("tie_word_embeddings", beside.get("tie_word_embeddings", False))
    settings["tie_word_embeddings"] = tied
    beside = {"model_type": "llava", **beside, "vision_config": vision, "tie_word_embeddings": tied}
    beside["text_config"] = settings
    return AutoConfig.for_model(beside.pop("model_type"), image_token_index=IMAGE, **beside)


def stock(name: str, seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """A random stock model of a family, in evaluation mode, with biases and norms that are not trivial."""
    if name == "llama4-images" and transformers.__version__ == "5.24.0":
        pytest.skip("the stock Llama 4 of this version reads an output that its text model does not have")
    auto = AutoModelForImageTextToText if name in WITH_IMAGES else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = auto.from_config(config_of(name, **overrides)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # large enough that attention is far from uniform and every bias counts
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
    return model


def attention_of(layer: torch.nn.Module) -> torch.nn.Module | None:
    """The attention of a stock decoder layer; None if it has none."""
    mixer = getattr(layer, "mixer", None)
    return getattr(layer, "self_attn", mixer if hasattr(mixer, "q_proj") else None)


def make(name: str, folder: Path, *, shard: str | int = "5GB", seed: int = 0, **overrides: Any) -> Path:
    """Save a random stock checkpoint of a family; `shard` is the largest shard, as `save_pretrained` takes it."""
    stock(name, seed, **overrides).save_pretrained(folder, max_shard_size=shard)
    return folder


def with_published_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of a Qwen3-VL-MoE whose experts have their input first, as published; transformers 5 may write their
    output first."""
    hidden = weights["lm_head.weight"].shape[1]
    input_first = {"gate_up_proj": 1, "down_proj": 2}  # the axis of the hidden size
    return {
        name: tensor.transpose(1, 2).contiguous()
        if ".experts." in name and tensor.shape[input_first[name.rpartition(".")[2]]] != hidden
        else tensor
        for name, tensor in weights.items()
    }


def tokens(batch: int, length: int, seed: int = 0, vocabulary: int = 101) -> torch.Tensor:
    """Random token ids [batch, length] without special tokens."""
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def largest(difference: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference, relative to max(1, the largest reference value)."""
    return (difference.abs().max() / reference.abs().max().clamp(min=1)).item()
