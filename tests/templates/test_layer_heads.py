"""Models whose layers with full attention have heads of another number and size than the others: Gemma 4."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, DynamicCache

from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.errors import CheckpointError, UnsupportedModel
from kvsurgery.measure.cache_trial import CacheTrial, Window
from kvsurgery.policy.memory import Footprint
from kvsurgery.recipe import Demand, Recipe
from kvsurgery.templates.kv_layout import KVLayout, Quantization
from tests.helpers.command import done
from tests.helpers.deciding import decided, fitted
from tests.helpers.families import LAYER_HEADS, largest, tokens
from tests.helpers.measured_models import measured_model
from tests.helpers.reference import reference_logits
from tests.helpers.surgery import RECENT, SINK, convert_folder, random_profile
from tests.templates.test_exactness import LENGTH, chunked, left_padded
from tests.templates.test_generation import GREEDY

pytestmark = pytest.mark.skipif(not LAYER_HEADS, reason="no such family in this version of transformers")
families = pytest.mark.parametrize("family", LAYER_HEADS)


def alternating(folder):
    """A profile by which every second head of each layer with full attention is full."""
    scores = np.float32([[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0.2, 1]])
    return replace(random_profile(folder), scores=scores)


@pytest.fixture(scope="module")
def interleaved(checkpoint, tmp_path_factory):
    """A family's checkpoint of which every layer with full attention has full and streaming heads, in other places."""

    def convert(family, **options):
        source = checkpoint(family)
        out = tmp_path_factory.mktemp("out") / family
        return convert_folder(source, out, alternating(source), full_heads=4, **options)

    return cache(convert)


@families
@pytest.mark.parametrize("tp", [1, 2])
def test_mixed_heads_equal_the_dense_reference(interleaved, family, tp):
    converted, ids = interleaved(family, tp=tp), tokens(2, LENGTH)
    moved = [layer.order for layer in converted.policy.layers if not layer.native]
    assert all(sorted(order) != list(order) for order in moved)
    assert [layer.full for layer in converted.policy.layers] == [0, 2, 0, 2]
    expected = reference_logits(converted.stock, converted.full, SINK, RECENT, ids)
    for size in (1, 7, 64):
        found, _ = chunked(converted.model, ids, size)
        assert largest(found - expected, expected) <= 1e-4
    plain = converted.auto.from_pretrained(converted.folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = converted.stock(ids).logits
        assert largest(plain(ids).logits - expected, expected) <= 1e-5
    if tp == 2:
        parts = KVLayout.from_config(converted.model.config).parts(2)
        assert [layer.heads for layer in parts[0].layers] == [4 if family == "gemma4" else 2, 2] * 2


@families
def test_left_padded_rows_of_mixed_heads(interleaved, family):
    model, lengths = interleaved(family).model, [LENGTH, 31, 6]
    ids, mask, position_ids = left_padded(tokens(3, LENGTH), lengths)
    found, _ = chunked(model, ids, 7, mask, position_ids)
    for row, length in enumerate(lengths):
        with torch.no_grad():
            alone = model(ids[row : row + 1, LENGTH - length :]).logits
        assert largest(found[row, -length:] - alone[0], alone) <= 1e-5


@families
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_of_mixed_heads(interleaved, family, options):
    model, ids = interleaved(family).model, tokens(2, LENGTH)
    found = model.generate(ids, **GREEDY | options)
    assert found.equal(model.generate(ids, **GREEDY | options, use_cache=False))


@families
def test_layers_have_heads_of_their_own(mixed, family):
    layout = KVLayout.from_config(mixed(family).model.config)
    sliding = 8 if family == "gemma4" else 4
    assert [(layer.heads, layer.head_dim or layout.head_dim) for layer in layout.layers] == [(sliding, 16), (4, 32)] * 2
    assert [layer.native for layer in layout.layers] == [True, False] * 2


@families
def test_bytes_are_those_of_keys_and_values(mixed, family):
    converted = mixed(family)
    layout, stock = KVLayout.from_config(converted.model.config), DynamicCache()
    with torch.no_grad():
        held = converted.model(tokens(2, 40)).past_key_values
        converted.stock(tokens(2, 40), past_key_values=stock)
    assert held.allocated_bytes() == layout.kv_bytes(2, 40, itemsize=4)
    windows = [40 if layer.recent == 1 or not layer.native else layer.recent for layer in layout.layers]
    dense = [2 * layer.keys[:, :, :window].nbytes for layer, window in zip(stock.layers, windows, strict=True)]
    assert layout.dense_bytes(2, 40, itemsize=4) == sum(dense)


@families
@pytest.mark.parametrize(
    "options", [{"rest": "budgeted", "budget": 6, "full_heads": 3}, {"kv_bits": 4}, {"tp": 2}], ids=str
)
def test_other_heads_and_blocks(checkpoint, tmp_path, family, options):
    model = convert_folder(checkpoint(family), tmp_path / "out", **options).model
    ids = tokens(2, 300 if "kv_bits" in options else 45)
    output = model.generate(ids, **GREEDY, return_dict_in_generate=True)
    assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1
    if "kv_bits" in options:
        assert any(max(layer.heads[0].groups[0].packed) for layer in output.past_key_values.attention)
    else:
        assert output.sequences.equal(model.generate(ids, **GREEDY, prefill_chunk_size=7))


def published(source: Path, folder: Path) -> Path:
    """The checkpoint with a config as Google writes it."""
    config = json.loads((source / "config.json").read_text())
    own = next(iter(config.pop("per_layer_config").values()))
    config |= {"global_head_dim": own["head_dim"], "num_global_key_value_heads": own.get("num_key_value_heads")}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").hardlink_to(source / "model.safetensors")
    return folder


@families
def test_dimensions_are_read_as_they_are_published(checkpoint, mixed, tmp_path, family):
    source = published(checkpoint(family), tmp_path / "source")
    profile = random_profile(checkpoint(family))
    converted = convert_folder(source, tmp_path / "out", profile, sparsity=0.5)
    assert converted.policy.layout == mixed(family).policy.layout
    assert converted.model.generate(tokens(1, 30), **GREEDY).equal(
        mixed(family).model.generate(tokens(1, 30), **GREEDY)
    )


@families
def test_commands_tell_of_both_kinds(checkpoint, tmp_path, family):
    folder = checkpoint(family)
    random_profile(folder).save(tmp_path / "profile.safetensors")
    shown = " ".join(done("inspect", folder).out.split())
    heads = "8 KV heads of 16" if family == "gemma4" else "4 KV heads of 16"
    assert "4 layers, 8 query heads, 4 KV heads of 32" in shown
    assert f"2 of 4 layers see 9 tokens, with {heads}" in shown
    done("convert", folder, "--profile", tmp_path / "profile.safetensors", "--out", tmp_path / "out")
    assert f"see 9 tokens, with {heads}" in " ".join(done("inspect", tmp_path / "out").out.split())
    assert "OK" in done("verify", tmp_path / "out").out


@families
def test_memory_counts_the_heads_of_each_kind(checkpoint, family):
    source = Checkpoint.open(checkpoint(family))
    found = Footprint.of(source)
    assert (found.model.kv_heads, found.model.head_dim) == (4, 32)
    assert (found.sliding.kv_heads, found.sliding.head_dim) == (8 if family == "gemma4" else 4, 16)


@families
@pytest.mark.parametrize("rest", ["streaming", "budgeted"])
def test_prices_are_those_of_the_decided_policy(checkpoint, family, rest):
    source, profile = Checkpoint.open(checkpoint(family)), random_profile(checkpoint(family))
    layers, footprint = source.model.layers, Footprint.of(source)
    asked = Recipe.of(fit=Demand(1 << 30, 1000, chunk=1000), rest=rest)
    found = fitted(profile, layers, footprint, recipe=asked)
    for candidate in found.candidates[::7]:
        layout = decided(profile, layers, candidate.recipe(asked)).layout
        assert candidate.kv_bytes == layout.kv_bytes(1, 1000, itemsize=4)
        activations = footprint.activation_bytes(1, 1000, 1000, tiles=False)
        peak = layout.prefill_peak_bytes(1, 1000, itemsize=4)
        assert candidate.total == footprint.weights + activations + peak


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ({"1": {"head_dim": 32}}, "one kind heads of several shapes"),
        ({"0": {"head_dim": 32}, "1": {"head_dim": 32}, "3": {"head_dim": 32}}, "one kind heads of several shapes"),
        ({"1": {"intermediate_size": 3}}, "head_dim and num_key_value_heads only"),
        ({"4": {"head_dim": 32}}, "head_dim and num_key_value_heads only"),
        ([], "head_dim and num_key_value_heads only"),
    ],
    ids=str,
)
def test_layers_that_cannot_be_told(checkpoint, overrides, word):
    config = json.loads((checkpoint("gemma4-moe") / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=word):
        _ = Model.of({**config, "per_layer_config": overrides}).dimensions


@pytest.mark.parametrize("overrides", [None, {}], ids=str)
def test_layers_that_are_all_alike(checkpoint, overrides):
    config = json.loads((checkpoint("gemma4-moe") / "config.json").read_text()) | {"per_layer_config": overrides}
    stock = AutoConfig.for_model(**config)
    known = Model.of(config)
    assert known.dimensions == known.sliding_dimensions
    assert known.dimensions.head_dim == stock.per_layer_config[1].head_dim == 16


def test_only_layers_with_full_attention_lack_values(checkpoint, tmp_path):
    source = checkpoint("gemma4")
    weights = load_file(source / "model.safetensors")
    assert "model.layers.1.self_attn.v_proj.weight" not in weights
    del weights["model.layers.2.self_attn.v_proj.weight"]
    (tmp_path / "source").mkdir()
    save_file(weights, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.v_proj\.weight is missing"):
        convert_folder(tmp_path / "source", tmp_path / "out")


@families
def test_losses_of_caches_are_those_of_the_emitted_model(interleaved, family):
    how, ids = Quantization(3, residual=20), tokens(1, 312)
    converted = interleaved(family, quantization=how)
    original, logs = converted.stock, []
    for model in (original, converted.model):
        with torch.no_grad():
            past = model(ids[:, :300], use_cache=True).past_key_values
            logs.append(model(ids[:, 300:], past_key_values=past).logits[0].log_softmax(-1))
    expected = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean().item()
    trial = CacheTrial(original, measured_model(original).layers, ids, 300, [how, Window(SINK, RECENT)])
    changes = torch.zeros(1, 4, 4, dtype=torch.int64)
    for layer in (1, 3):
        changes[0, layer] = torch.tensor([1 if full else 2 for full in converted.full[layer]])
    assert expected > 1e-5
    assert trial.converted_divergence(changes).item() == pytest.approx(expected, rel=1e-2, abs=1e-7)


@families
def test_scores_of_a_converted_model_are_by_original_head(interleaved, family):
    converted = interleaved(family)
    orders = [layer.order for layer in converted.policy.layers]
    scores = np.arange(16, dtype=np.float32).reshape(4, 4)
    found = measured_model(converted.stock, permutation=orders).by_original_head(scores)
    assert all(found[layer, list(orders[layer])].tolist() == scores[layer].tolist() for layer in (1, 3))
