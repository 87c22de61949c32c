"""A quantized cache: what it computes, in which bytes, and what it refuses.

With one scale per element nothing is lost, so that where tokens go can be checked exactly; what codes lose is checked
apart.
"""

import copy
import math

import pytest
import torch

from kvsurgery.templates import kv_layout
from kvsurgery.templates.kv_layout import Quantization, Selection
from tests.helpers import emitted
from tests.helpers.cases import some
from tests.helpers.families import CACHE_PATHS, largest, make, rounding, tokens
from tests.helpers.slow_cache import SlowCache
from tests.helpers.surgery import convert_folder
from tests.templates.test_exactness import left_padded, logits
from tests.templates.test_kv_cache import module_of

GREEDY = {"do_sample": False, "suppress_tokens": [0, 2]}
LOSSLESS = Quantization(**emitted.LOSSLESS)
PROMPT = 300  # two tiles and more
TILE = kv_layout.TILE


@pytest.fixture(scope="module")
def quantized(checkpoint, tmp_path_factory):
    """Conversions with half of the heads streaming, and the others quantized."""
    made = {}

    def make(family, quantization, **options):
        key = (family, quantization, *options.items())
        if key not in made:
            options = options or {"sparsity": 0.5}
            out = tmp_path_factory.mktemp("quantized") / family
            made[key] = convert_folder(checkpoint(family), out, quantization=quantization, **options)
        return made[key]

    return make


def reference(converted, quantization, parts):
    """Logits of the stock model with every head full, over a `SlowCache`."""
    cache, found = SlowCache(quantization, converted.stock.config), []
    for part in parts:
        with torch.no_grad():
            found.append(converted.stock(part, past_key_values=cache).logits)
    return torch.cat(found, 1)


def in_parts(model, parts, cache=None, **options):
    found = []
    for part in parts:
        with torch.no_grad():
            output = model(part, past_key_values=cache, **options)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, 1), cache


@pytest.mark.parametrize(
    ("quantization", "family"),
    some(
        [
            (Quantization(8), "qwen3"),
            (Quantization(4, residual=0), "gemma2"),
            (Quantization(2, residual=30), "qwen3"),
            (Quantization(4, "per-token", 8, residual=1), "gemma3"),
            (Quantization(8, "per-token", residual=40), "llama"),
            (Quantization(4, "kivi", 16, residual=3), "qwen3_moe"),
            (Quantization(8, residual=7), "llama-tied-mha"),
            (Quantization(3, residual=5), "qwen3"),
            (Quantization(4, residual=2, rotate="both", sink=0), "qwen3"),
            (Quantization("k3v2", residual=5), "qwen3"),
            (Quantization("k2v8", "per-token", 8, residual=1), "gemma3"),
            (Quantization("k8v3", residual=4, rotate="both"), "qwen3"),
        ],
        2,
    ),
    ids=str,
)
def test_steps_equal_a_cache_that_quantizes_tile_by_tile(quantized, checkpoint, quantization, family):
    converted = quantized(family, quantization, sparsity=0.0)
    later = quantization.residual % TILE  # a tile is full a few steps after these parts
    ids = tokens(1, 390)
    parts = ids.split([140, 3, 110 + later, *[1] * 20, 117 - later], 1)
    found, cache = in_parts(converted.model, parts)
    expected = reference(converted, quantization, parts)
    exact = logits(converted.stock, ids)
    # not nearer, since a state on the edge of two codes may take the other one
    assert (found - expected).norm() <= 0.05 * (exact - expected).norm()
    assert largest((found - expected)[:, :140], expected) <= 1e-5
    assert max(cache.layers[-1].heads[0].groups[0].packed) == TILE * quantization.tiles(390 - quantization.sink)


@pytest.mark.parametrize("sizes", [[PROMPT], [1] * 20, [7, 150, 1, 200], [128, 128, 128]], ids=str)
def test_without_loss_every_way_in_is_exact(quantized, mixed, sizes):
    converted, plain = quantized("gemma2", LOSSLESS), mixed("gemma2")
    ids = tokens(2, sum(sizes) + 150)
    expected = logits(plain.model, ids)
    found, cache = in_parts(converted.model, ids.split([*sizes, *[1] * 150], 1))
    assert largest(found - expected, expected) <= 1e-5
    assert max(cache.layers[-1].heads[0].groups[0].packed or [0]) == TILE * LOSSLESS.tiles(ids.shape[1] - LOSSLESS.sink)


@pytest.mark.parametrize("family", some(CACHE_PATHS, 2))
def test_without_loss_every_cache_path_is_exact(quantized, mixed, family):
    ids = tokens(1, 330)
    expected = logits(mixed(family).model, ids)
    found, cache = in_parts(quantized(family, LOSSLESS).model, ids.split([150, 1, 170, *[1] * 9], 1))
    assert largest(found - expected, expected) <= rounding(family)
    assert any(max(layer.heads[0].groups[0].packed) for layer in cache.attention)


def test_rows_of_a_padded_batch_pack_tiles_of_their_own(quantized):
    model = quantized("llama", LOSSLESS).model
    lengths = [400, 270, 131, 4]
    ids, mask, position_ids = left_padded(tokens(4, 400), lengths)
    cache, found = None, []
    for start, stop in ((0, 200), (200, 203), *((at, at + 1) for at in range(203, 400))):
        with torch.no_grad():
            output = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=position_ids[:, start:stop],
                past_key_values=cache,
            )
        cache = output.past_key_values
        found.append(output.logits)
    found = torch.cat(found, 1)
    for row, length in enumerate(lengths):
        expected = logits(model, ids[row : row + 1, 400 - length :])
        assert largest(found[row : row + 1, 400 - length :] - expected, expected) <= 1e-5
        assert cache.layers[0].heads[0].groups[0].packed[row] == TILE * LOSSLESS.tiles(length - LOSSLESS.sink)


@pytest.mark.parametrize(
    ("bits", "batch", "prompt", "new"),
    [
        *((8, 1, PROMPT, 20), (8, 3, 10, 130), (4, 2, 133, 1), (3, 1, PROMPT, 20), (3, 2, 133, 1), (2, 1, PROMPT, 20)),
        *(("k3v2", 2, PROMPT, 20), ("k2v8", 1, 133, 1)),
    ],
)
def test_allocated_bytes_are_the_predicted_ones(quantized, bits, batch, prompt, new):
    converted = quantized("qwen3", Quantization(bits, residual=4))
    output = converted.model.generate(tokens(batch, prompt), **GREEDY, max_new_tokens=new, return_dict_in_generate=True)
    cache = output.past_key_values
    layout = module_of(converted.model, "kv_layout").KVLayout.from_config(converted.model.config)
    assert cache.allocated_bytes() == layout.kv_bytes(batch, prompt, new, itemsize=4)
    storage = {
        buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes()
        for layer in cache.layers
        for buffer in (layer.keys, layer.values, *(layer.storage.tiles or ()))
    }
    assert sum(storage.values()) == cache.allocated_bytes()
    # by hand: half of 16 heads full, 16 channels, 4 bytes a scale
    full, tail = prompt + new, min(prompt + new, 4 + 4 + TILE)
    tile = TILE * 16 * sum(kv_layout.Widths.of(bits)) // 8 + (2 * 16 + 2 * TILE) * 4
    streaming = min(full, 3 + 5)
    assert cache.allocated_bytes() == batch * 8 * ((tail + streaming) * 2 * 16 * 4 + max(0, full - 9) // TILE * tile)


def test_a_tile_is_written_once(quantized):
    model = quantized("qwen3", Quantization(4, residual=4)).model
    cache = in_parts(model, [tokens(1, 300)])[1]
    groups = [layer.heads[0].groups[0] for layer in cache.layers if layer.layout.full]
    first = [[part[:, :, :2].clone() for part in group.tiles] for group in groups]
    in_parts(model, tokens(1, 200, seed=1).split(1, 1), cache)
    again = [[part[:, :, :2] for part in group.tiles] for group in groups]
    assert all(
        one.equal(other)
        for before, after in zip(first, again, strict=True)
        for one, other in zip(before, after, strict=True)
    )
    assert cache.layers[0].heads[0].groups[0].packed == [384]


@pytest.mark.parametrize("options", [{"budget": 180}, {"budget": 150, "full_heads": 6}], ids=["all", "some full"])
def test_budgeted_heads(checkpoint, quantized, tmp_path, options):
    """What a head has selected is packed like what a full head keeps."""
    options |= {"rest": "budgeted", "beta": 1.3, "selection": Selection(4, 3)}
    plain = convert_folder(checkpoint("llama"), tmp_path / "plain", **options)
    lossless = convert_folder(checkpoint("llama"), tmp_path / "lossless", quantization=LOSSLESS, **options)
    ids, mask, position_ids = left_padded(tokens(3, 400), [400, 330, 100])
    prompt = {"attention_mask": mask, "position_ids": position_ids}
    caches = [converted.model(ids, **prompt).past_key_values for converted in (plain, lossless)]
    assert caches[1].layers[0].heads[-1].groups[0].packed[0] > 0
    for size in (1, 9, 123, *[1] * 10):
        mask = torch.cat([mask, torch.ones(3, size, dtype=torch.long)], 1)
        later = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1)[:, -size:]}
        with torch.no_grad():
            expected, found = (
                converted.model(tokens(3, size, seed=size), past_key_values=cache, **later).logits
                for converted, cache in zip((plain, lossless), caches, strict=True)
            )
        assert largest(found - expected, expected) <= 1e-5
    output = lossless.model.generate(tokens(2, 400), **GREEDY, max_new_tokens=30, return_dict_in_generate=True)
    layout = module_of(lossless.model, "kv_layout").KVLayout.from_config(lossless.model.config)
    assert output.past_key_values.allocated_bytes() == layout.kv_bytes(2, 400, 30, itemsize=4)


def test_beams_assisted_decoding_and_copies(quantized, mixed):
    model, plain = quantized("llama", LOSSLESS).model, mixed("llama").model
    ids, options = tokens(1, 160, seed=3).repeat(1, 2), GREEDY | {"max_new_tokens": 90}
    expected = plain.generate(ids, **options)
    assert model.generate(ids, **options).equal(expected)
    assert model.generate(ids, **options, prompt_lookup_num_tokens=6).equal(expected)
    assert model.generate(ids, **options, assistant_model=quantized("llama", LOSSLESS).load()).equal(expected)
    rows = torch.cat([ids, tokens(1, 320, seed=4)])
    mask = torch.ones_like(rows)
    mask[1, :77] = 0
    beams = options | {"num_beams": 3, "attention_mask": mask, "max_new_tokens": 60}
    assert model.generate(rows * mask, **beams).equal(plain.generate(rows * mask, **beams))


def test_assisted_decoding_costs_what_is_predicted(quantized):
    model = quantized("qwen3", Quantization(4, residual=4)).model
    ids = tokens(1, 130, seed=3).repeat(1, 2)
    output = model.generate(ids, **GREEDY, max_new_tokens=40, prompt_lookup_num_tokens=6, return_dict_in_generate=True)
    cache, layout = output.past_key_values, module_of(model, "kv_layout").KVLayout.from_config(model.config)
    assert cache.columns.margin
    assert cache.allocated_bytes() == layout.kv_bytes(1, 260, 40, margin=cache.columns.margin, itemsize=4)


def test_what_is_not_packed_can_be_taken_back(quantized):
    model = quantized("llama", LOSSLESS, sparsity=0.0).model
    ids = tokens(1, 420)
    expected = logits(model, ids)
    cache = in_parts(model, ids[:, :410].split([400, *[1] * 10], 1))[1]
    packed = cache.layers[0].heads[0].groups[0].packed[0]
    assert packed == 384
    cache.crop(-LOSSLESS.residual)
    found, cache = in_parts(model, ids[:, 405:].split(1, 1), cache)
    assert largest(found - expected[:, 405:], expected) <= 1e-5
    cache.crop(LOSSLESS.sink + 384 - 420)
    with pytest.raises(ValueError, match="are quantized"):
        cache.crop(-1)
    assert cache.get_seq_length() == LOSSLESS.sink + 384


class TestAsTransformersAsksForIt:
    def test_bits_for_one_call(self, mixed, quantized):
        model = mixed("qwen3").model
        ids, options = tokens(2, PROMPT), GREEDY | {"max_new_tokens": 20, "return_dict_in_generate": True}
        asked = {"cache_implementation": "quantized", "cache_config": {"nbits": 8, "residual_length": 4}}
        cache = model.generate(ids, **options, **asked).past_key_values
        same = quantized("qwen3", Quantization(8, residual=4)).model.generate(ids, **options)
        assert cache.allocated_bytes() == same.past_key_values.allocated_bytes()
        assert model.generate(ids, **options, **asked).sequences.equal(same.sequences)
        assert model.generate(ids, **options).past_key_values.layers[0].storage.tiles is None

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            ({}, Quantization(4)),
            ({"nbits": 3}, Quantization(3)),
            ({"nbits": "k3v2"}, Quantization("k3v2")),
            ({"backend": "quanto", "nbits": 2, "axis_key": 0, "axis_value": 0}, Quantization(2, "per-token")),
            ({"backend": "HQQ", "axis_key": 1, "axis_value": 1, "q_group_size": 8}, Quantization(4, "per-token", 8)),
            ({"backend": "quanto", "axis_key": -1, "residual_length": 64}, Quantization(4, residual=64)),
        ],
        ids=str,
    )
    def test_its_words(self, mixed, asked, expected):
        model = mixed("qwen3").model
        found = module_of(model, "kv_kinds").quantized_code().requested_quantization(asked, model.config)
        assert vars(found) == vars(expected)

    @pytest.mark.parametrize(
        ("asked", "says"),
        [
            ({"nbits": 5}, "8, 4, 3 or 2 bits"),
            ({"nbits": "v2k3"}, "such as k3v2; got 'v2k3'"),
            ({"q_group_size": 12}, "does not divide head_dim 16"),
            ({"compute_dtype": "float16"}, "compute_dtype"),
            ({"backend": "gguf"}, "quanto and hqq"),
            ({"axis_value": -1}, "axis_value 0"),
            ({"residual_length": -1}, "residual"),
        ],
        ids=str,
    )
    def test_what_it_cannot_have(self, mixed, asked, says):
        with pytest.raises(ValueError, match=says):
            mixed("qwen3").model.generate(tokens(1, 4), cache_implementation="quantized", cache_config=asked)


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 5},
        {"bits": "k5v2"},
        {"bits": "k3"},
        {"bits": "4"},
        {"bits": 4.0},
        {"scheme": "nuq"},
        {"group_size": 7},
        {"group_size": 0},
        {"group_size": 2},
        {"residual": -1},
        {"residual": 1.5},
        {"sink": -1},
        {"sink": None},
        {"rotate": "keys"},
        {"clip": 1},
        {"rotate": None},
        {"clip": None},
        {"bits": None},
    ],
    ids=str,
)
def test_layout_sections_that_contradict_themselves(quantized, change):
    config = copy.deepcopy(quantized("qwen3", Quantization(4, residual=4)).model.config.to_dict())
    kv_layout.KVLayout.from_config(config)
    config["kv_surgery"]["quantization"] |= change
    with pytest.raises(ValueError, match="malformed"):
        kv_layout.KVLayout.from_config(config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(quantized, dtype):
    model = quantized("qwen3", Quantization(8, residual=4)).load(dtype=dtype)
    exact = quantized("qwen3", Quantization(8, residual=4)).model
    ids = tokens(1, PROMPT)
    found, cache = in_parts(model, ids.split([200, *[1] * 100], 1))
    expected, _ = in_parts(exact, ids.split([200, *[1] * 100], 1))
    assert cache.layers[0].storage.tiles.key_scales.dtype == dtype
    assert ((found.float() - expected).norm() / expected.norm()).item() <= (0.02 if dtype == torch.float16 else 0.1)


def test_more_bits_are_nearer(quantized, tmp_path):
    """Relative error of logits after a prompt that is all but its end quantized."""
    folder = make("qwen3", tmp_path / "wide", head_dim=64, max_position_embeddings=1024)
    ids = tokens(1, 700)
    errors = []
    for bits in (8, 4, 3, 2):
        converted = convert_folder(
            folder, tmp_path / str(bits), sparsity=0.0, quantization=Quantization(bits, residual=8)
        )
        found, _ = in_parts(converted.model, ids.split([640, *[1] * 60], 1))
        expected = logits(converted.stock, ids)
        errors.append(((found - expected)[:, 640:].norm() / expected[:, 640:].norm()).item())
    assert errors[0] < errors[1] / 4 < errors[2] / 6 < errors[3] / 9
    assert errors[0] <= 1e-2
    assert math.isfinite(errors[3])
