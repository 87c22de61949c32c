"""Models whose layers have one part alone: attention, a state, or neither."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.errors import UnsupportedModel
from kvsurgery.templates.kv_layout import KVLayout, has_states
from tests.helpers.command import refused
from tests.helpers.families import FAMILIES, largest, make, tokens
from tests.helpers.reference import reference_logits
from tests.helpers.surgery import RECENT, SINK, convert_folder
from tests.templates.test_exactness import chunked, logits
from tests.templates.test_generation import GREEDY

pytestmark = pytest.mark.skipif("nemotron_h" not in FAMILIES, reason="no such family in this version of transformers")
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def layers(pattern):
    """The kinds of layers that a string of letters stands for."""
    return [LETTERS[letter] for letter in pattern]


def source_of(folder, pattern, **settings):
    return make("nemotron_h", folder, layers_block_type=layers(pattern), **settings)


def with_config(source, left_out=(), **settings):
    """A folder whose config.json has other settings, and not those that are left out."""
    config = json.loads((source / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in left_out}
    (source / "config.json").write_text(json.dumps(kept | settings))
    return source


@pytest.mark.parametrize("pattern", ["-*M*", "E**-M", "*", "M*-*E-**", "*-*"])
def test_shapes(tmp_path, pattern):
    source, ids = source_of(tmp_path / "source", pattern, use_bias=True, mlp_bias=False), tokens(2, 40)
    converted = convert_folder(source, tmp_path / "out", sparsity=0.5)
    assert converted.model.config.layer_types == layers(pattern)
    assert [layer.heads for layer in converted.policy.layers] == [4 if letter == "*" else 0 for letter in pattern]
    expected = reference_logits(converted.stock, converted.full, SINK, RECENT, ids)
    for size in (1, 7, 40):
        found, cache = chunked(converted.model, ids, size)
        assert largest(found - expected, expected) <= 1e-4
    state_bytes = 4 * 4 * (4 * 24 + 2 * 2 * 8) + 4 * 4 * 24 * 8  # of the convolution, and of the recurrence
    assert Checkpoint.open(source).model.state_bytes(itemsize=4) == pattern.count("M") * state_bytes
    assert cache.get_seq_length() == 40
    output = converted.model.generate(ids, **GREEDY)
    assert output.equal(converted.model.generate(ids, **GREEDY, prefill_chunk_size=9))


@pytest.mark.parametrize(
    "settings",
    [
        {"hybrid_override_pattern": "M*E-*"},
        {"hybrid_override_pattern": "M*E-*", "num_hidden_layers": 5},
        {"layers_block_type": [OLD_NAMES.get(kind, kind) for kind in layers("M*E-*")]},
        # stock code counts what is listed, and reads no pattern beside a list
        {"layers_block_type": layers("M*E-*"), "num_hidden_layers": 52, "hybrid_override_pattern": "M-"},
    ],
    ids=str,
)
def test_spellings(tmp_path, settings):
    source, ids = source_of(tmp_path / "source", "M*E-*"), tokens(2, 20)
    with_config(source, ["layers_block_type"], **settings)
    converted = convert_folder(source, tmp_path / "out", sparsity=0.0)
    assert converted.model.config.layer_types == layers("M*E-*")
    assert converted.policy.eligible == 8
    expected = logits(converted.stock, ids)
    untrusted = type(converted.stock).from_pretrained(converted.folder)
    for model in (converted.model, untrusted):
        assert largest(logits(model, ids) - expected, expected) <= 1e-5


def test_other_prefix_and_joined_experts(tmp_path):
    """As they are inside of transformers 5; published files have `backbone`, and experts one by one."""
    source, ids = source_of(tmp_path / "source", "E*M*"), tokens(2, 20)
    stock = convert_folder(source, tmp_path / "first").stock
    save_file(stock.state_dict(), source / "model.safetensors", {"format": "pt"})
    converted = convert_folder(source, tmp_path / "out", sparsity=0.0)
    expected = logits(stock, ids)
    assert largest(logits(converted.model, ids) - expected, expected) <= 1e-5
    assert "model.layers.0.mixer.experts.up_proj" in load_file(converted.folder / "model.safetensors")


def test_layers_that_predict_further_tokens_are_copied(tmp_path):
    source, ids = source_of(tmp_path / "source", "E*M*"), tokens(2, 20)
    weights = load_file(source / "model.safetensors")
    extra = {
        f"mtp.layers.0.{name.partition('layers.1.')[2]}": torch.randn_like(weight)
        for name, weight in weights.items()
        if ".layers.1." in name
    }
    save_file(weights | extra, source / "model.safetensors", {"format": "pt"})
    converted = convert_folder(source, tmp_path / "out")
    after = load_file(converted.folder / "model.safetensors")
    assert len(extra) == 5
    assert all(after[name].equal(weight) for name, weight in extra.items())
    expected = reference_logits(converted.stock, converted.full, SINK, RECENT, ids)
    assert largest(logits(converted.model, ids) - expected, expected) <= 1e-4


def test_saved_again(mixed, tmp_path):
    """transformers saves the kinds of layers under the family's own name, and not their number."""
    model = mixed("nemotron_h").load()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"layer_types", "num_hidden_layers"} & config.keys()
    assert KVLayout.from_config(config) == KVLayout.from_config(model.config)
    assert has_states(config)


def test_without_attention_there_is_nothing_to_convert(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source_of(tmp_path / "source", "M-ME")
    said = refused("convert", "source", "--kv-bits", 4, "--out", "out")
    assert said.strip() == "kvsurgery: no layer of this model has full attention; there is nothing to convert"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"hybrid_override_pattern": "M*X*"}, "hybrid_override_pattern is 'M*X*', with other letters than M * - E"),
        ({"hybrid_override_pattern": 3}, "hybrid_override_pattern is 3, with other letters"),
        ({"layers_block_type": "M*E*"}, "layers_block_type is 'M*E*', not a list"),
        ({"layers_block_type": ["mlp", "conv"]}, "layer_types must be 2 times full_attention or linear_attention or"),
        ({"layers_block_type": []}, "num_hidden_layers is 0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: stock code does not tie them"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path, settings, problem):
    source = with_config(source_of(tmp_path / "source", "M*E*"), ["layers_block_type"], **settings)
    with pytest.raises(UnsupportedModel, match=re.escape(problem)):
        convert_folder(source, tmp_path / "out")


def test_attention_in_both_directions_is_refused(mixed):
    model, ids = mixed("nemotron_h").load(), tokens(1, 9)
    model.model.layers[3].mixer.is_causal = False
    for called in (model, model.get_decoder()):
        with pytest.raises(ValueError, match="see later ones"):
            called(ids)


@pytest.mark.parametrize(("module", "attends"), [("q_proj", True), ("in_proj", False), ("up_proj", False)])
def test_adapters_of_the_original(checkpoint, mixed, tmp_path, module, attends):
    """Those of attention alone depend on the order of heads."""
    peft = pytest.importorskip("peft")
    stock = type(mixed("nemotron_h").stock).from_pretrained(checkpoint("nemotron_h"))
    names = [name for name, part in stock.named_modules() if name.endswith(f"mixer.{module}")]
    modules = names or ["shared_experts.up_proj"]
    peft.get_peft_model(stock, peft.LoraConfig(r=4, target_modules=modules)).save_pretrained(tmp_path)
    model = mixed("nemotron_h").load()
    if attends:
        with pytest.raises(ValueError, match="was trained on"):
            peft.PeftModel.from_pretrained(model, tmp_path)
    else:
        adapted = peft.PeftModel.from_pretrained(model, tmp_path)
        assert logits(adapted, tokens(1, 9)).isfinite().all()
