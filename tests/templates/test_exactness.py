"""A converted checkpoint computes what the definition says: on every family, in one go, in chunks, and padded."""

import sys
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvsurgery.checkpoint.family import load_family
from kvsurgery.templates import kv_softmax
from kvsurgery.templates.kv_softmax import Scoring, Span
from tests.helpers.families import CACHE_PATHS, FAMILIES, WITH_STATES, config_of, largest, rounding, tokens
from tests.helpers.gpu_strides import lay_out_as_on_a_gpu
from tests.helpers.kernel_reference import prefill_reference
from tests.helpers.reference import reference_logits
from tests.helpers.surgery import RECENT, SINK, convert_folder

LENGTH = 45
families = pytest.mark.parametrize("family", FAMILIES)
cache_paths = pytest.mark.parametrize("family", CACHE_PATHS)
SAMPLE = ("llama", "qwen2", "gemma2", "mixtral", "gpt_oss", "llama4", "qwen3_next", "gemma4-shared")


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


def chunked(model, ids, size, mask=None, position_ids=None, first=None):
    """Logits of an input that is fed through the cache in chunks, the first of them of its own size, and the cache."""
    cache, parts, length = None, [], ids.shape[1]
    for start, stop in pairwise([0, *range(first or size, length, size), length]):
        options = (
            {} if mask is None else {"attention_mask": mask[:, :stop], "position_ids": position_ids[:, start:stop]}
        )
        with torch.no_grad():
            output = model(ids[:, start:stop], past_key_values=cache, **options)
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, 1), cache


def left_padded(ids, lengths):
    """Rows of `lengths` tokens, padded on the left, with mask and position ids."""
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, ids.shape[1] - length :] = 1
    return ids * mask, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def test_every_family_has_a_cache_path_of_those_tested() -> None:
    def path(name: str) -> tuple:
        family, config = load_family(FAMILIES[name]["model_type"]), config_of(name)
        return (
            family.window and family.window.kind,
            family.states,
            family.full_attention,
            family.rope_by_type,
            bool(getattr(config, "num_kv_shared_layers", 0)),
            bool(getattr(config, "attn_logit_softcapping", None)),
            any("sinks" in tensor for tensor in family.permute),
        )

    assert {path(name) for name in FAMILIES} == {path(name) for name in CACHE_PATHS}


@families
def test_without_trust_the_folder_is_the_stock_model(mixed, family):
    converted, ids = mixed(family), tokens(2, LENGTH)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    stock = AutoModelForCausalLM.from_pretrained(converted.folder, **options).eval()
    assert type(stock) is type(converted.stock)
    expected = logits(converted.stock, ids)
    assert largest(logits(stock, ids) - expected, expected) <= 1e-5


# `test_emitted_and_stock_agree` in tests/conversion compares logits of every family
@pytest.mark.parametrize("family", [name for name in FAMILIES if name in SAMPLE])
def test_all_full_heads_equal_the_stock_model(all_full, family):
    converted, ids = all_full(family), tokens(2, LENGTH)
    expected = logits(converted.stock, ids)
    assert largest(logits(converted.model, ids) - expected, expected) <= 1e-5
    options = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [2]}
    assert converted.model.generate(ids, **options).equal(converted.stock.generate(ids, **options))


@families
def test_mixed_heads_equal_the_dense_reference(mixed, family):
    """In chunks of one size: all others give the same."""
    converted, ids = mixed(family), tokens(2, LENGTH)
    expected = reference_logits(converted.stock, converted.full, SINK, RECENT, ids)
    found, cache = chunked(converted.model, ids, 7)
    assert largest(found - expected, expected) <= 1e-4
    assert cache.get_seq_length() == LENGTH
    # the streaming heads matter: a model that kept everything would be far off
    assert largest(logits(converted.stock, ids) - expected, expected) > 1e-2


@pytest.mark.parametrize("size", [LENGTH, 7])
def test_attention_may_have_the_strides_of_a_gpu(mixed, monkeypatch, size):
    """Where Triton is missing, a GPU takes the path of a CPU."""
    model, ids = mixed("llama").model, tokens(2, LENGTH)
    expected, _ = chunked(model, ids, size)
    lay_out_as_on_a_gpu(monkeypatch)
    assert largest(chunked(model, ids, size)[0] - expected, expected) <= 1e-5


@pytest.mark.parametrize(
    ("family", "uneven"), [("llama", False), ("gemma2", False), ("llama", True), ("qwen2", True), ("mixtral", True)]
)
def test_blocks_of_heads_equal_the_dense_reference(checkpoint, tmp_path, family, uneven):
    """Laid out for several processes, in one: full heads lie in several places."""
    full_heads = 3 if uneven else 6  # not only whole layers
    converted = convert_folder(checkpoint(family), tmp_path / "out", tp=2, tp_uneven=uneven, full_heads=full_heads)
    assert any(layer.scattered for layer in (block.self_attn.kv_layout for block in converted.model.model.layers))
    ids = tokens(2, LENGTH)
    expected = reference_logits(converted.stock, converted.full, SINK, RECENT, ids)
    for size in (1, 7, LENGTH):
        found, _ = chunked(converted.model, ids, size)
        assert largest(found - expected, expected) <= 1e-4
    assert largest(logits(converted.model, ids, use_cache=False) - expected, expected) <= 1e-4


@cache_paths
def test_chunk_sizes_agree(mixed, family):
    """The rows with padding, below, are fed token by token."""
    model, ids = mixed(family).model, tokens(2, LENGTH, seed=1)
    expected = logits(model, ids, use_cache=False)
    for size in (7, LENGTH - 1, LENGTH, *([1] if family in SAMPLE else [])):
        found, _ = chunked(model, ids, size)
        assert largest(found - expected, expected) <= rounding(family)


@cache_paths
def test_left_padded_rows_equal_their_unpadded_selves(mixed, family):
    model = mixed(family).model
    lengths = [LENGTH, 31, 6, 1]
    ids, mask, position_ids = left_padded(tokens(4, LENGTH, seed=2), lengths)
    padded = {"attention_mask": mask, "position_ids": position_ids}
    whole = logits(model, ids, **padded)
    uncached = logits(model, ids, use_cache=False, **padded)
    in_chunks, _ = chunked(model, ids, 7, mask, position_ids)
    by_token, _ = chunked(model, ids, 1, mask, position_ids, first=34)
    for row, length in enumerate(lengths):
        alone = logits(model, ids[row : row + 1, LENGTH - length :])
        for found in (whole, uncached, in_chunks, by_token):
            assert largest(found[row, -length:] - alone[0], alone) <= rounding(family)


def test_padded_rows_are_read_without_their_padding(monkeypatch):
    """On a CPU fused attention has no mask then; a row may be all padding so far. Gradients are those of the mask."""
    torch.manual_seed(0)
    monkeypatch.setattr(kv_softmax, "BLOCK", 20)
    monkeypatch.setattr(kv_softmax, "blocks", None)
    padding, scoring = torch.tensor([0, 5, 19, 20]), Scoring(0.3)
    states = [states.requires_grad_() for states in (torch.randn(4, 4, 20, 16), *torch.randn(2, 4, 2, 20, 16))]
    exact_states = [part.detach().double().requires_grad_() for part in states]
    expected = prefill_reference(*exact_states, Span(0, padding), scoring)
    found = kv_softmax.causal(*states, padding, scoring)
    assert largest(found - expected, expected) <= 1e-5
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for part, exact in zip(states, exact_states, strict=True):
        assert largest(part.grad - exact.grad, exact.grad) <= 1e-5


@pytest.mark.parametrize("block", [256, 16])
def test_a_mask_of_one_row_is_that_of_all_rows(mixed, monkeypatch, block):
    model, ids = mixed("llama").model, tokens(3, LENGTH, seed=2)
    monkeypatch.setattr(sys.modules[type(model).__module__.rsplit(".", 1)[0] + ".kv_softmax"], "BLOCK", block)
    _, mask, position_ids = left_padded(ids, [30, 30, 30])
    expected = logits(model, ids, use_cache=False, attention_mask=mask, position_ids=position_ids)
    found = logits(model, ids, use_cache=False, attention_mask=mask[:1], position_ids=position_ids)
    assert found.equal(expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", *WITH_STATES])
def test_right_padding_without_continuing(mixed, family):
    model, ids = mixed(family).model, tokens(2, LENGTH, seed=3)
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    for use_cache in (False, True):
        found = logits(model, ids, attention_mask=mask, use_cache=use_cache)
        alone = logits(model, ids[1:, :20])
        assert largest(found[1, :20] - alone[0], alone) <= 1e-5


@pytest.mark.parametrize(("sink", "recent"), [(0, 1), (0, 8), (1, 1), (60, 60), (2, 300)], ids=str)
def test_odd_sizes_of_sink_and_window(checkpoint, tmp_path, sink, recent):
    converted = convert_folder(checkpoint("llama"), tmp_path / "out", sparsity=0.6, sink=sink, recent=recent)
    ids = tokens(1, 90, seed=4)
    expected = reference_logits(converted.stock, converted.full, sink, recent, ids)
    for size in (1, 13, 90):
        found, _ = chunked(converted.model, ids, size)
        assert largest(found - expected, expected) <= 1e-4


def test_prefill_in_query_blocks(mixed, monkeypatch):
    """Inputs longer than a block of queries: with blocks of 16, every path of the prefill runs many of them."""
    converted = mixed("llama")
    attention = sys.modules[type(converted.model).__module__.rsplit(".", 1)[0] + ".kv_softmax"]
    ids, mask, position_ids = left_padded(tokens(2, 100, seed=5), [100, 71])
    options = {"attention_mask": mask, "position_ids": position_ids}
    expected = [logits(converted.model, ids, **options), logits(converted.model, ids, use_cache=False, **options)]
    monkeypatch.setattr(attention, "BLOCK", 16)
    monkeypatch.setattr(attention, "SCORES", 1)
    found = [logits(converted.model, ids, **options), logits(converted.model, ids, use_cache=False, **options)]
    parts, _ = chunked(converted.model, ids, 40, mask, position_ids)
    for result in (*found, parts):
        for row, length in enumerate([100, 71]):
            assert largest((result - expected[0])[row, -length:], expected[0]) <= 1e-5
    assert largest((expected[1] - expected[0])[0], expected[0]) <= 1e-5
