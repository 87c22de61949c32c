"""Models in which a token of some layers sees only the tokens of its own chunk: Llama 4."""

import sys
from functools import cache

import pytest
import torch

from kvsurgery.errors import UnsupportedModel
from kvsurgery.heads.section import layout_section
from kvsurgery.measure.cache_losses import cache_losses
from kvsurgery.measure.cache_trial import CacheTrial, Window
from kvsurgery.templates.kv_layout import KVLayout, Quantization
from tests.helpers.families import largest, make, stock, tokens
from tests.helpers.measured_models import measured_model
from tests.helpers.reference import reference_logits
from tests.helpers.surgery import RECENT, SINK, convert_folder
from tests.templates.test_exactness import chunked, left_padded, logits
from tests.templates.test_generation import GREEDY, same_without_cache

CHUNK, LENGTH = 16, 75
LENGTHS = [LENGTH, 62, 16, 1]  # of rows, the others padded on the left
# queries of layers without RoPE have a factor from column 7 on; stock code counts columns, padding included
TUNED = {"floor_scale": 8, "attn_scale": 2.0}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A checkpoint whose queries have a factor by position, of which this share of heads streams."""
    source = make("llama4", tmp_path_factory.mktemp("stock") / "tuned", **TUNED)
    return cache(lambda sparsity: convert_folder(source, tmp_path_factory.mktemp("out") / "out", sparsity=sparsity))


def test_chunks_of_all_positions_are_full_attention(tmp_path):
    """A model of this family without experts, whose layers all have RoPE."""
    dense = {"moe_layers": [], "num_local_experts": 0, "num_experts_per_tok": 0, "no_rope_layers": [1] * 4}
    source = make("llama4", tmp_path / "stock", **dense, attention_chunk_size=512, tie_word_embeddings=True)
    converted, ids = convert_folder(source, tmp_path / "out", sparsity=0.0), tokens(2, LENGTH)
    assert [layer.full for layer in converted.policy.layers] == [4] * 4
    expected = logits(converted.stock, ids)
    assert largest(chunked(converted.model, ids, 7)[0] - expected, expected) <= 1e-5


def test_layers_with_chunks_stay_as_they_are(mixed):
    converted = mixed("llama4")
    layout = KVLayout.from_config(converted.model.config)
    assert [layer.chunked for layer in layout.layers] == [True, False] * 2
    assert layout_section(layout)["layers"][0] == {
        **{"blocks": [[0, 4]], "sink": 0, "recent": CHUNK},
        **{"native": True, "chunked": True},
    }
    cache = converted.model.generate(tokens(2, LENGTH), **GREEDY, return_dict_in_generate=True).past_key_values
    new = GREEDY["max_new_tokens"]
    assert cache.allocated_bytes() == layout.kv_bytes(2, LENGTH, new, itemsize=4)
    assert [layer.storage.slots[-1] for layer in cache.layers] == [CHUNK, SINK + RECENT] * 2


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
@pytest.mark.parametrize("size", [1, 7, 64, LENGTH], ids="chunks of {}".format)
def test_padded_rows_over_several_chunks_equal_the_dense_reference(tuned, sparsity, size):
    """Chunks begin with the row's first token, as in stock code."""
    converted = tuned(sparsity)
    ids, mask, position_ids = left_padded(tokens(4, LENGTH), LENGTHS)
    options = {"mask": mask, "position_ids": position_ids}
    expected = reference_logits(converted.stock, converted.full, SINK, RECENT, ids, **options)[mask.bool()]
    found, _ = chunked(converted.model, ids, size, **options)
    assert largest(found[mask.bool()] - expected, expected) <= 1e-4
    whole = logits(converted.stock, ids, attention_mask=mask, position_ids=position_ids)[mask.bool()]
    difference = largest(found[mask.bool()] - whole, whole)
    assert difference > 1e-2 if sparsity else difference <= 1e-5


def test_queries_have_the_factor_of_their_column(tuned, mixed):
    """Layers ask the cache how many tokens they have seen when earlier layers have seen more."""
    converted, ids = tuned(0.0), tokens(2, LENGTH)
    untuned = converted.load()
    for layer in untuned.model.layers:
        layer.self_attn.attn_temperature_tuning = False
    assert largest(logits(untuned, ids) - logits(converted.model, ids), logits(untuned, ids)) > 1e-2
    cache = converted.model(ids).past_key_values
    assert [cache.get_seq_length(layer) for layer in (None, 0, 1)] == [LENGTH] * 3
    assert converted.model.generate(ids, **GREEDY).equal(converted.stock.generate(ids, **GREEDY))


def test_prefill_in_query_blocks(tuned, monkeypatch):
    """Blocks of queries that begin and end within chunks."""
    converted = tuned(0.5)
    attention = sys.modules[type(converted.model).__module__.rsplit(".", 1)[0] + ".kv_softmax"]
    ids, mask, position_ids = left_padded(tokens(4, LENGTH, seed=5), LENGTHS)
    options = {"attention_mask": mask, "position_ids": position_ids}
    expected = logits(converted.model, ids, **options)[mask.bool()]
    monkeypatch.setattr(attention, "BLOCK", 5)
    for use_cache in (True, False):
        found = logits(converted.model, ids, use_cache=use_cache, **options)[mask.bool()]
        assert largest(found - expected, expected) <= 1e-5


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_generation_across_borders_of_chunks(mixed, length):
    model, inputs = mixed("llama4").model, {"input_ids": tokens(2, length)}
    for options in ({}, {"num_beams": 3}):
        same_without_cache(model, inputs, **GREEDY, max_length=None, **options)


@pytest.mark.parametrize("back", [1, 6, CHUNK + 3])
def test_tokens_are_taken_back_over_a_border(mixed, back):
    model, ids, seen = mixed("llama4").model, tokens(2, LENGTH), 3 * CHUNK + 2
    with torch.no_grad():
        cache = model(ids[:, : seen - back]).past_key_values
        cache.activate_past_recording()
        model(ids[:, seen - back : seen], past_key_values=cache)
        cache.crop(-back)
        found = model(ids[:, seen - back :], past_key_values=cache).logits
    expected = logits(model, ids)[:, seen - back :]
    assert largest(found - expected, expected) <= 1e-5


@pytest.mark.parametrize(("first", "size"), [(90, 90), (500, 1)])
def test_chunks_long_enough_are_quantized_like_windows(tmp_path, first, size):
    source = make("llama4", tmp_path / "stock", num_hidden_layers=2, attention_chunk_size=270)
    ids, mask, position_ids = left_padded(tokens(2, 600), [600, 555])
    found = []
    for name, quantization in (("plain", None), ("quantized", Quantization(8, "per-token", 1, 5, True, 3, "both"))):
        converted = convert_folder(source, tmp_path / name, sparsity=0.5, quantization=quantization)
        assert converted.policy.layers[0].quantized_window == (quantization is not None)
        found.append(chunked(converted.model, ids, size, mask, position_ids, first)[0][mask.bool()])
    assert largest(found[1] - found[0], found[0]) <= 1e-4


def test_losses_of_caches_are_those_of_the_emitted_model(checkpoint, tmp_path):
    how, ids, prompt = Quantization(3, residual=20), tokens(1, 312), 300
    converted = convert_folder(checkpoint("llama4"), tmp_path / "out", sparsity=0.5, quantization=how)
    logs = []
    for model in (converted.stock, converted.model):
        with torch.no_grad():
            past = model(ids[:, :prompt], use_cache=True).past_key_values
            logs.append(model(ids[:, prompt:], past_key_values=past).logits[0].log_softmax(-1))
    expected = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean().item()
    measured = measured_model(converted.stock)
    trial = CacheTrial(measured.model, measured.layers, ids, prompt, [how, Window(SINK, RECENT)])
    changes = torch.zeros(1, 4, 4, dtype=torch.int64)
    for layer in (1, 3):
        changes[0, layer] = torch.tensor([1 if full else 2 for full in converted.full[layer]])
    assert expected > 1e-5
    assert trial.converted_divergence(changes).item() == pytest.approx(expected, rel=1e-2, abs=1e-7)


def test_caches_are_not_measured_where_queries_have_a_factor():
    measured = measured_model(stock("llama4", **TUNED), name="org/scout")
    with pytest.raises(UnsupportedModel, match="queries of org/scout have a factor by position from 8 tokens on"):
        cache_losses(measured, tokens(1, 3000)[0].numpy(), data={})


def test_kernels_are_for_layers_without_chunks(mixed, monkeypatch):
    model = mixed("llama4").model
    attention = sys.modules[type(model).__module__.rsplit(".", 1)[0] + ".kv_attention"]
    asked, path = [], attention._path
    monkeypatch.setattr(attention, "_path", lambda query, *states: asked.append(query) or path(query, *states))
    logits(model, tokens(1, LENGTH))
    assert len(asked) == 2  # of four layers


def test_sections_that_contradict_themselves(mixed):
    config = mixed("llama4").model.config.to_dict()
    config["kv_surgery"]["layers"][0]["native"] = False
    with pytest.raises(ValueError, match="a chunked layer is native, with sink 0"):
        KVLayout.from_config(config)
