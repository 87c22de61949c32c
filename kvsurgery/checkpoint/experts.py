"""The share of a layer's experts that tokens use, from a model's config."""

from __future__ import annotations

from typing import Any

from kvsurgery.templates.kv_layout import setting, text_config

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts")


def expert_share(config: Any, tokens: int = 1) -> float:
    """The largest share of a layer's experts that a number of tokens can use; 1 if the config does not say.

    Args:
        config: a transformers config, or the dict of a config.json.
        tokens: number of tokens that choose experts together.
    """
    text = text_config(config)
    experts = next((count for name in EXPERTS if type(count := setting(text, name)) is int), 0)
    per_token = next((count for name in EXPERTS_PER_TOKEN if type(count := setting(text, name)) is int), 0)
    return min(1.0, tokens * per_token / experts) if experts > 0 and per_token > 0 else 1.0
