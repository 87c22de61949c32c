from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from kvsurgery.checkpoint.experts import expert_share


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2}),
        ("glm4_moe", {"n_routed_experts": 8, "num_experts_per_tok": 2}),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}),
    ],
)
def test_names_of_families(model_type: str, names: dict[str, Any]) -> None:
    """In the config of transformers and in its file."""
    config = AutoConfig.for_model(model_type, **names)
    for form in (config, config.to_dict()):
        assert [expert_share(form, tokens) for tokens in (1, 2, 4, 9)] == [0.25, 0.5, 1, 1]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_experts": None},
        {"num_experts": 8},
        {"num_experts": 0, "num_experts_per_tok": 2},
        {"num_experts": "8", "num_experts_per_tok": True},
        {"num_experts": 8, "num_experts_per_tok": -1},
    ],
)
def test_configs_that_do_not_say(config: dict[str, Any]) -> None:
    assert expert_share(config) == expert_share({"text_config": config}) == 1
