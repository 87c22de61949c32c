import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvsurgery.checkpoint.model import Model
from kvsurgery.emit.config import (
    both_rope_spellings,
    converted_config,
    converted_generation_config,
    hub_code_keys,
)
from kvsurgery.errors import CheckpointError
from kvsurgery.profile.head_profile import HeadProfile
from tests.helpers.deciding import decided
from tests.helpers.families import FAMILIES, SMALL

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 4.0}
# family, as transformers 4 spells it, as transformers 5 spells the same
SPELLINGS = {
    "default": ("llama", {"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
    "linear": ("llama", {"rope_theta": 5e5, "rope_scaling": LINEAR}, {"rope_theta": 5e5, **LINEAR}),
    "old key": (
        "llama",
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, **LINEAR},
    ),
    "llama3": ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_theta": 5e5, **LLAMA3}),
    "yarn": ("qwen2", {"rope_theta": 1e6, "rope_scaling": YARN}, {"rope_theta": 1e6, **YARN}),
    "by layer type": (
        "gemma3",
        {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR},
        {
            "full_attention": {"rope_theta": 1e6, **LINEAR},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    ),
    "scaled in full layers": (
        "olmo3",
        # with another theta, transformers 5 reads this spelling differently from transformers 4
        {"rope_theta": 5e5, "rope_scaling": YARN},
        {
            "full_attention": {"rope_theta": 5e5, **YARN},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
}
spellings = pytest.mark.parametrize(("family", "four", "five"), SPELLINGS.values(), ids=SPELLINGS)


def settings(family, **rope):
    return {**SMALL, **FAMILIES[family], **rope}


def convert(config):
    model = Model.of(config)
    shape = model.dimensions
    profile = HeadProfile(np.zeros((shape.layers, shape.kv_heads)), "duo", "kv", "test", shape)
    return converted_config(model, decided(profile, model.windows, sparsity=0, sink=0, recent=1))


def frequencies(config, folder):
    """Every RoPE frequency that the stock model of a config.json computes with."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    found = {name: buffer for name, buffer in model.named_buffers() if "inv_freq" in name and "original" not in name}
    assert found
    return found


@spellings
def test_both_versions_of_transformers_compute_the_same_rope(family, four, five, tmp_path):
    # whatever version this runs on reads the spelling of transformers 4
    expected = frequencies(settings(family, **four), tmp_path / "stock")
    for name, rope in (("four", four), ("five", {"rope_parameters": five})):
        found = frequencies(convert(settings(family, **rope)), tmp_path / name)
        assert found.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(found[key], expected[key])


@spellings
def test_each_spelling_is_made_from_the_other(family, four, five):
    by_type = Model.of(settings(family)).family.rope_by_type
    made = both_rope_spellings({"rope_parameters": five}, by_type)
    assert {key: value for key, value in made.items() if value is not None} == {
        key: {("rope_type" if k == "type" else k): v for k, v in value.items()} if key == "rope_scaling" else value
        for key, value in four.items()
    }
    whole = both_rope_spellings(four, by_type)["rope_parameters"]
    assert whole == five


def test_sections_for_time_height_and_width_stay_in_both_spellings():
    sections = {"rope_type": "default", "mrope_section": [4, 2, 2]}
    four, five = {"rope_theta": 1e6, "rope_scaling": sections}, {**sections, "rope_theta": 1e6}
    assert both_rope_spellings({"rope_parameters": five}) == four
    assert both_rope_spellings(four) == {"rope_parameters": five}
    published = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    assert both_rope_spellings(published) == {"rope_parameters": {**five, "rope_type": "mrope"}}


@pytest.mark.parametrize(
    ("older", "name"),
    [
        ({"rope_scaling": YARN}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_theta": 1e6}, "rope_theta"),
    ],
)
def test_two_spellings_that_differ_are_refused(older, name):
    """As where a page says to add a `rope_scaling` to a config that transformers 5 wrote."""
    for five in ({"rope_theta": 5e5, **LINEAR}, {"full_attention": {"rope_theta": 5e5, **LINEAR}}):
        with pytest.raises(CheckpointError, match=f"{name} and rope_parameters differ.*remove {name}"):
            both_rope_spellings({"rope_parameters": five, **older})


def test_two_spellings_of_the_same_rope_are_taken():
    for _, four, five in SPELLINGS.values():
        assert both_rope_spellings({"rope_parameters": five, **four}) == both_rope_spellings({"rope_parameters": five})
    sections = {"mrope_section": [4, 2, 2]}
    five = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, **sections}}
    assert both_rope_spellings({**five, "rope_scaling": {"type": "mrope", **sections}}) == both_rope_spellings(five)


def test_configs_without_rope_settings_stay_without():
    assert both_rope_spellings({"model_type": "llama"}) == {}


@pytest.mark.parametrize("rope", [{"rope_parameters": {"full_attention": 3}}, {"rope_theta": 1.0, "rope_scaling": [1]}])
def test_malformed_rope_settings_are_refused(rope):
    with pytest.raises(CheckpointError, match="RoPE"):
        both_rope_spellings(rope)


def test_the_rest_of_the_config_stays():
    config = settings("llama", architectures=["LlamaForCausalLM"], auto_map={"AutoModel": "theirs.Theirs"}, custom=[1])
    before = json.dumps(config)
    result = convert(config)
    assert json.dumps(config) == before
    assert {key: result[key] for key in config if key != "auto_map"} == {
        key: value for key, value in config.items() if key != "auto_map"
    }
    assert result["auto_map"] == {
        "AutoModel": "modeling_kvsurgery_llama.LlamaModel",
        "AutoModelForCausalLM": "modeling_kvsurgery_llama.LlamaForCausalLM",
    }
    assert result["kv_surgery"]["layers"] == [{"blocks": [[4, 0]], "sink": 0, "recent": 1}] * 4


REPO = "someone/kernel"
HUB_CODE = {
    "_attn_implementation_internal": REPO,
    "_experts_implementation_internal": "eager",
    "_attn_implementation": f"paged|{REPO}",
    "attn_implementation": {"": "sdpa", "text_config": f"{REPO}@main:attend"},
    "_experts_implementation": REPO,
    "experts_implementation": REPO,
}


@pytest.mark.parametrize("place", [(), ("text_config",), ("vision_config",), ("per_layer_config", "0"), ("parts", 0)])
def test_keys_that_run_code_of_the_hub_are_left_out(place):
    inner = {"text_config": settings("llama"), "vision_config": {"model_type": "clip_vision_model"}}
    plain = {"model_type": "llava", **inner, "per_layer_config": {"0": {}}, "parts": [{}]}
    config = json.loads(json.dumps(plain))
    part = config
    for step in place:
        part = part[step]
    part |= HUB_CODE
    assert convert(config) == convert(plain)
    assert hub_code_keys(config) == tuple(".".join(map(str, (*place, key))) for key in HUB_CODE)
    assert hub_code_keys(plain) == ()


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "experts_implementation"])
def test_implementations_of_transformers_itself_stay(key):
    config = settings("llama", **{key: "eager"})
    assert convert(config)[key] == "eager"
    assert hub_code_keys(config) == ()


def test_what_is_left_out_reaches_no_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(convert(settings("llama", **HUB_CODE))))
    config = AutoConfig.from_pretrained(tmp_path)
    assert REPO not in repr(vars(config))


def test_own_windows_are_native_layers():
    layers = convert(settings("qwen2"))["kv_surgery"]["layers"]
    assert layers[3] == {"blocks": [[0, 4]], "sink": 0, "recent": 9, "native": True}
    assert "native" not in layers[0]


def test_generation_config_loses_its_cache_and_nothing_else():
    plain = b'{"eos_token_id":  [1, 2]}'
    assert converted_generation_config(plain) == plain
    cached = b'{"cache_implementation": "hybrid", "cache_config": {"nbits": 4}, "top_k": 5}'
    assert json.loads(converted_generation_config(cached)) == {"top_k": 5}
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        converted_generation_config(b"{")
