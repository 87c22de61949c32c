"""Texts packed into one row, which positions that start again tell apart: each is attended to alone."""

import copy
from itertools import accumulate, pairwise
from types import MethodType

import pytest
import torch
import transformers
from transformers import AutoModel

from kvsurgery.templates.kv_cache import CACHE
from tests.helpers.families import FAMILIES, IMAGE, WITH_IMAGES, WITH_STATES, largest, tokens

LENGTHS = 1, 20, 3, 21
SEPARATE = [name for name in FAMILIES if name not in WITH_STATES]
SAMPLE = [name for name in ("llama", "qwen2", "gemma2", "olmo3", "gemma3n") if name in FAMILIES]
PACKED = torch.cat([torch.arange(length) for length in LENGTHS])[None]
BOUNDS = list(accumulate(LENGTHS, initial=0))
FLASH = {"cu_seq_lens_q": torch.tensor(BOUNDS, dtype=torch.int32), "max_length_q": 21}
FLASH |= {"cu_seq_lens_k": FLASH["cu_seq_lens_q"], "max_length_k": 21}
TEXTS = torch.tensor([[text for text, length in enumerate(LENGTHS) for _ in range(length)]])


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **{"use_cache": False, **options}).logits


def each_alone(model, ids):
    return torch.cat([logits(model, ids[:, begin:end]) for begin, end in pairwise(BOUNDS)], 1)


@pytest.mark.parametrize("family", SEPARATE)
def test_each_text_is_alone(mixed, family):
    model, ids = mixed(family).model, tokens(2, BOUNDS[-1])
    expected = each_alone(model, ids)
    assert largest(logits(model, ids, position_ids=PACKED) - expected, expected) <= 1e-5
    assert largest(logits(model, ids) - expected, expected) > 1e-2


@pytest.mark.parametrize("family", SAMPLE)
def test_stock_attention_does_the_same(all_full, family):
    converted, ids = all_full(family), tokens(2, BOUNDS[-1])
    rows = torch.cat([PACKED, torch.arange(7, 7 + BOUNDS[-1])[None]])  # the second row is one text, not from 0 on
    for position_ids in (PACKED, rows):
        expected = logits(converted.stock, ids, position_ids=position_ids)
        assert largest(logits(converted.model, ids, position_ids=position_ids) - expected, expected) <= 1e-5


@pytest.mark.parametrize("family", [name for name in WITH_IMAGES if WITH_IMAGES[name][0] not in WITH_STATES])
def test_models_that_read_images(mixed, family):
    if family in ("glm4v-images", "glm4v_moe-images") and transformers.__version__.startswith("4."):
        pytest.skip("the stock classes of this version take no positions without a mask")
    model, ids = mixed(family).model, tokens(1, BOUNDS[-1], vocabulary=IMAGE - 2)
    expected = each_alone(model, ids)
    for options in ({}, {"use_cache": None}):
        assert largest(logits(model, ids, position_ids=PACKED, **options) - expected, expected) <= 1e-5


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if "rope_parameters" in FAMILIES[name] and name in WITH_STATES]
)
def test_positions_of_time_height_and_width(mixed, family):
    """An image's tokens share some of their three positions; a token with all three of its neighbor begins a text.

    Where the positions of text come first, these decide.
    """
    model, ids, text = mixed(family).model, tokens(1, 8), torch.arange(8).expand(1, 1, -1)
    image = torch.tensor([[0, 1, 1, 1, 1, 3, 4, 5], [0, 1, 1, 2, 2, 3, 4, 5], [0, 1, 2, 1, 2, 3, 4, 5]])[:, None]
    logits(model, ids, position_ids=image)
    logits(model, ids, position_ids=torch.cat([text, image]))
    for texts in ([1, 7], [3, 1, 4]):
        packed = torch.cat([torch.arange(length) for length in texts]).expand(1, 1, -1)
        for positions in (packed.expand(3, 1, -1), torch.cat([packed, text, text, text])):
            with pytest.raises(ValueError, match="cannot tell packed texts apart"):
                logits(model, ids, position_ids=positions)


GAPS = torch.cat([torch.arange(20), torch.arange(100, 125)])


@pytest.mark.parametrize("family", SAMPLE)
@pytest.mark.parametrize(
    "positions", [GAPS, 2 * torch.arange(45), torch.arange(45) / 2], ids=["a gap", "every second", "between"]
)
def test_positions_may_leave_gaps_as_in_stock_attention(all_full, family, positions):
    """Stock attention takes each gap for the border of a text only where there is no cache."""
    converted, ids = all_full(family), tokens(2, 45)
    for options in ({"use_cache": None}, {"use_cache": True}, {"use_cache": False}):
        expected, found = (
            logits(model, ids, position_ids=positions[None], **options) for model in (converted.stock, converted.model)
        )
        assert largest(found - expected, expected) <= 1e-5


def test_generation_goes_on_after_positions_with_gaps(all_full):
    converted, options = all_full("llama"), {"max_new_tokens": 8, "do_sample": False, "position_ids": GAPS[None]}
    expected, found = (model.generate(tokens(1, 45), **options) for model in (converted.stock, converted.model))
    assert found.equal(expected)


def checkpointed(converted):
    """Copies of the stock model and of the converted one, which checkpoint activations in training."""
    models = [copy.deepcopy(model) for model in (converted.stock, converted.model)]
    for model in models:
        model.gradient_checkpointing_enable()
        model.train()
    return models


@pytest.mark.parametrize("use_cache", [None, True])
@pytest.mark.parametrize("positions", [GAPS, torch.arange(45) // 4], ids=["a gap", "repeated"])
def test_gaps_where_activations_are_checkpointed(all_full, positions, use_cache):
    """Stock code makes no cache then, whatever it is asked for."""
    ids, models = tokens(2, 45), checkpointed(all_full("llama"))
    for called in (lambda model: model, lambda model: model.model):
        options = {"position_ids": positions[None], "use_cache": use_cache}
        expected, found = (called(model)(ids, **options)[0].detach() for model in models)
        assert largest(found - expected, expected) <= 1e-5


def test_checkpointing_where_no_gradients_are_wanted(all_full):
    """Stock code of some versions makes a cache then, which takes positions with gaps for one text."""
    ids, models = tokens(2, 45), checkpointed(all_full("llama"))
    with torch.no_grad():
        outputs = [model(ids, position_ids=GAPS[None]) for model in models]
        assert largest(outputs[1].logits - outputs[0].logits, outputs[0].logits) <= 1e-5
        if CACHE == "cache":
            after = [
                model(ids[:, :1], cache=output.cache).logits for model, output in zip(models, outputs, strict=True)
            ]
            assert largest(after[1] - after[0], after[0]) <= 1e-5
        else:
            assert outputs[1].past_key_values is None


def test_a_vision_tower_that_is_checkpointed_leaves_the_cache(mixed):
    model = copy.deepcopy(mixed("qwen2_vl-images").model).train()
    for part in model.get_submodule("model.visual").modules():
        part.gradient_checkpointing = True
    cache = model(tokens(1, 8, vocabulary=IMAGE - 2))[CACHE]
    assert cache.allocated_bytes()


def test_positions_that_repeat_are_separated_only_without_a_cache(all_full):
    converted, ids, positions = all_full("llama"), tokens(2, 40), torch.arange(40)[None] // 4
    expected, found = (logits(model, ids, position_ids=positions) for model in (converted.stock, converted.model))
    assert largest(found - expected, expected) <= 1e-5
    refused = pytest.raises(ValueError, match=r"position_ids repeat.*use_cache=False and no cache")
    with refused:
        converted.model(ids, position_ids=positions)
    cache = converted.model(ids[:, :20]).get(CACHE)
    with refused:
        converted.model(ids[:, 20:], position_ids=20 + positions[:, :20], use_cache=False, **{CACHE: cache})


def test_positions_of_three_rows_that_repeat_are_refused(mixed):
    model, ids = mixed("qwen2_vl-images").model, tokens(1, 40, vocabulary=IMAGE - 2)
    with pytest.raises(ValueError, match="position_ids repeat"):
        model(ids, position_ids=(torch.arange(40) // 4).expand(3, 1, -1))


def test_chunks_of_texts_that_do_not_begin_at_0_are_refused(mixed):
    """Stock code of some versions places the borders of chunks by position, and of others by column."""
    with pytest.raises(ValueError, match="number each text from 0"):
        mixed("llama4").model(tokens(1, 45), position_ids=GAPS[None], use_cache=False)


def test_every_door(mixed):
    """Trainers call the decoder, or replace `forward`; without a word on the cache, there is none."""
    converted, ids = mixed("llama"), tokens(1, BOUNDS[-1])
    model = converted.load()
    expected = each_alone(model, ids)
    assert model.config.use_cache

    def forward(self, input_ids, **options):
        return self.lm_head(self.model(input_ids, **options).last_hidden_state)

    base = converted.load(AutoModel)
    with torch.no_grad():
        found = [
            model(ids, position_ids=PACKED).logits,
            model.lm_head(model.get_decoder()(ids, None, PACKED)[0]),
            model.lm_head(base(ids, position_ids=PACKED).last_hidden_state),
            model(ids, position_ids=PACKED, **FLASH, seq_idx=TEXTS).logits,
        ]
        model.forward = MethodType(forward, model)
        found.append(model(ids, position_ids=PACKED))
    for states in found:
        assert largest(states - expected, expected) <= 1e-5
    for called in (model, model.get_decoder(), base):
        with pytest.raises(ValueError, match="use_cache=False"):
            called(ids, position_ids=PACKED, use_cache=True)


def test_gradients_are_those_of_the_texts(mixed):
    model, ids = mixed("llama").load().train(), tokens(1, BOUNDS[-1])
    model.gradient_checkpointing_enable()
    model.config.attention_dropout = 0.0
    gradients = []
    for parts in ([(ids, PACKED)], [(ids[:, begin:end], PACKED[:, begin:end]) for begin, end in pairwise(BOUNDS)]):
        model.zero_grad()
        for part, position_ids in parts:
            model(part, position_ids=position_ids).logits.square().sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert largest(gradients[0] - gradients[1], gradients[1]) <= 1e-5


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (FLASH, "cu_seq_lens_q"),
        ({"cu_seq_lens_k": FLASH["cu_seq_lens_k"]}, "cu_seq_lens_k"),
        ({"max_length_q": 21}, "max_length_q"),
        ({"seq_idx": TEXTS}, "seq_idx"),
        ({"position_ids": PACKED, "cu_seq_lens_q": torch.tensor([0, 22, BOUNDS[-1]])}, "cu_seq_lens_q"),
        ({"position_ids": PACKED, "attention_mask": torch.ones_like(PACKED)}, "attention_mask"),
        ({"attention_mask": TEXTS + 1}, "attention_mask"),
    ],
    ids=str,
)
def test_other_ways_to_tell_texts_apart_are_refused(mixed, options, named):
    model, ids = mixed("llama").model, tokens(1, BOUNDS[-1])
    for called in (model, model.get_decoder()):
        for use_cache in (False, True):
            with pytest.raises(ValueError, match=named):
                called(ids, use_cache=use_cache, **options)


def test_one_text_in_all_terms(mixed):
    model, ids = mixed("llama").model, tokens(1, 9)
    whole, position_ids = {"cu_seq_lens_q": torch.tensor([0, 9]), "max_length_q": 9}, torch.arange(9)[None]
    terms = {**whole, "seq_idx": torch.zeros(1, 9)}
    assert logits(model, ids, position_ids=position_ids, **terms).equal(logits(model, ids))


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": False},
        {"output_attentions": True},
        {"head_mask": torch.ones(4, 8)},
        {"position_bias": torch.zeros(1, 8, 9, 9)},
        {"sliding_window": 5},
        {"attention_mask": torch.ones(1, 1, 9, 9)},
        {"attention_mask": {"full_attention": torch.ones(1, 1, 9, 9, dtype=torch.bool)}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_that_attention_does_not_know_are_refused(mixed, options):
    model, ids = mixed("llama").model, tokens(1, 9)
    named = "is_causal" if "is_causal" in options else next(iter(options))
    for called in (model, model.get_decoder()):
        for use_cache in (False, True):
            with pytest.raises((TypeError, ValueError), match=named):
                called(ids, use_cache=use_cache, **options)


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_whatever_stock_code_calls_its_other_arguments(mixed, family):
    for use_cache in (False, True):
        with pytest.raises(ValueError, match="head_mask"):
            mixed(family).model(tokens(1, 9, vocabulary=IMAGE - 2), use_cache=use_cache, head_mask=torch.ones(4, 8))


@pytest.mark.parametrize("door", [lambda model: model, lambda model: model.get_decoder()], ids=["model", "decoder"])
def test_attention_weights_that_a_config_asks_for_are_refused(mixed, door):
    model, ids = mixed("llama").load(output_attentions=True), tokens(1, 9)
    with pytest.raises(ValueError, match="output_attentions"):
        door(model)(ids)
    door(model)(ids, output_attentions=False)


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_attention_weights_that_the_config_of_an_image_model_asks_for_are_refused(mixed, family):
    model, ids = mixed(family).load(output_attentions=True), tokens(1, 9, vocabulary=IMAGE - 2)
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids)
    model(ids, output_attentions=False)


@pytest.mark.parametrize("where", ["module", "config"])
def test_attention_in_both_directions_is_refused(mixed, where):
    model, ids = mixed("llama").load(), tokens(1, 9)
    if where == "config":
        model.config.is_causal = False
    else:
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
    for called in (model, model.get_decoder()):
        with pytest.raises(ValueError, match="see later ones"):
            called(ids)
