"""Models whose last layers attend to the keys and values of earlier ones: Gemma 4 E2B and E4B."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.conversion.revert import revert
from kvsurgery.errors import UnsupportedModel
from kvsurgery.heads.kinds import STREAMING, full_heads
from kvsurgery.policy.memory import Footprint
from kvsurgery.profile.full_heads import kv_scores
from kvsurgery.recipe import Demand, Recipe
from kvsurgery.templates.kv_layout import KVLayout
from tests.helpers.command import done
from tests.helpers.deciding import decided, fitted
from tests.helpers.families import SHARED_CACHE, largest, make, tokens
from tests.helpers.reference import reference_logits
from tests.helpers.surgery import RECENT, SINK, convert_folder, random_profile
from tests.templates.test_exactness import LENGTH, chunked, left_padded
from tests.templates.test_generation import GREEDY

pytestmark = pytest.mark.skipif(not SHARED_CACHE, reason="no such family in this version of transformers")
families = pytest.mark.parametrize("family", SHARED_CACHE)
SLIDING, FULL = [0, 2, 4], [1, 3, 5]  # of which the last three layers share: 3 and 5 that of 1, and 4 that of 2


def scored(folder, layer):
    """A profile by which heads 1 and 3 of one layer are the only ones that need the whole context."""
    scores = np.full((6, 4), 0.1, np.float32)
    scores[layer, [1, 3]] = 1
    return replace(random_profile(folder), scores=scores)


@pytest.fixture(scope="module")
def shared(checkpoint, tmp_path_factory):
    """A family's checkpoint whose full heads are chosen by the scores of a layer that shares another one's cache."""

    def convert(family, **options):
        source = checkpoint(family)
        out = tmp_path_factory.mktemp("out") / family
        return convert_folder(source, out, scored(source, 5), **{"full_heads": 2, **options})

    return cache(convert)


@families
@pytest.mark.parametrize("layer", FULL)
def test_a_head_keeps_what_any_of_its_layers_needs(checkpoint, family, layer):
    source = Checkpoint.open(checkpoint(family))
    layers = source.model.layers
    assert layers.sources == {3: 1, 4: 2, 5: 1}
    profile = scored(checkpoint(family), layer)
    assert kv_scores(profile, sources=layers.sources)[1].tolist() == pytest.approx([0.1, 1, 0.1, 1])
    policy = decided(profile, layers, full_heads=2)
    assert [full_heads(each) for each in policy.layout.attended] == [(), (1, 3), (), (1, 3), (), (1, 3)]
    assert policy.orders == ((0, 1, 2, 3), (1, 3, 0, 2)) + ((0, 1, 2, 3), (1, 3, 0, 2)) * 2
    assert (policy.full, policy.counts[STREAMING]) == (2, 2)


@families
@pytest.mark.parametrize("tp", [1, 2])
def test_mixed_heads_equal_the_dense_reference(shared, family, tp):
    converted, ids = shared(family, tp=tp), tokens(2, LENGTH)
    expected = reference_logits(converted.stock, converted.full, SINK, RECENT, ids)
    for size in (1, 7, 64):
        found, cache = chunked(converted.model, ids, size)
        assert largest(found - expected, expected) <= 1e-4
        assert {cache.get_seq_length(layer) for layer in (None, *range(6))} == {LENGTH}


@families
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kept", [1, 9])
def test_sharing_layers_may_compute_the_last_tokens_only(shared, family, use_cache, kept):
    model, lengths = shared(family).model, [LENGTH, 31, 6]
    ids, mask, position_ids = left_padded(tokens(3, LENGTH), lengths)
    inputs = {"attention_mask": mask, "position_ids": position_ids, "use_cache": use_cache}
    with torch.no_grad():
        expected = model(ids, **inputs).logits
        found = model(ids, **inputs, logits_to_keep=kept).logits
    for row, length in enumerate(lengths):
        of_tokens = min(kept, length)
        assert largest((found - expected[:, -kept:])[row, -of_tokens:], expected) <= 1e-5


@families
def test_the_last_tokens_of_later_chunks(shared, family):
    model, ids = shared(family).model, tokens(2, LENGTH)
    with torch.no_grad():
        expected = model(ids).logits[:, -3:]
        past = model(ids[:, :20]).past_key_values
        found = model(ids[:, 20:], past_key_values=past, logits_to_keep=3).logits
    assert largest(found - expected, expected) <= 1e-5


@families
@pytest.mark.parametrize("hold", [None, 12])
def test_budgeted_heads_choose_for_all_layers_alike(shared, family, hold):
    model = shared(family, rest="budgeted", budget=6, window=4, hold=hold).model
    ids = tokens(2, LENGTH)
    found = [chunked(model, ids, size, first=15)[0] for size in (1, 7, LENGTH)]
    assert all(largest(each - found[0], found[0]) <= 1e-4 for each in found[1:])


@families
def test_quantized_heads_that_select_again_within_a_chunk(shared, family):
    """Layers that share a cache attend to what it had before later tokens of the chunk made heads select again."""
    quantized = {"kv_bits": 8, "kv_residual": 4, "kv_scheme": "per-token", "kv_group_size": 1, "kv_sink": 3}
    model = shared(family, rest="budgeted", budget=200, window=4, hold=12, **quantized).model
    ids = tokens(1, 300)
    expected, found = (chunked(model, ids, size, first=240)[0] for size in (1, 60))
    assert largest(found - expected, expected) <= 1e-4


@families
@pytest.mark.parametrize("kept", [0, 2])
def test_quantized_heads_in_chunks(shared, family, kept):
    model = shared(family, kv_bits=8, kv_residual=4, kv_scheme="per-token", kv_group_size=1, kv_sink=3).model
    plain, ids = shared(family).model, tokens(1, 300)
    outputs = []
    for each in (plain, model):
        past = None
        for start in range(0, 300, 150):
            with torch.no_grad():
                output = each(ids[:, start : start + 150], past_key_values=past, logits_to_keep=kept)
            past = output.past_key_values
        outputs.append(output.logits)
    assert max(past.attention[1].heads[0].groups[0].packed) > 0
    assert largest(outputs[1] - outputs[0], outputs[0]) <= 1e-4


@families
def test_gradients_of_layers_that_share(shared, family):
    converted, ids = shared(family), tokens(1, 24)
    model = converted.load()
    for parameter in model.model.layers[:3].parameters():
        parameter.requires_grad_(False)
    past = model(ids[:, :12]).past_key_values
    model(ids[:, 12:], past_key_values=past).logits.sum().backward()
    assert model.model.layers[5].self_attn.q_proj.weight.grad.abs().sum() > 0


@families
def test_shared_layers_store_nothing(shared, family):
    converted = shared(family)
    layout, stock = KVLayout.from_config(converted.model.config), DynamicCache(config=converted.stock.config)
    with torch.no_grad():
        held = converted.model(tokens(2, 40)).past_key_values
        converted.stock(tokens(2, 40), past_key_values=stock)
    assert held.allocated_bytes() == layout.kv_bytes(2, 40, itemsize=4)
    assert [layer.kv_bytes(40, 0, 0, 16, 4) for layer in layout.layers[3:]] == [0, 0, 0]
    windows = [9, 40, 9]
    dense = [2 * layer.keys[:, :, -window:].nbytes for layer, window in zip(stock.layers, windows, strict=False)]
    assert len(stock.layers) >= 3
    assert layout.dense_bytes(2, 40, itemsize=4) >= sum(dense)


@families
def test_prices_are_those_of_the_decided_policy(checkpoint, family):
    source, profile = Checkpoint.open(checkpoint(family)), random_profile(checkpoint(family))
    layers = source.model.layers
    asked = Recipe.of(fit=Demand(1 << 30, 1000, chunk=1000), rest="streaming")
    found = fitted(profile, layers, Footprint.of(source), recipe=asked)
    assert {candidate.full_heads for candidate in found.candidates} == {0, 1, 2, 3, 4}
    for candidate in found.candidates[::5]:
        layout = decided(profile, layers, candidate.recipe(asked)).layout
        assert candidate.kv_bytes == layout.kv_bytes(1, 1000, itemsize=4)


@families
def test_unused_projections_of_shared_layers_move_with_their_heads(checkpoint, tmp_path, family):
    """Published checkpoints have keys and values of layers that do not use them; stock code ignores these."""
    (source := tmp_path / "source").mkdir()
    weights = load_file(checkpoint(family) / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        weights[f"model.layers.5.self_attn.{name}.weight"] = weights[f"model.layers.1.self_attn.{name}.weight"].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text((checkpoint(family) / "config.json").read_text())
    converted = convert_folder(source, tmp_path / "out", scored(source, 5), full_heads=2)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("q_proj", "k_proj", "v_proj"):
        part = f"model.layers.5.self_attn.{name}.weight"
        heads = weights[part].unflatten(0, (4, -1))
        assert written[part].equal(heads[[1, 3, 0, 2]].flatten(0, 1))
    ids = tokens(1, 20)
    assert converted.model.generate(ids, **GREEDY).shape[1] > 20
    revert(tmp_path / "out", tmp_path / "back")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()


@families
def test_commands_tell_of_shared_layers(checkpoint, tmp_path, family):
    folder = checkpoint(family)
    random_profile(folder).save(tmp_path / "profile.safetensors")
    shown = " ".join(done("inspect", folder).out.split())
    assert "3 of 6 layers share the KV cache of earlier ones" in shown
    done("convert", folder, "--profile", tmp_path / "profile.safetensors", "--out", tmp_path / "out")
    assert "3 of 6 layers share" in " ".join(done("inspect", tmp_path / "out").out.split())
    assert "OK" in done("verify", tmp_path / "out").out
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert "3 of 6 layers have no KV cache of their own" in card
    assert "Layers with states" not in card


@families
def test_layers_offloaded_to_disk(shared, tmp_path, family):
    pytest.importorskip("accelerate")
    converted, ids = shared(family), tokens(2, 30)
    places = {f"model.{name}": "cpu" for name, _ in converted.model.model.named_children() if name != "layers"}
    places |= {f"model.layers.{index}": "disk" if index == 4 else "cpu" for index in range(6)} | {"lm_head": "cpu"}
    placed = converted.load(device_map=places, offload_folder=tmp_path)
    assert placed.generate(ids, **GREEDY).equal(converted.model.generate(ids, **GREEDY))


@families
def test_the_cache_is_not_handed_to_another_model(shared, family):
    with pytest.raises(ValueError, match="leave return_shared_kv_states out"):
        shared(family).model(tokens(1, 5), return_shared_kv_states=True)


@families
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6, of 6 layers"),
        ({"num_kv_shared_layers": 5}, "leaves a kind of layers no KV cache"),
        ({"num_kv_shared_layers": "2"}, "num_kv_shared_layers is '2'"),
    ],
    ids=str,
)
def test_layers_that_cannot_share(checkpoint, family, changes, word):
    config = json.loads((checkpoint(family) / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=word):
        _ = Model.of({**config, **changes}).sources


@families
@pytest.mark.parametrize("source", [5, 7, 0, -1, "1"], ids=str)
def test_a_layout_that_shares_otherwise_is_refused(shared, family, source):
    config = json.loads((shared(family).folder / "config.json").read_text())
    if source == 0:
        config["kv_surgery"]["layers"][0] = {"blocks": [], "source": 0}
    else:
        config["kv_surgery"]["layers"][5]["source"] = source
    with pytest.raises(ValueError, match="kv_surgery"):
        KVLayout.from_config(config)


@families
def test_a_model_of_one_kv_head(tmp_path, family):
    make(family, tmp_path / "source", num_key_value_heads=1)
    converted = convert_folder(tmp_path / "source", tmp_path / "out", full_heads=0)
    ids = tokens(2, LENGTH)
    expected = reference_logits(converted.stock, converted.full, SINK, RECENT, ids)
    found, _ = chunked(converted.model, ids, 7)
    assert largest(found - expected, expected) <= 1e-4
