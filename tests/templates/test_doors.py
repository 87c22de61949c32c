"""What reaches an emitted model from elsewhere: other caches, other ways to generate, and saved caches."""

import sys
from functools import partial

import pytest
import torch
import transformers
from transformers import AutoModel, DynamicCache
from transformers.generation import utils as generation

from kvsurgery.templates.kv_cache import CACHE
from kvsurgery.templates.kv_layout import KVLayout, Quantization
from tests.helpers.emitted import emitted
from tests.helpers.families import WITH_STATES, make, tokens
from tests.helpers.surgery import convert_folder
from tests.templates.test_generation import GREEDY

TRANSFORMERS_4 = transformers.__version__.startswith("4.")
REPORT = {"return_dict_in_generate": True}


@pytest.fixture(scope="module")
def model():
    return emitted("llama")


@pytest.mark.parametrize("found", [True, False], ids=["flash-attn", "without"])
@pytest.mark.parametrize("door", ["generate_batch", "init_continuous_batching", "context manager", "generate"])
def test_continuous_batching_is_refused(model, monkeypatch, door, found):
    """Before anything else: where flash-attn is there, its manager would run this model without its cache."""
    for name in ("is_flash_attn_2_available", "is_flash_attn_available"):
        monkeypatch.setattr(f"transformers.utils.import_utils.{name}", lambda *args: found, raising=False)
    doors = {
        "generate_batch": lambda: model.generate_batch([[1, 2], [3]], max_new_tokens=2),
        "init_continuous_batching": lambda: model.init_continuous_batching(),
        "context manager": lambda: model.continuous_batching_context_manager().__enter__(),
        "generate": lambda: model.generate(tokens(1, 5), cache_implementation="paged"),
    }
    if TRANSFORMERS_4 and door in ("context manager", "generate"):
        pytest.skip("this version has no such door")
    with pytest.raises(ValueError, match=r"continuous batching .*generate\(\)"):
        doors[door]()


@pytest.fixture
def late_checks(monkeypatch):
    """Lets `generate` check one token late whether it is done, as on devices of type mps."""
    if not hasattr(generation, "DeferredStopCheck"):
        pytest.skip("this version checks in every step")

    class Event:
        def __init__(self, **options): ...
        def record(self): ...
        def synchronize(self): ...

    supported = generation.DeferredStopCheck.is_supported
    monkeypatch.setattr(
        generation.DeferredStopCheck,
        "is_supported",
        staticmethod(lambda device, *args, **kwargs: supported(torch.device("mps"), *args, **kwargs)),
    )
    monkeypatch.setattr(torch, "Event", Event)


@pytest.mark.parametrize("quantization", [None, Quantization(8, "per-token", 2, 5)], ids=["16 bit", "8 bits"])
def test_later_turns_are_not_kept_whole_after_late_checks(late_checks, checkpoint, tmp_path, quantization):
    model = convert_folder(checkpoint("llama"), tmp_path / "out", quantization=quantization).load()
    first = model.generate(tokens(1, 40), **GREEDY, **REPORT)
    ids = torch.cat([first.sequences, tokens(1, 300)], 1)
    second = model.generate(ids, **GREEDY, **REPORT, **{CACHE: first[CACHE]})
    cache = second[CACHE]
    assert not cache.columns.record_past
    layout, margin = KVLayout.from_config(model.config), cache.columns.margin
    assert margin <= 1
    assert cache.allocated_bytes() == layout.kv_bytes(1, ids.shape[1], GREEDY["max_new_tokens"], margin, itemsize=4)
    if quantization is None:
        assert second.sequences.equal(model.generate(ids, **GREEDY, use_cache=False))


@pytest.mark.parametrize("family", WITH_STATES[:1])
def test_late_checks_with_states_that_cannot_be_taken_back(late_checks, mixed, family):
    model, ids = mixed(family).model, tokens(1, 40)
    assert model.generate(ids, **GREEDY, **REPORT).sequences.equal(model.generate(ids, **GREEDY, use_cache=False))


class Stop(transformers.StoppingCriteria):
    """Raises an error at a length."""

    def __init__(self, length, error):
        self.length, self.error = length, error

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("way", ["late checks", "lookup", "draft"])
def test_a_generation_that_is_interrupted_records_no_later_turn(mixed, request, way, error):
    model, ids = mixed("llama").model, tokens(1, 12).repeat(1, 4)
    if way == "late checks":
        request.getfixturevalue("late_checks")
    options = {"lookup": {"prompt_lookup_num_tokens": 3}, "draft": {"assistant_model": model}}.get(way, {})
    cache = model(ids[:, :-1])[CACHE]
    with pytest.raises(error):
        model.generate(ids, **GREEDY, **options, **{CACHE: cache}, stopping_criteria=[Stop(ids.shape[1] + 4, error())])
    assert not cache.columns.record_past
    assert not cache.repeated
    with torch.no_grad():
        model(tokens(1, 100), **{CACHE: cache})
    assert cache.columns.margin < 9  # that of what was drafted


def test_past_recording_that_a_caller_asked_for_stays_on(model):
    ids, cache = tokens(1, 12).repeat(1, 4), model(tokens(1, 12))[CACHE]
    cache.activate_past_recording()
    for options in ({}, {"prompt_lookup_num_tokens": 3}):
        ids = model.generate(ids, **GREEDY, **options, **{CACHE: cache})
        assert cache.columns.record_past


def longrope(folder):
    """A tiny Phi-3 whose RoPE changes beyond 40 tokens."""
    factors = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    rope = {"rope_scaling": {"type": "longrope", **factors}}
    if not TRANSFORMERS_4:
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40, **factors}
        rope = {"rope_parameters": rope}
    return make("phi3", folder, original_max_position_embeddings=40, max_position_embeddings=512, **rope)


BUDGETED = {"full_heads": 1, "rest": "budgeted", "budget": 6, "window": 4}


def test_a_cache_made_anew_where_rope_changes_is_as_large_as_predicted(tmp_path):
    source, ids, options = longrope(tmp_path / "phi3"), tokens(1, 25), GREEDY | REPORT | {"max_new_tokens": 30}
    for name, recipe, prompt in (
        ("full", {"sparsity": 0.0}, 25),
        ("streaming", {"sparsity": 0.5}, 25),
        ("budgeted", BUDGETED, 41),  # they select when the prompt and what followed is read anew
    ):
        converted = convert_folder(source, tmp_path / name, **recipe)
        output, layout = converted.model.generate(ids, **options), KVLayout.from_config(converted.model.config)
        assert output[CACHE].allocated_bytes() == layout.kv_bytes(1, prompt, 55 - prompt, itemsize=4)
        if name == "full":
            assert output.sequences.equal(converted.stock.generate(ids, **options, use_cache=False).sequences)
        if name != "budgeted":
            assert output.sequences.equal(converted.model.generate(ids, **options, use_cache=False).sequences)


def test_a_requested_quantization_outlives_a_change_of_rope(tmp_path):
    model = convert_folder(longrope(tmp_path / "phi3"), tmp_path / "out", sparsity=0.0, quantized=True).load()
    config = {"nbits": 8, "q_group_size": 6, "residual_length": 1, "axis_key": 0}
    options = GREEDY | REPORT | {"max_new_tokens": 20, "cache_implementation": "quantized", "cache_config": config}
    cache = model.generate(tokens(1, 25), **options)[CACHE]
    assert [layer.layout.quantization.bits for layer in cache.layers] == [8] * 4


class Other(DynamicCache):
    """A cache of somebody else."""


@pytest.mark.parametrize("family", ["llama", *WITH_STATES[:1]])
@pytest.mark.parametrize("cache", [DynamicCache, Other, tuple], ids=["dynamic", "other", "tuple"])
def test_other_caches_are_refused_at_every_door(mixed, family, cache):
    converted, ids = mixed(family), tokens(1, 6)
    model, base = converted.model, converted.load(AutoModel)
    doors = [model, model.get_decoder(), base, base.get_decoder()]
    doors += [partial(model.generate, **GREEDY, **options) for options in ({}, {"use_cache": False})]
    for door in doors:
        for name in {"past_key_values", CACHE}:
            with pytest.raises(TypeError, match=r"KVSurgeryCache, got \w+; leave past_key_values out"):
                door(ids, **{name: cache()})


@pytest.mark.parametrize("family", ["llama", *WITH_STATES[:1]])
def test_a_decoder_stepped_alone_with_the_cache_that_it_made(mixed, family):
    """Stock code makes one of its own there, which holds a first forward's input and goes no further."""
    decoder, ids = mixed(family).model.get_decoder(), tokens(1, 6)
    for first in (ids, ids[:, :1]):
        with torch.no_grad():
            cache = decoder(first, use_cache=True)[CACHE]
        with pytest.raises(TypeError, match="KVSurgeryCache, got DynamicCache"):
            decoder(ids[:, :1], **{CACHE: cache})


@pytest.mark.parametrize("first", [0, 10, 11])
@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("door", [lambda model: model, lambda model: model.get_decoder()], ids=["model", "decoder"])
def test_columns_other_than_those_after_the_cache_are_refused(model, door, new, first):
    cache = model(tokens(1, 10))[CACHE]
    columns = torch.arange(first, first + new)
    call = partial(door(model), tokens(1, new), cache_position=columns, **{CACHE: cache})
    if first == 10:
        call()
        return
    with pytest.raises(ValueError, match=r"cache_position must count the \d tokens of the input from 10 on"):
        call()


def test_columns_that_skip_some_are_refused(model):
    for options in ({}, {"use_cache": False}):
        with pytest.raises(ValueError, match="from 0 on"):
            model(tokens(1, 4), cache_position=torch.tensor([0, 1, 3, 4]), **options)


def test_both_names_of_a_cache_are_taken_by_every_version(model):
    ids = tokens(1, 20)
    expected = model(ids).logits[:, -1]
    for name in ("past_key_values", "cache"):
        cache = model(ids[:, :12])[CACHE]
        assert torch.allclose(model(ids[:, 12:], **{name: cache}).logits[:, -1], expected, atol=1e-4)
        assert cache.get_seq_length() == 20


def test_a_cache_of_another_checkpoint_is_named(mixed, all_full):
    cache = all_full("llama").model(tokens(1, 6))[CACHE]
    with pytest.raises(TypeError, match=r"got that of \S+kv_cache; give it to a model of the folder"):
        mixed("llama").model(tokens(1, 6), **{CACHE: cache})


def test_a_saved_cache_goes_on_once_the_model_is_loaded(checkpoint, monkeypatch, tmp_path):
    """As in another process, which has not imported the checkpoint's code."""
    converted, ids = convert_folder(checkpoint("llama"), tmp_path / "saved"), tokens(1, 40)
    torch.save(converted.model(ids[:, :30])[CACHE], tmp_path / "cache.pt")
    expected = converted.model.generate(ids, **GREEDY)
    for name in [*sys.modules]:
        if name.startswith("transformers_modules"):
            monkeypatch.delitem(sys.modules, name)
    model = converted.load()
    cache = torch.load(tmp_path / "cache.pt", weights_only=False)
    assert model.generate(ids, **GREEDY, **{CACHE: cache}).equal(expected)
