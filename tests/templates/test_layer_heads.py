"""Models whose layers with full attention have heads of another number and size than the others: Gemma 4."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForImageTextToText, DynamicCache

from kvsurgery.checkpoint.family import Family
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.errors import CheckpointError, UnsupportedModel
from kvsurgery.policy.fit import fit
from kvsurgery.policy.memory import Footprint
from kvsurgery.policy.policy import decide
from kvsurgery.recipe import Demand, Recipe
from kvsurgery.templates.kv_layout import KVLayout
from tests.helpers.command import done
from tests.helpers.families import FAMILIES, IMAGE, largest, make, tokens
from tests.helpers.reference import reference_logits
from tests.helpers.surgery import RECENT, SINK, convert_folder, random_profile
from tests.templates.test_exactness import LENGTH, chunked
from tests.templates.test_generation import GREEDY
from tests.templates.test_images import prompt

NAMES = [name for name in ("gemma4", "gemma4-moe") if name in FAMILIES]
pytestmark = pytest.mark.skipif(not NAMES, reason="no such family in this version of transformers")
families = pytest.mark.parametrize("family", NAMES)


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
        cache = converted.model(tokens(2, 40)).past_key_values
        converted.stock(tokens(2, 40), past_key_values=stock)
    assert cache.allocated_bytes() == layout.kv_bytes(2, 40, itemsize=4)
    windows = [40 if layer.recent == 1 or not layer.native else layer.recent for layer in layout.layers]
    held = [2 * layer.keys[:, :, :window].nbytes for layer, window in zip(stock.layers, windows, strict=True)]
    assert layout.dense_bytes(2, 40, itemsize=4) == sum(held)


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
        assert any(max(layer.full.packed or [0]) for layer in output.past_key_values.attention)
    else:
        assert output.sequences.equal(model.generate(ids, **GREEDY, prefill_chunk_size=7))


@families
def test_blocks_of_heads_equal_the_dense_reference(checkpoint, tmp_path, family):
    converted, ids = convert_folder(checkpoint(family), tmp_path / "out", tp=2, full_heads=4), tokens(2, LENGTH)
    expected = reference_logits(converted.stock, converted.full, SINK, RECENT, ids)
    found, _ = chunked(converted.model, ids, 7)
    assert largest(found - expected, expected) <= 1e-4
    parts = KVLayout.from_config(converted.model.config).parts(2)
    assert [layer.heads for layer in parts[0].layers] == [4 if family == "gemma4" else 2, 2] * 2


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
    found = Footprint.of(source, Family.of(source.config))
    assert (found.model.kv_heads, found.model.head_dim) == (4, 32)
    assert (found.sliding.kv_heads, found.sliding.head_dim) == (8 if family == "gemma4" else 4, 16)


@families
@pytest.mark.parametrize("rest", ["streaming", "budgeted"])
def test_prices_are_those_of_the_decided_policy(checkpoint, family, rest):
    source, profile = Checkpoint.open(checkpoint(family)), random_profile(checkpoint(family))
    known = Family.of(source.config)
    windows, sliding = known.windows(source.config), known.sliding_dimensions(source.config)
    asked = Recipe(fit=Demand(1 << 30, 1000, chunk=1000), rest=rest)
    footprint = Footprint.of(source, known)
    found = fit(profile, windows, footprint, asked)
    for candidate in found.candidates[::7]:
        layout = decide(profile, windows, candidate.recipe(asked), sliding=sliding).layout
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
        Family.of(config).dimensions({**config, "per_layer_config": overrides})


def test_only_layers_with_full_attention_lack_values(checkpoint, tmp_path):
    source = checkpoint("gemma4")
    weights = load_file(source / "model.safetensors")
    assert "model.layers.1.self_attn.v_proj.weight" not in weights
    del weights["model.layers.2.self_attn.v_proj.weight"]
    (tmp_path / "source").mkdir()
    save_file(weights, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"layer 2 has no self_attn\.v_proj\.weight"):
        convert_folder(tmp_path / "source", tmp_path / "out")


@pytest.fixture(scope="module")
def in_both_directions(tmp_path_factory):
    """A converted model whose image tokens see each other in both directions, as the larger published ones do."""
    source = tmp_path_factory.mktemp("source")
    make("gemma4-images", source, use_bidirectional_attention="vision")
    return convert_folder(source, tmp_path_factory.mktemp("out") / "converted", sparsity=0.0)


@pytest.mark.parametrize("auto", [AutoModelForImageTextToText, AutoModel])
def test_images_are_refused_where_their_tokens_see_later_ones(in_both_directions, auto):
    inputs = prompt("gemma4-images")
    with pytest.raises(ValueError, match="tokens of an image see each other in both directions"):
        in_both_directions.load(auto)(**inputs)


def test_text_of_such_a_model_is_read_as_the_original_does(in_both_directions):
    ids = tokens(2, 40, vocabulary=IMAGE)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
    assert in_both_directions.model.generate(**inputs, **GREEDY).equal(
        in_both_directions.stock.generate(**inputs, **GREEDY)
    )
    with pytest.raises(ValueError, match="tokens of an image"):
        in_both_directions.model.generate(**prompt("gemma4-images"), **GREEDY)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_text"])
def test_layers_that_share_a_cache_are_refused(name):
    text = {"model_type": "gemma4_text", "num_kv_shared_layers": 2}
    config = text if name == "gemma4_text" else {"model_type": name, "text_config": text}
    with pytest.raises(UnsupportedModel, match="its last layers read the KV cache of earlier ones"):
        Family.of(config)
