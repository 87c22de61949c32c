"""Images whose tokens see each other in both directions: Gemma 3, and the larger models of Gemma 4."""

from functools import cache

import pytest
import torch
import transformers
from transformers import AutoModel

from kvsurgery.templates.kv_layout import Selection
from tests.helpers.families import IMAGE, WITH_IMAGES, largest, tokens
from tests.helpers.reference import reference_logits
from tests.helpers.surgery import RECENT, SINK, convert_folder
from tests.templates.test_images import GREEDY, alone, logits, prompt
from tests.templates.test_kv_cache import module_of
from tests.templates.test_quantized import LOSSLESS

TYPES = {"gemma3-images": "token_type_ids", "gemma4-vision-images": "mm_token_type_ids"}
FAMILIES = [name for name in TYPES if name in WITH_IMAGES]  # transformers 4 lacks one
families = pytest.mark.parametrize("family", FAMILIES)
PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def joined(one, other):
    """A prompt of two others, one after the other in each row; their images come row by row."""
    both = {}
    for name, part in one.items():
        per_token = name in PER_TOKEN
        rows = len(one["input_ids"])
        pairs = zip(part.unflatten(0, (rows, -1)), other[name].unflatten(0, (rows, -1)), strict=True)
        both[name] = torch.cat([part, other[name]], 1) if per_token else torch.cat([torch.cat(pair) for pair in pairs])
    return both


def without_padding(inputs):
    """Three rows, of which none is padded."""
    ids = inputs["input_ids"].clone()
    ids[ids == 0] = 7
    return {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def two_images(family):
    """A batch padded on the left with two images in each row."""
    return joined(prompt(family), without_padding(prompt(family)))


def read(model, parts, **options):
    """Logits of a prompt that is read in parts, [batch, tokens, vocabulary], and the cache."""
    found, past = [], None
    for part in parts:
        with torch.no_grad():
            output = model(**part, past_key_values=past, use_cache=True, **options)
        past = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, 1), past


def cut(inputs, *columns):
    """Parts of one row that end before these columns, each with the images whose first tokens it has."""
    images = {name: value for name, value in inputs.items() if name not in PER_TOKEN}
    count, taken, begin, parts = len(images["pixel_values"]), 0, 0, []
    for end in (*columns, inputs["input_ids"].shape[1]):
        part = {name: inputs[name][:, begin:end] for name in PER_TOKEN if name in inputs and name != "attention_mask"}
        kinds = torch.nn.functional.pad((part["input_ids"] == IMAGE).int(), (1, 0))
        begun = min(int((kinds.diff() == 1).sum()), count - taken)
        if begun:
            part |= {name: value[taken : taken + begun] for name, value in images.items()}
        parts.append(part)
        taken += begun
        begin = end
    return parts


@families
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_all_full_heads_equal_the_stock_model(all_full, family, implementation):
    converted, inputs = all_full(family), two_images(family)
    options = {"dtype": torch.float32, "attn_implementation": implementation}
    stock = converted.auto.from_pretrained(converted.source, **options).eval()
    model = converted.load(attn_implementation=implementation)  # of the vision tower
    expected = logits(stock, inputs)
    for use_cache in (True, False):
        assert largest(logits(model, inputs, use_cache=use_cache) - expected, expected) <= 1e-5
    assert model.generate(**inputs, **GREEDY).equal(stock.generate(**inputs, **GREEDY))
    one_way = logits(stock, {**inputs, TYPES[family]: torch.zeros_like(inputs[TYPES[family]])})
    assert largest(one_way - expected, expected) > 1e-2


@families
@pytest.mark.parametrize("scores", [2**24, 1], ids=["one block of queries", "several blocks"])
def test_streaming_heads_equal_the_dense_reference(mixed, family, scores, monkeypatch):
    monkeypatch.setattr(module_of(mixed(family).model, "kv_softmax"), "SCORES", scores)
    converted, inputs = mixed(family), alone(two_images(family), 0)
    ids, options = inputs["input_ids"], {name: value for name, value in inputs.items() if name not in PER_TOKEN[:2]}
    expected = reference_logits(converted.stock, converted.full, SINK, RECENT, ids, **options)
    [first, *_, last] = (ids[0] == IMAGE).nonzero()[:, 0].tolist()
    for columns in ((), (first - 1,), (first - 1, last - 20, last + 1, last + 2)):
        found, cache = read(converted.model, cut(inputs, *columns))
        assert largest(found - expected, expected) <= 1e-4
        with torch.no_grad():  # decoding afterwards
            step = converted.model(torch.full((1, 1), 5), past_key_values=cache).logits
        longer = {TYPES[family]: torch.nn.functional.pad(options[TYPES[family]], (0, 1))}
        after = torch.nn.functional.pad(ids, (0, 1), value=5)
        dense = reference_logits(converted.stock, converted.full, SINK, RECENT, after, **{**options, **longer})
        assert largest(step - dense[:, -1:], dense) <= 1e-4


@families
def test_types_of_tokens_may_begin_with_the_cache(mixed, family):
    model, inputs = mixed(family).model, alone(two_images(family), 1)
    whole, _ = read(model, [inputs])
    first, second = cut(inputs, 33)
    found, _ = read(model, [first, {**second, TYPES[family]: inputs[TYPES[family]]}])
    assert largest(found - whole, whole) <= 1e-5


@families
def test_a_second_turn_with_an_image(mixed, family):
    converted, inputs = mixed(family), alone(two_images(family), 1)
    first, second = cut(inputs, 33)
    images = {name: value for name, value in second.items() if name not in PER_TOKEN}
    _, cache = read(converted.model, [first])
    if transformers.__version__.startswith("4."):
        pytest.skip("generate of this version leaves out images of later turns, of the original too")
    turn = {**images, "input_ids": inputs["input_ids"], TYPES[family]: inputs[TYPES[family]]}
    found = converted.model.generate(**turn, past_key_values=cache, **GREEDY)
    assert found.equal(converted.model.generate(**inputs, **GREEDY))


@families
def test_an_image_that_is_cut_is_refused(all_full, family):
    model, inputs = all_full(family).model, alone(prompt(family), 1)
    ids, types = inputs["input_ids"], inputs[TYPES[family]]
    expected, _ = read(model, [{"input_ids": ids, TYPES[family]: types}])
    [start, *_] = (ids[0] == IMAGE).nonzero()[:, 0].tolist()
    border = start + 4
    _, cache = read(model, [{"input_ids": ids[:, : start - 1]}])
    cache.activate_past_recording()
    model(ids[:, start - 1 : border], past_key_values=cache, **{TYPES[family]: types[:, start - 1 : border]})
    for given in (types[:, border:], types):
        for end in (border + 1, ids.shape[1]):  # a token alone sees no later one, but the cache should have seen it
            part = {TYPES[family]: given[:, : end - ids.shape[1] or None]}
            with pytest.raises(ValueError, match="read each image in one forward"):
                model(ids[:, border:end], past_key_values=cache, **part)
    cache.crop(start - 1)
    found = model(ids[:, start - 1 :], past_key_values=cache, **{TYPES[family]: types}).logits
    assert largest(found - expected[:, start - 1 :], expected) <= 1e-5


@families
def test_images_after_and_over_tiles_of_a_quantized_cache(checkpoint, mixed, family, tmp_path):
    """Without loss, so that the result must be that of 16 bits."""
    converted = convert_folder(checkpoint(family), tmp_path / "out", quantization=LOSSLESS, sparsity=0.5)
    text, last = tokens(1, 300, vocabulary=IMAGE - 3), alone(prompt(family), 0)
    before = {"input_ids": text, "attention_mask": torch.ones_like(text), TYPES[family]: torch.zeros_like(text)}
    images = {name: value for name, value in last.items() if name not in PER_TOKEN}
    inputs = {name: torch.cat([before[name], last[name]], 1) for name in before} | images
    expected, _ = read(mixed(family).model, [inputs])
    for columns in ((), (300,), (150, 299)):
        found, cache = read(converted.model, cut(inputs, *columns))
        assert largest(found - expected, expected) <= 1e-4
        assert any(max(layer.heads[0].groups[0].packed) for layer in cache.attention)


@pytest.fixture(scope="module")
def budgeted(checkpoint, tmp_path_factory):
    """Gemma 3 whose heads have budgets of 8 tokens on average."""

    def convert(hold=None):
        options = {"selection": Selection(window=4, kernel_size=3, hold=hold), "budget": 8, "rest": "budgeted"}
        return convert_folder(checkpoint("gemma3-images"), tmp_path_factory.mktemp("budgets") / f"{hold}", **options)

    return cache(convert)


def test_budgeted_heads_read_the_whole_prompt_and_later_images_over_what_they_kept(budgeted):
    converted, inputs = budgeted(), two_images("gemma3-images")
    expected = logits(converted.stock, inputs)
    for model in (converted.model, budgeted(hold=8).model):
        assert largest(logits(model, inputs, use_cache=True) - expected, expected) <= 1e-5
    row = alone(inputs, 1)
    parts = cut(row, 33)
    found, cache = read(converted.model, parts)
    assert largest(found[:, :33] - read(converted.stock, [row])[0][:, :33], found) <= 1e-5
    # the second image comes after the selection; without its last token, its first ones are others
    changed = {**parts[1], "pixel_values": parts[1]["pixel_values"].flip(-1)}
    other, _ = read(converted.model, [parts[0], changed])
    [start, *_] = (parts[1]["input_ids"][0] == IMAGE).nonzero()[:, 0].tolist()
    assert largest(other[:, 33 : 33 + start] - found[:, 33 : 33 + start], found) <= 1e-6
    assert largest(other[:, 33 + start] - found[:, 33 + start], found) > 1e-3
    assert cache.get_seq_length() == row["input_ids"].shape[1]


def test_images_within_a_selection_are_refused(budgeted):
    row = alone(two_images("gemma3-images"), 1)
    with pytest.raises(ValueError, match="give all images in the first prompt"):
        read(budgeted(hold=8).model, cut(row, 33))
    with pytest.raises(ValueError, match="without drafts"):
        budgeted().model.generate(**row, **GREEDY, prompt_lookup_num_tokens=3)


@families
def test_drafts_from_the_prompt_change_nothing(mixed, family):
    model, inputs = mixed(family).model, alone(two_images(family), 1)
    expected = model.generate(**inputs, **GREEDY)
    assert model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=3).equal(expected)


@families
def test_gradients_are_the_stock_models(all_full, family):
    converted, inputs = all_full(family), two_images(family)
    mask = inputs["attention_mask"]
    after_text = torch.nn.functional.pad(mask[:, :-1], (1, 0)).bool()  # what padding predicts does not count
    labels = inputs["input_ids"].where(after_text, -100)
    options, found = {"dtype": torch.float32, "attn_implementation": "eager"}, []
    for model in (converted.auto.from_pretrained(converted.source, **options).eval(), converted.load(**options)):
        model(**inputs, labels=labels, use_cache=False).loss.backward()
        found.append(model.get_decoder().layers[0].mlp.up_proj.weight.grad)
    assert largest(found[1] - found[0], found[0]) <= 1e-4  # 2e-5 in float32 on a processor without AVX-512


@families
def test_the_model_without_its_output_layer(mixed, family):
    converted, inputs = mixed(family), two_images(family)
    model, mask = converted.model, inputs["attention_mask"].bool()
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True).hidden_states[-1][mask]
        for inner in (model.model, converted.load(AutoModel)):
            for use_cache in (True, False):
                found = inner(**inputs, use_cache=use_cache).last_hidden_state[mask]
                assert largest(found - expected, expected) <= 1e-5


@families
@pytest.mark.parametrize("inner", [False, True], ids=["model", "without output layer"])
def test_packed_texts_with_images_are_refused(mixed, family, inner):
    model, inputs = mixed(family).model, without_padding(prompt(family))
    del inputs["attention_mask"]
    length = inputs["input_ids"].shape[1]
    positions = torch.cat([torch.arange(3), torch.arange(length - 3)])[None].expand(3, -1)
    with pytest.raises(ValueError, match="one text a row"):
        (model.model if inner else model)(**inputs, position_ids=positions, use_cache=False)


@families
def test_text_is_read_as_before(all_full, family):
    converted, ids = all_full(family), tokens(2, 40, vocabulary=IMAGE - 3)
    types = {TYPES[family]: torch.zeros_like(ids)}
    expected = converted.model(ids)[0]
    assert converted.model(ids, **types)[0].equal(expected)
    assert converted.model.generate(ids, **types, **GREEDY).equal(converted.stock.generate(ids, **types, **GREEDY))
