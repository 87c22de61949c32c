"""Models that read images: what holds for text holds for prompts with images in them."""

import json
import shutil
from functools import cache
from inspect import signature

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from kvsurgery.checkpoint.family import load_family
from tests.helpers.families import IMAGE, REFORM, START, WITH_IMAGES, largest, tokens, with_published_experts
from tests.helpers.reference import reference_logits
from tests.helpers.surgery import RECENT, SINK, convert_folder, reform_profile

families = pytest.mark.parametrize("family", WITH_IMAGES)
# REFORM does not cover the others, or their text models
gathering = pytest.mark.parametrize(
    "family",
    [
        name
        for name, (text, beside) in WITH_IMAGES.items()
        if text in REFORM and not load_family(beside.get("model_type", "llava")).no_reform
    ],
)
NEW = 6
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": [0, 2, IMAGE, START]}
SIZED = ("pixtral", "mistral3", "mistral3-ministral")
SIZES = [[16, 8], [8, 12], [12, 16]]  # of images, in pixels, in families where they may differ; patches have 4 x 4


def prompt(family, rows=3, tail=8):
    """A batch padded on the left, with an image in every row and `tail` tokens after it."""
    generator = torch.Generator().manual_seed(1)
    pixels, sizes = torch.randn(rows, 3, 16, 16, generator=generator), SIZES[:rows]
    images = {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)} if family in SIZED else {}
    counts = [height * width // 16 for height, width in sizes] if images else [16] * rows
    texts = tokens(rows, 12 + tail, vocabulary=IMAGE)
    parts = [
        torch.cat([text[: 11 - 4 * row], torch.tensor([START] + [IMAGE] * count), text[12:]])
        for row, (text, count) in enumerate(zip(texts, counts, strict=True))
    ]
    width = max(map(len, parts))
    ids = torch.stack([torch.cat([part.new_zeros(width - len(part)), part]) for part in parts])
    if family.startswith(("qwen", "glm")):  # it takes the patches of all images, one after the other
        side = 8 if family.startswith(("qwen2_vl", "glm")) else 4  # of which two by two are merged, and otherwise none
        grids = torch.tensor([[1, side, side]]).expand(rows, -1)
        patches = pixels.reshape(rows * side * side, -1).repeat(1, 2 if family.startswith("glm") else 1)  # frames
        images = {"pixel_values": patches, "image_grid_thw": grids}
        if not transformers.__version__.startswith("4."):  # which finds the images by their tokens
            images["mm_token_type_ids"] = (ids == IMAGE).int()
    if family.startswith("gemma4"):
        columns = torch.arange(8)  # four patches make a token
        places = torch.stack([columns.repeat(8), columns.repeat_interleave(8)], -1)
        images = {
            "pixel_values": torch.rand(rows, 64, 3 * 4 * 4, generator=generator),
            "image_position_ids": places.expand(rows, -1, -1),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    if family.startswith("gemma3"):
        images = {"pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()}
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), **(images or {"pixel_values": pixels})}


def alone(inputs, row):
    """One row of a batch, without its padding."""
    mask = inputs["attention_mask"]
    own = {name: value.unflatten(0, (len(mask), -1))[row] for name, value in inputs.items()}
    return {name: part[:, mask[row].bool()] if inputs[name].shape == mask.shape else part for name, part in own.items()}


def logits(model, inputs, **options):
    """Logits where there is no padding, one row after the other: [tokens, vocabulary]."""
    mask = inputs["attention_mask"]
    with torch.no_grad():
        return model(**inputs, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), **options).logits[mask.bool()]


@families
def test_without_trust_the_folder_is_the_stock_model(mixed, family):
    converted, inputs = mixed(family), prompt(family)
    model = converted.auto.from_pretrained(converted.folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert type(model) is type(converted.stock)
    expected = logits(converted.stock, inputs)
    assert largest(logits(model, inputs) - expected, expected) <= 1e-5


@families
def test_all_full_heads_equal_the_stock_model(all_full, family):
    converted, inputs = all_full(family), prompt(family)
    expected = logits(converted.stock, inputs)
    rounded_alike = converted.load(attn_implementation="eager")  # of the vision tower, as in the stock model
    assert largest(logits(rounded_alike, inputs) - expected, expected) <= 1e-5
    assert converted.model.generate(**inputs, **GREEDY).equal(converted.stock.generate(**inputs, **GREEDY))
    # the images matter
    blank = {**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}
    assert largest(logits(converted.model, blank) - expected, expected) > 1e-2


@families
def test_mixed_heads_equal_the_dense_reference(mixed, family):
    converted, inputs = mixed(family), prompt(family)
    ids, mask, options = inputs["input_ids"], inputs["attention_mask"], dict(list(inputs.items())[2:])
    options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = reference_logits(converted.stock, converted.full, SINK, RECENT, ids, mask, **options)[mask.bool()]
    for use_cache in (True, False):
        assert largest(logits(converted.model, inputs, use_cache=use_cache) - expected, expected) <= 1e-4
    assert largest(logits(converted.stock, inputs) - expected, expected) > 1e-2


@families
@pytest.mark.parametrize(
    "options",
    [{"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3}],
    ids=["several sequences", "beams"],
)
def test_generation_equals_generation_without_a_cache(mixed, family, options):
    model, inputs = mixed(family).model, prompt(family)
    if family == "llama4-images" and "mm_encoder_outputs" in signature(type(model).forward).parameters:
        pytest.skip("this version does not repeat the image features of this family, of the original neither")
    torch.manual_seed(7)
    found = model.generate(**inputs, **GREEDY | options)
    torch.manual_seed(7)
    assert found.equal(model.generate(**inputs, **GREEDY | options, use_cache=False))


@families
def test_rows_of_a_batch_equal_their_unpadded_selves(mixed, family):
    model, inputs = mixed(family).model, prompt(family)
    together = model.generate(**inputs, **GREEDY)
    for row in range(3):
        assert model.generate(**alone(inputs, row), **GREEDY)[0, -NEW:].equal(together[row, -NEW:])


@families
def test_the_cache_is_this_checkpoints_and_goes_on_in_a_second_turn(mixed, family):
    model, inputs = mixed(family).model, alone(prompt(family), 0)
    first = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    cache = first.past_key_values
    assert type(cache).__name__ == "KVSurgeryCache"
    layer = next(layer for layer in cache.attention if layer.layout.streaming and not layer.layout.native)
    slots = layer.layout.full * first.sequences.shape[1] + layer.layout.streaming * (SINK + RECENT)
    assert layer.nbytes == slots * 2 * layer.keys.shape[-1] * 4
    ids = torch.cat([first.sequences, tokens(1, 7, vocabulary=IMAGE)], 1)
    images = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in images:
            images[name] = (ids == IMAGE).int()
    assert model.generate(ids, **GREEDY, past_key_values=cache).equal(model.generate(ids, **images, **GREEDY))


@families
def test_saved_again_and_reloaded(mixed, family, tmp_path):
    converted, inputs = mixed(family), prompt(family)
    converted.load().save_pretrained(tmp_path / "again")
    again = type(converted)(converted.source, tmp_path / "again", converted.policy)
    assert logits(again.load(converted.auto), inputs).equal(logits(converted.model, inputs))
    names = {frozenset(load_file(at / "model.safetensors")) for at in (converted.folder, tmp_path / "again")}
    assert len(names) == 1


@families
def test_base_model(mixed, family):
    converted, inputs = mixed(family), alone(prompt(family), 0)
    with torch.no_grad():
        expected = converted.model(**inputs).logits
        found = converted.load(AutoModel)(**inputs, use_cache=True)
        # the base model of Llama 4 has the output layer
        logits = found.logits if family == "llama4-images" else converted.model.lm_head(found.last_hidden_state)
    assert largest(logits - expected, expected) <= 1e-6
    assert found.past_key_values.get_seq_length() == inputs["input_ids"].shape[1]


def test_a_causal_model_of_llama_4_has_this_cache_too(mixed):
    """Where nothing is named for that auto class, transformers loads the stock text model."""
    converted, inputs = mixed("llama4-images"), prompt("llama4-images")
    model = converted.load(AutoModelForCausalLM)
    assert logits(model, inputs).equal(logits(converted.model, inputs))


def test_other_attention_is_for_the_vision_tower(mixed):
    converted, inputs = mixed("pixtral"), prompt("pixtral")
    expected = logits(converted.model, inputs)
    for model in (converted.load(attn_implementation="eager"), converted.load()):
        model.set_attn_implementation("eager")
        assert model.config.vision_config._attn_implementation == "eager"
        assert largest(logits(model, inputs) - expected, expected) <= 1e-5


@pytest.mark.parametrize("family", ["pixtral", "llava-qwen2-tied"])
def test_names_as_transformers_holds_them_in_memory(checkpoint, mixed, family, tmp_path):
    (tmp_path / "source").mkdir()
    for path in checkpoint(family).iterdir():
        (tmp_path / "source" / path.name).write_bytes(path.read_bytes())
    weights = load_file(checkpoint(family) / "model.safetensors")
    renamed = {}
    for name, tensor in weights.items():
        inner = name.replace("language_model.model.", "language_model.")
        renamed["lm_head.weight" if "lm_head" in name else f"model.{inner}"] = tensor
    save_file(renamed, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    converted = convert_folder(tmp_path / "source", tmp_path / "out")
    inputs = prompt(family)
    assert converted.model.generate(**inputs, **GREEDY).equal(mixed(family).model.generate(**inputs, **GREEDY))


@pytest.mark.parametrize("family", ["qwen2_vl-images", "qwen2_5_vl-images"])
def test_published_names_and_a_flat_config(checkpoint, mixed, family, tmp_path):
    (tmp_path / "source").mkdir()
    weights = load_file(checkpoint(family) / "model.safetensors")
    renamed = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in weights.items()
    }
    save_file(renamed, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint(family) / "config.json").read_text())
    sections = {"type": "mrope", "mrope_section": [1, 1, 1]}
    flat = {**config.pop("text_config"), **config, "rope_theta": 1_000_000.0, "rope_scaling": sections}
    flat.pop("rope_parameters", None)
    (tmp_path / "source" / "config.json").write_text(json.dumps(flat))
    converted = convert_folder(tmp_path / "source", tmp_path / "out")
    inputs = prompt(family)
    assert converted.policy.orders == mixed(family).policy.orders
    assert converted.model.generate(**inputs, **GREEDY).equal(mixed(family).model.generate(**inputs, **GREEDY))
    expected = logits(mixed(family).stock, inputs)
    stock = converted.auto.from_pretrained(converted.folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert largest(logits(stock, inputs) - expected, expected) <= 1e-5


def test_experts_as_published(checkpoint, mixed, tmp_path):
    family = "qwen3_vl_moe-images"
    shutil.copytree(checkpoint(family), tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    save_file(with_published_experts(load_file(path)), path, {"format": "pt"})
    converted, inputs = convert_folder(tmp_path / "source", tmp_path / "out"), prompt(family)
    assert converted.model.generate(**inputs, **GREEDY).equal(mixed(family).model.generate(**inputs, **GREEDY))
    with torch.no_grad():
        found = converted.load(AutoModel)(**inputs).last_hidden_state
        assert found.equal(mixed(family).load(AutoModel)(**inputs).last_hidden_state)


def test_the_text_models_part_of_the_config_is_what_changes(checkpoint, mixed):
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (checkpoint("pixtral"), mixed("pixtral").folder)
    )
    assert after.keys() - before.keys() == {"auto_map", "kv_surgery"}
    assert after["vision_config"] == before["vision_config"]
    text = after["text_config"]
    assert (text["rope_theta"], text["rope_parameters"]["rope_theta"]) == (10_000.0, 10_000.0)
    assert after["auto_map"]["AutoModelForImageTextToText"] == "modeling_kvsurgery_llava.LlavaForConditionalGeneration"


@pytest.fixture(scope="module")
def long_prompts(checkpoint, tmp_path_factory):
    """A family's checkpoint that gathers 40 tokens of prompts beyond that."""

    def convert(family):
        source = checkpoint(family)
        sizes = {"chunk": 16, "encode_budget": 24, "keep": 3, "window": 4, "pool": 3, "recompute_budget": 40}
        sizes["query_length"] = 6
        out = tmp_path_factory.mktemp("out") / family
        return convert_folder(source, out, reform=reform_profile(source), sizes=sizes)

    return cache(convert)


@gathering
@pytest.mark.parametrize("retrieved", [False, True], ids=["by similarity", "by a retriever"])
def test_tokens_of_images_are_gathered_like_others(long_prompts, family, retrieved):
    converted, inputs = long_prompts(family), prompt(family, tail=60)
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    options = {**GREEDY, "return_gathered": True}
    scores = (ids == IMAGE).float() if retrieved else None
    output, places = converted.model.generate(**inputs, **options, token_scores=scores)
    assert output[:, : ids.shape[1]].equal(ids)
    for row, kept in enumerate(places):
        own = alone(inputs, row)
        with torch.no_grad():
            embeddings = converted.stock(**own, output_hidden_states=True).hidden_states[0]
        if retrieved:
            options["token_scores"] = scores[row : row + 1, mask[row]]
        expected, [same] = converted.model.generate(inputs_embeds=embeddings, **options)
        assert kept.equal(same)
        assert output[row : row + 1, ids.shape[1] :].equal(expected)
        assert len(kept) == 40
        assert not retrieved or (ids[row, mask[row]][kept] == IMAGE).sum() == (ids[row] == IMAGE).sum()


@gathering
def test_a_budget_that_holds_the_images_is_plain_generation(long_prompts, mixed, family):
    inputs = prompt(family, tail=60)
    expected = mixed(family).model.generate(**inputs, **GREEDY)
    assert long_prompts(family).model.generate(**inputs, **GREEDY, recompute_budget=200).equal(expected)


def test_beams_and_processors_see_the_gathered_prompt_with_its_images(long_prompts, mixed):
    converted, inputs = long_prompts("pixtral"), alone(prompt("pixtral", tail=60), 1)
    ids, options = inputs["input_ids"], {**GREEDY, "num_beams": 3, "no_repeat_ngram_size": 2}
    output, [kept] = converted.model.generate(**inputs, **options, return_gathered=True)
    with torch.no_grad():
        embeddings = converted.stock(**inputs, output_hidden_states=True).hidden_states[0]
    expected = mixed("pixtral").model.generate(ids[:, kept], inputs_embeds=embeddings[:, kept], **options)
    assert output.equal(torch.cat([ids, expected[:, 40:]], 1))
