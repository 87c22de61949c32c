"""What measuring would cost: by hand on small models, with the command's own defaults."""

import pytest
from safetensors.numpy import load_file
from transformers import AutoConfig

from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.measure import cost
from kvsurgery.text.needle_sets import read_set
from tests.helpers.families import make


def test_needles_are_those_of_a_shipped_set():
    assert len(read_set("word")) == cost.NEEDLES_IN_SET


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_operations_by_hand(tmp_path, family):
    checkpoint = Checkpoint.open(make(family, tmp_path / family))
    config = AutoConfig.from_pretrained(tmp_path / family)
    weights = 0
    for name, tensor in load_file(tmp_path / family / "model.safetensors").items():
        if tensor.ndim > 1 and not name.endswith(("embed_tokens.weight", "lm_head.weight")):
            share = config.num_experts_per_tok / config.num_experts if ".experts." in name else 1
            weights += int(tensor.size * share)
    attended = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    longest = config.max_position_embeddings
    found = {one.method: one for one in cost.costs(checkpoint)}
    assert list(found) == list(cost.PASSES)
    reform = found["reform"]
    assert (reform.prompts, reform.tokens) == (100, 100 * min(longest, 8192))
    length = min(longest, 8192)
    assert reform.flops == pytest.approx(2 * 100 * (2 * weights * length + attended * length**2 / 2))
    assert found["duo"].prompts == 2000
    assert found["duo"].tokens == pytest.approx(2000 * (min(1000, longest) + min(32_000, longest)) / 2, rel=1e-3)
    assert found["headkv-*"].prompts == 600
    assert reform.weights == checkpoint.size
    assert reform.hours == reform.flops / cost.FLOPS / 3600
