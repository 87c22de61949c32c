"""One tiny stock model per supported family, with random weights: the matrix that every behaviour is tested over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

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
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, **MOE},
}


def stock(name: str, seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """A random stock model of a family, in evaluation mode, with biases and norms that are not trivial."""
    settings = {**SMALL, **FAMILIES[name], **overrides}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # large enough that attention is far from uniform and every bias counts
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
    return model


def make(name: str, folder: Path, *, shard: str | int = "5GB", seed: int = 0, **overrides: Any) -> Path:
    """Save a random stock checkpoint of a family; `shard` is the largest shard, as `save_pretrained` takes it."""
    stock(name, seed, **overrides).save_pretrained(folder, max_shard_size=shard)
    return folder


def tokens(batch: int, length: int, seed: int = 0, vocabulary: int = 101) -> torch.Tensor:
    """Random token ids [batch, length] without special tokens."""
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def largest(difference: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference, relative to max(1, the largest reference value)."""
    return (difference.abs().max() / reference.abs().max().clamp(min=1)).item()
