"""Modules of stock classes that got a copy of a converted model's config, and with it the name of its attention."""

import copy
import sys

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

from tests.helpers.families import FAMILIES, SMALL, largest, tokens
from tests.templates.test_exactness import LENGTH, left_padded, logits

SAMPLE = [
    name for name in ("llama", "qwen2", "gemma2", "gpt_oss", "llama4", "qwen3_next", "gemma3n") if name in FAMILIES
]
GREEDY = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": [2]}


@pytest.mark.parametrize("family", SAMPLE)
def test_the_original_with_this_config_is_the_original(mixed, family):
    converted, ids = mixed(family), tokens(2, LENGTH)
    model = AutoModelForCausalLM.from_pretrained(
        converted.source, config=copy.deepcopy(converted.model.config), dtype=torch.float32
    ).eval()
    assert type(model) is type(converted.stock)
    ids, mask, positions = left_padded(ids, [LENGTH, 30])
    padded = {"attention_mask": mask, "position_ids": positions}
    for options in (padded, {}, {"use_cache": False}):
        expected = logits(converted.stock, ids, **options)
        assert largest((logits(model, ids, **options) - expected)[mask.bool()], expected) <= 1e-5
    options = {**GREEDY, "attention_mask": mask}
    assert model.generate(ids, **options).equal(converted.stock.generate(ids, **options))


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_models_that_share_the_config(mixed, auto):
    config = copy.deepcopy(mixed("llama").load().config)
    ids, mask, positions = left_padded(tokens(2, LENGTH), [LENGTH, 30])
    model = auto.from_config(config).eval()
    stock = auto.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    stock.load_state_dict(model.state_dict())
    for options in ({"attention_mask": mask, "position_ids": positions}, {"use_cache": False}):
        expected = logits(stock, ids, **options)
        difference = logits(model, ids, **options) - expected
        assert largest(difference[mask.bool()] if difference.ndim == 3 else difference, expected) <= 1e-5


def test_a_copy_of_a_converted_model_is_one(mixed):
    model = mixed("llama").model
    ids, mask, positions = left_padded(tokens(2, LENGTH), [LENGTH, 30])
    options = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    expected = logits(model, ids, **options)
    assert logits(copy.deepcopy(model), ids, **options).equal(expected)


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_forward_called_without_hooks(mixed, auto):
    model = mixed("llama").load(auto)
    ids, mask, positions = left_padded(tokens(2, LENGTH), [LENGTH, 30])
    options = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        assert model.forward(ids, **options)[0].equal(model(ids, **options)[0])
    assert running_config(model) is None


def running_config(model):
    """The config of the innermost forward under way."""
    return sys.modules[type(model).__module__.rpartition(".")[0] + ".kv_attention"].RUNNING.get()[-1].config


class Interrupted(Exception):
    """An error within a forward."""


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, Interrupted])
@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_no_forward_is_under_way_once_one_was_interrupted(mixed, auto, error, use_cache):
    model = mixed("llama").load(auto)

    def interrupt(*args):
        raise error

    model.get_decoder().layers[2].register_forward_hook(interrupt)
    for call in (model, model.forward):
        with pytest.raises(error):
            call(tokens(1, 9), use_cache=use_cache)
        assert running_config(model) is None


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, Interrupted])
def test_a_forward_goes_on_after_another_within_it(mixed, error):
    outer, inner, ids = mixed("llama").load(), mixed("llama").load(), tokens(1, 9)
    expected, configs = logits(inner, ids), []

    def interrupt(*args):
        if error:
            raise error

    def call_inner(*args):
        configs.append(running_config(outer))
        if error:
            with pytest.raises(error):
                inner(ids)
        else:
            assert inner(ids).logits.equal(expected)
        configs.append(running_config(outer))

    inner.model.layers[2].register_forward_hook(interrupt)
    outer.model.layers[1].register_forward_pre_hook(call_inner)
    assert logits(outer, ids).equal(expected)
    assert len(configs) == 2
    assert all(config is outer.config for config in configs)


def test_weights_in_another_order_are_refused(mixed, all_full):
    converted = mixed("llama")
    model = type(converted.model)
    for folder in (converted.source, all_full("llama").folder):
        with pytest.raises(ValueError, match="not in the order that this config describes"):
            model.from_pretrained(folder, config=copy.deepcopy(converted.model.config))
    again = model.from_pretrained(f"{converted.folder}/", config=copy.deepcopy(converted.model.config))
    assert logits(again.eval(), tokens(1, 9)).equal(logits(converted.model, tokens(1, 9)))
    config, weights = copy.deepcopy(converted.model.config), converted.model.state_dict()
    without_folder = model.from_pretrained(None, config=config, state_dict=weights)
    assert logits(without_folder.eval(), tokens(1, 9)).equal(logits(converted.model, tokens(1, 9)))


@pytest.mark.skipif(
    not hasattr(GenerationConfig(), "speculation_type"), reason="this version of transformers has no such option"
)
@pytest.mark.parametrize("chunk", [None, 8])
def test_drafts_from_the_hidden_states_of_the_model(mixed, chunk):
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = MuseGlimmerAssistantConfig(
        **{**SMALL, "num_hidden_layers": 2, "head_dim": 6, "layer_types": ["full_attention"] * 2},
        block_size=4,
        mask_token_id=3,
        target_layer_ids=[0, 2],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    model, ids = mixed("llama").model, tokens(1, 30)
    options = {"prefill_chunk_size": chunk, "return_dict_in_generate": True, **GREEDY}
    assistant = {"assistant_model": MuseGlimmerAssistantModel(config).eval(), "speculation_type": "dflash"}
    output = model.generate(ids, **assistant, **options)
    assert output.sequences.equal(model.generate(ids, **GREEDY))
    assert not output.cache.columns.record_past


@pytest.mark.skipif(
    not hasattr(GenerationConfig(), "use_mtp"), reason="this version of transformers has no such option"
)
def test_layers_that_draft_are_refused(mixed):
    with pytest.raises(ValueError, match="use_mtp"):
        mixed("llama").model.generate(tokens(1, 9), use_mtp=True, **GREEDY)


def test_another_cache_beside_one_is_refused(mixed):
    model, ids = mixed("llama").model, tokens(1, 9)
    past = model.generate(ids, return_dict_in_generate=True, **GREEDY).past_key_values
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(tokens(1, 30), past_key_values=past, cache_implementation="quantized", **GREEDY)


def test_state_dicts_in_another_order_are_refused(mixed, all_full):
    converted, ids = mixed("llama"), tokens(1, 9)
    model, expected = converted.load(), logits(converted.model, ids)
    for other in (converted.stock, all_full("llama").model):
        with pytest.raises(ValueError, match="another order"):
            model.load_state_dict(other.state_dict())
        with pytest.raises(ValueError, match="another order"):
            model.get_decoder().load_state_dict(other.get_decoder().state_dict())
    for weights in (converted.model.state_dict(), dict(converted.model.state_dict())):
        model.load_state_dict(weights)
        assert logits(model, ids).equal(expected)
    whole = all_full("llama").load()
    whole.load_state_dict(converted.stock.state_dict())
    with pytest.raises(ValueError, match="another order"):
        whole.load_state_dict(converted.model.state_dict())


def test_a_saved_state_dict_keeps_its_order(mixed, tmp_path):
    converted = mixed("llama")
    for name, model in (("original", converted.stock), ("converted", converted.model)):
        torch.save(model.state_dict(), tmp_path / name)
    model = copy.deepcopy(converted.model)
    model.load_state_dict(torch.load(tmp_path / "converted", weights_only=True))
    with pytest.raises(ValueError, match="another order"):
        model.load_state_dict(torch.load(tmp_path / "original", weights_only=True))


WINDOWS = {
    "gemma2": [{"sliding_window": 8}, {"sliding_window": None}, {"layer_types": ["full_attention"] * 4}],
    "llama4": [{"attention_chunk_size": 8}, {"layer_types": ["full_attention"] * 4}],
    "llama": [{"layer_types": ["sliding_attention"] * 4, "sliding_window": 9}],
    "mistral": [{"sliding_window": 9}],
    "phi3": [{"sliding_window": 9}],
}


@pytest.mark.parametrize("family", [name for name in WINDOWS if name in FAMILIES])
def test_windows_that_changed_after_the_conversion_are_refused(mixed, family):
    model = mixed(family).model
    for changes in WINDOWS[family]:
        config = copy.deepcopy(model.config)
        for name, value in changes.items():
            setattr(config, name, value)
        with pytest.raises(ValueError, match=r"was converted with"):
            type(model)(config)(tokens(1, 9))
    type(model)(copy.deepcopy(model.config))
