"""Models whose layers have states, in place of KV heads or beside them: they lie in the same cache."""

import copy
import json
from dataclasses import replace
from itertools import chain

import pytest
import torch
from transformers import DynamicCache

from kvsurgery.bench.caches import cache_bytes
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.policy.memory import Footprint
from kvsurgery.system.sizes import size
from kvsurgery.templates.kv_graph import fits
from kvsurgery.templates.kv_layout import STATES, KVLayout
from tests.helpers.command import done
from tests.helpers.families import STATES_ALONE, STATES_BESIDE, WITH_STATES, largest, make, rounding, tokens
from tests.helpers.surgery import convert_folder, random_profile
from tests.templates.test_exactness import chunked, logits
from tests.templates.test_generation import GREEDY, batch

pytestmark = pytest.mark.skipif(not WITH_STATES, reason="no such family in this version of transformers")
families = pytest.mark.parametrize("family", WITH_STATES)
alone = pytest.mark.parametrize("family", STATES_ALONE)
beside = pytest.mark.parametrize("family", STATES_BESIDE)


@alone
def test_only_attention_has_heads(mixed, family):
    converted = mixed(family)
    linear = [kind != "full_attention" for kind in converted.stock.get_decoder().config.layer_types]
    assert any(linear)
    assert [layer.heads for layer in converted.policy.layers] == [0 if one else 4 for one in linear]
    assert converted.policy.eligible == 4 * linear.count(False)


@beside
def test_all_layers_have_heads_and_states(checkpoint, mixed, family):
    converted = mixed(family)
    with torch.no_grad():
        cache = converted.model(tokens(2, 40)).past_key_values
    assert cache.linear == cache.layers
    assert cache.attention == [layer.attention for layer in cache.layers]
    assert [layer.heads for layer in converted.policy.layers] == [4] * 4
    states = size(Checkpoint.open(checkpoint(family)).model.state_bytes())
    inspected = " ".join(done("inspect", checkpoint(family)).out.split())
    assert f"states {states} a sequence beside the KV cache, not counted as KV cache" in inspected
    card = (converted.folder / "README.md").read_text()
    assert "All layers have a state of constant size beside their keys and values" in card
    assert "with left\npadding and beam search work" in card


@families
def test_bytes_are_those_of_keys_and_values(mixed, family):
    converted = mixed(family)
    layout = KVLayout.from_config(converted.model.config)
    with torch.no_grad():
        cache = converted.model(tokens(2, 40)).past_key_values
    assert cache.allocated_bytes() == layout.kv_bytes(2, 40, itemsize=4)
    stock = DynamicCache(config=converted.stock.config)
    with torch.no_grad():
        converted.stock(tokens(2, 40), past_key_values=stock)
    keys = [layer.keys for layer in stock.layers if getattr(layer, "keys", None) is not None]
    assert layout.dense_bytes(2, 40, itemsize=4) == cache_bytes(stock) == 2 * sum(part.nbytes for part in keys)


@families
def test_bytes_of_states_are_predicted(mixed, family):
    converted = mixed(family)
    with torch.no_grad():
        cache = converted.model(tokens(2, 40)).past_key_values
    states = [*chain(*((layer.conv_states[0], layer.recurrent_states[0]) for layer in cache.linear))]
    checkpoint = Checkpoint.open(converted.source)
    predicted = checkpoint.model.state_bytes(itemsize=4)
    assert 2 * predicted == sum(state.nbytes for state in states if state is not None)
    assert Footprint.of(checkpoint).states == predicted


@alone
def test_commands_tell_of_states_and_leave_their_layers_out(checkpoint, tmp_path, family):
    folder = checkpoint(family)
    profile = replace(random_profile(folder), windows=(0, 0, None, None))
    profile.save(tmp_path / "profile.safetensors")
    inspected = " ".join(done("inspect", folder).out.split())
    states = size(Checkpoint.open(folder).model.state_bytes())
    assert f"2 of 4 layers have no KV cache; the model has {states} of states a sequence, not counted" in inspected
    assert "2 of 4 layers have no KV cache" in done("profile", "show", tmp_path / "profile.safetensors").out
    shown = done("convert", folder, "--profile", tmp_path / "profile.safetensors", "--dry-run").out
    rows = [line.split() for line in shown.splitlines()]
    assert [row[0] for row in rows if len(row) == 3 and row[0].isdecimal()] == ["2", "3"]


@families
@pytest.mark.parametrize("options", [{"rest": "budgeted", "budget": 6, "full_heads": 3}, {"tp": 2}], ids=str)
def test_other_heads_and_blocks(checkpoint, tmp_path, family, options):
    model, ids = convert_folder(checkpoint(family), tmp_path / "out", **options).model, tokens(2, 45)
    output = model.generate(ids, **GREEDY, return_dict_in_generate=True)
    assert output.sequences.equal(model.generate(ids, **GREEDY, prefill_chunk_size=7))
    assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1


@families
def test_a_cache_that_is_quantized_on_request(checkpoint, mixed, tmp_path, family):
    converted, ids = convert_folder(checkpoint(family), tmp_path / "out", kv_bits=4), tokens(1, 300)
    assert converted.model.config.kv_surgery["quantization"]["bits"] == 4
    assert KVLayout.from_config(converted.model.config).quantization.bits == 4
    options = {**GREEDY, "cache_implementation": "quantized"}
    expected = converted.model.generate(ids, **GREEDY)
    assert converted.model.generate(ids, **options).equal(expected)
    output = mixed(family).model.generate(ids, **options, return_dict_in_generate=True)
    assert any(max(layer.heads[0].groups[0].packed) for layer in output.past_key_values.attention)


@families
def test_packed_texts_are_refused(mixed, family):
    model, ids, packed = mixed(family).model, tokens(1, 6), torch.tensor([[0, 1, 2, 0, 1, 2]])
    for called in (model, model.get_decoder()):
        with pytest.raises(ValueError, match="layers with states"):
            called(ids, position_ids=packed, use_cache=False)


@alone
def test_the_card_tells_of_states(mixed, family):
    converted = mixed(family)
    stateful = sum(kind in STATES for kind in converted.model.config.layer_types)
    card = (converted.folder / "README.md").read_text()
    assert f"{stateful} of 4 layers have a state of constant size" in card
    assert "with left\npadding and beam search work" in card


@families
def test_single_tokens_of_padding_leave_states_alone(mixed, family):
    model, ids = mixed(family).model, tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = logits(model, ids[1:, 5:])
    found, _ = chunked(model, ids, 1, mask, positions)
    assert largest(found[1:, 5:] - expected, expected) <= rounding(family)


@families
def test_nothing_can_be_taken_back(mixed, family):
    model = mixed(family).model
    cache = model.generate(tokens(1, 20), **GREEDY, return_dict_in_generate=True).past_key_values
    seen = cache.get_seq_length()
    cache.crop(seen)
    with pytest.raises(ValueError, match="one state of all tokens"):
        cache.crop(seen - 1)
    with pytest.raises(ValueError, match="one state of all tokens"):
        cache.activate_past_recording()
    assert cache.get_seq_length() == seen


@families
def test_such_a_model_is_no_draft(mixed, family):
    with pytest.raises(ValueError, match="one state of all tokens"):
        mixed("llama").model.generate(tokens(1, 20), **GREEDY, assistant_model=mixed(family).load())


@families
def test_a_cache_starts_again_with_other_rows(mixed, family):
    model = mixed(family).model
    cache = model.generate(tokens(1, 20), **GREEDY, return_dict_in_generate=True).past_key_values
    cache.reset()
    assert model.generate(**batch(), **GREEDY, past_key_values=cache).equal(model.generate(**batch(), **GREEDY))


@families
def test_copies_of_a_cache_go_on_apart(mixed, family):
    model, ids = mixed(family).model, tokens(1, 20)
    with torch.no_grad():
        cache = model(ids).past_key_values
    for seed in (1, 2):
        more = torch.cat([ids, tokens(1, 9, seed=seed)], 1)
        found = model.generate(more, **GREEDY, past_key_values=copy.deepcopy(cache))
        assert found.equal(model.generate(more, **GREEDY, use_cache=False))
    assert cache.get_seq_length() == 20


@families
def test_decode_steps_are_not_captured(mixed, family, monkeypatch):
    monkeypatch.setattr("kvsurgery.templates.kv_graph.capturable", lambda ids: True)
    monkeypatch.setattr("kvsurgery.templates.kv_graph.waits_for_the_device", lambda config: False)
    with torch.no_grad():
        fit = [fits(mixed(name).model, {"input_ids": tokens(1, 1)}) for name in ("llama", family)]
    assert fit == [True, False]


@alone
@pytest.mark.parametrize("blocks", [[], [[2, 2]]], ids=["none", "some"])
def test_heads_that_contradict_the_layers(mixed, family, blocks):
    config = copy.deepcopy(mixed(family).model.config)
    kinds = config.get_text_config().layer_types
    index = kinds.index(kinds[0] if blocks else "full_attention")
    config.kv_surgery["layers"][index] = {"blocks": blocks, "sink": 0, "recent": 1}
    heads = (4, 0) if blocks else (0, 4)
    with pytest.raises(ValueError, match=f"gives layer {index} {heads[0]} KV heads, the model has {heads[1]}"):
        KVLayout.from_config(config)


def test_without_layer_types_every_fourth_layer_has_heads(tmp_path):
    source = make("qwen3_next", tmp_path / "source", layer_types=None, num_hidden_layers=5)
    config = json.loads((source / "config.json").read_text())
    del config["layer_types"]
    (source / "config.json").write_text(json.dumps(config))
    converted = convert_folder(source, tmp_path / "out")
    assert [layer.heads for layer in converted.policy.layers] == [0, 0, 0, 4, 0]
    assert converted.model.config.layer_types.index("full_attention") == 3


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("granitemoehybrid", {"layer_types": ["mamba", "attention", "mamba", "attention"]}),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [1, 3]}),
    ],
)
def test_other_spellings_of_layers(tmp_path, family, settings):
    kinds = ["conv" if family == "lfm2" else "linear_attention", "full_attention"] * 2
    source = make(family, tmp_path / "source", layer_types=kinds)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | settings))
    converted = convert_folder(source, tmp_path / "out", sparsity=0.0)
    assert [layer.heads for layer in converted.policy.layers] == [0, 4, 0, 4]
    assert converted.model.config.layer_types == kinds
    ids = tokens(2, 20)
    with torch.no_grad():
        expected = converted.stock(ids).logits
        assert largest(converted.model(ids).logits - expected, expected) < 1e-5
