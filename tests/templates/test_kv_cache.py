"""The cache holds what it says, in the bytes that the layout predicts, and refuses what it cannot do right."""

import copy
import gc
import pickle
import sys
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from kvsurgery.templates.kv_columns import check_padding
from kvsurgery.templates.kv_layout import LayerLayout
from kvsurgery.templates.kv_storage import Storage
from tests.helpers.cache_operations import stock_and_emitted
from tests.helpers.families import largest, tokens
from tests.templates.test_exactness import left_padded, logits

GREEDY = {"do_sample": False, "suppress_tokens": [0, 2]}


def module_of(model, name):
    """A helper module of a loaded checkpoint's own copy of the emitted code."""
    return sys.modules[type(model).__module__.rsplit(".", 1)[0] + "." + name]


@pytest.fixture(scope="module")
def llama(mixed):
    return mixed("llama").model


@pytest.fixture(scope="module")
def layout(llama):
    return module_of(llama, "kv_layout").KVLayout.from_config(llama.config)


@given(
    sink=st.integers(0, 4),
    recent=st.integers(1, 6),
    padding=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
@settings(max_examples=150)
def test_a_ring_holds_sinks_and_the_newest_positions(sink, recent, padding, chunks):
    # every element of a token is its column, so that what a slot holds can be read off it
    storage = Storage(LayerLayout(((0, 2),), sink, recent))
    group = storage.add(torch.empty(len(padding), 2, 0, 3), 2, False, sink, recent)
    group.align(padding)
    seen = 0
    for chunk in chunks:
        columns = torch.arange(seen, seen + chunk, dtype=torch.float32)
        states = columns[None, None, :, None].expand(len(padding), 2, -1, 3)
        storage.fit(seen + chunk)
        group.store(seen, states, -states)
        seen += chunk
    assert group.slots == min(seen, sink + recent)
    lengths = torch.tensor([[seen - pad] for pad in padding])
    held = group.positions(lengths, group.slots, group.ring)
    for row, pad in enumerate(padding):
        length = seen - pad
        expected = {p for p in range(max(length, 0)) if p < sink or length - p <= recent}
        found = {p: slot for slot, p in enumerate(held[row].tolist()) if 0 <= p < length}
        assert set(found) == expected
        for position, slot in found.items():
            assert (group.keys[row, :, slot] == position + pad).all()
            assert (group.values[row, :, slot] == -(position + pad)).all()
            assert group.slot(position) == slot


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
@pytest.mark.parametrize(("batch", "prompt", "new"), [(1, 20, 7), (3, 4, 30), (2, 6, 1)])
def test_allocated_bytes_are_the_predicted_ones(mixed, family, batch, prompt, new):
    model = mixed(family).model
    output = model.generate(tokens(batch, prompt), max_new_tokens=new, **GREEDY, return_dict_in_generate=True)
    layout = module_of(model, "kv_layout").KVLayout.from_config(model.config)
    assert output.past_key_values.allocated_bytes() == layout.kv_bytes(batch, prompt, new, itemsize=4)
    assert layout.kv_bytes(batch, prompt, new) <= layout.dense_bytes(batch, prompt, new)


def test_bytes_before_surgery_are_those_of_the_stock_cache(mixed, layout):
    cache = mixed("llama").stock(tokens(2, 21)).past_key_values
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert layout.dense_bytes(2, 21, itemsize=4) == stored


def test_beams_and_assisted_decoding_cost_what_is_predicted(mixed, llama, layout):
    ids = tokens(1, 30)
    options = GREEDY | {"max_new_tokens": 10, "return_dict_in_generate": True}
    beams = llama.generate(ids, num_beams=3, **options).past_key_values
    assert beams.allocated_bytes() == layout.kv_bytes(3, 30, 10, itemsize=4)
    assisted = llama.generate(ids.repeat(1, 2), prompt_lookup_num_tokens=4, **options).past_key_values
    assert 0 < assisted.columns.margin <= 6
    # the last draft may go beyond the last token
    assert assisted.allocated_bytes() == layout.kv_bytes(1, 60, 10 + 4, margin=assisted.columns.margin, itemsize=4)


def test_streaming_heads_stay_constant_and_storage_is_not_copied(llama, layout):
    cache = llama(tokens(1, 20)).past_key_values
    places, bytes_at = set(), {}
    for step in range(100):
        llama(tokens(1, 1, seed=step), past_key_values=cache)
        places.add(cache.layers[0].heads[0].groups[0].keys.data_ptr())
        bytes_at[step] = cache.layers[0].heads[-1].groups[0].keys.nbytes
    assert len(places) < 12  # 100 steps: storage grew by a quarter each time, not token by token
    assert len(set(bytes_at.values())) == 1
    capacity = cache.layers[0].capacity
    assert 120 <= capacity <= 150
    assert cache.allocated_bytes() == layout.kv_bytes(1, capacity, itemsize=4)


def test_a_hub_configs_max_length_is_not_preallocated(mixed):
    model = mixed("llama").load()
    model.generation_config.max_length = 100_000
    model.generation_config.eos_token_id = list(range(3, 101))
    output = model.generate(tokens(1, 10), do_sample=False, return_dict_in_generate=True)
    assert output.past_key_values.layers[0].capacity < 20


def test_cropping_and_going_on(llama):
    ids = tokens(1, 60)
    for length in (4, 30):
        cache = llama(ids[:, :length]).past_key_values
        cache.activate_past_recording()
        llama(tokens(1, 9, seed=5), past_key_values=cache)
        cache.crop(-7)
        llama(tokens(1, 3, seed=6), past_key_values=cache)
        cache.crop(-5)
        assert cache.get_seq_length() == length
        found = llama(ids[:, length : length + 8], past_key_values=cache).logits
        expected = logits(llama, ids[:, : length + 8])[:, length:]
        assert largest(found - expected, expected) <= 1e-5


@torch.no_grad()
def test_single_tokens_may_be_taken_back_after_a_decode_step(llama):
    """The step that widens the ring sees no more of it than the window."""
    ids = tokens(1, 60)
    cache = llama(ids[:, :30]).past_key_values
    llama(ids[:, 30:31], past_key_values=cache)
    cache.activate_past_recording()
    for column in (31, 32, 33):
        found = llama(ids[:, column : column + 1], past_key_values=cache).logits
        expected = logits(llama, ids[:, : column + 1])[:, column:]
        assert largest(found - expected, expected) <= 1e-5
    cache.crop(-2)
    found = llama(ids[:, 32:33], past_key_values=cache).logits
    expected = logits(llama, ids[:, :33])[:, 32:]
    assert largest(found - expected, expected) <= 1e-5


def test_cropping_padded_rows(llama):
    ids, mask, position_ids = left_padded(tokens(2, 40), [40, 26])
    options = {"attention_mask": mask, "position_ids": position_ids}
    expected = logits(llama, ids, **options)
    first = {name: value[:, :30] for name, value in options.items()}
    cache = llama(ids[:, :30], **first).past_key_values
    cache.activate_past_recording()
    wrong = torch.full((2, 6), 50)
    llama(wrong, attention_mask=mask[:, :36], position_ids=position_ids[:, 30:36], past_key_values=cache)
    cache.crop(30)  # transformers 4 says how many stay
    found = llama(ids[:, 30:], attention_mask=mask, position_ids=position_ids[:, 30:], past_key_values=cache).logits
    assert largest(found - expected[:, 30:], expected) <= 1e-5


@torch.no_grad()
def test_the_decoder_can_be_called_after_a_crop(llama):
    ids = tokens(1, 20)
    cache = llama(ids).past_key_values
    cache.crop(-1)
    found = llama.model(ids[:, :3], past_key_values=cache).last_hidden_state
    expected = llama.model(torch.cat([ids[:, :-1], ids[:, :3]], 1)).last_hidden_state[:, -3:]
    assert largest(found - expected, expected) <= 1e-5


def test_short_sequences_can_be_cropped_anywhere(llama):
    cache = llama(tokens(1, 8)).past_key_values  # sink 3 + recent 5: nothing was dropped
    cache.crop(-6)
    ids = torch.cat([tokens(1, 8)[:, :2], tokens(1, 20, seed=8)], 1)
    found = llama(ids[:, 2:], past_key_values=cache).logits
    expected = logits(llama, ids)[:, 2:]
    assert largest(found - expected, expected) <= 1e-5


def test_a_crop_past_what_was_kept_is_refused(llama):
    cache = llama(tokens(1, 30)).past_key_values
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-4)
    assert cache.get_seq_length() == 30


def test_a_cache_outlives_inference_mode(llama):
    ids = tokens(2, 30)
    with torch.inference_mode():
        cache = llama(ids[:, :20]).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
    found = llama(ids[[1, 0], 20:], past_key_values=cache).logits
    expected = logits(llama, ids)[[1, 0], 20:]
    assert largest(found - expected, expected) <= 1e-5


def test_padding_of_a_failed_first_forward_is_forgotten(llama):
    ids, mask, _ = left_padded(tokens(2, 20), [20, 15])
    cache = module_of(llama, "kv_cache").KVSurgeryCache(llama.config)
    with pytest.raises(RuntimeError):
        llama(inputs_embeds=torch.zeros(2, 20, 7), attention_mask=mask, past_key_values=cache)
    expected = logits(llama, ids)
    assert largest(llama(ids, past_key_values=cache).logits - expected, expected) <= 1e-5


def test_a_decode_step_does_not_wait_for_the_device(mixed, monkeypatch):
    for family in ("llama", "gemma2"):
        model = mixed(family).model
        ids, mask, position_ids = left_padded(tokens(2, 31), [31, 20])
        options = {"attention_mask": mask[:, :30], "position_ids": position_ids[:, :30]}
        cache = model(ids[:, :30], **options).past_key_values

        def wait(*args):
            raise AssertionError("waits for the device")

        with monkeypatch.context() as patch:
            for name in ("tolist", "item", "__bool__", "__int__", "__index__"):
                patch.setattr(torch.Tensor, name, wait)
            patch.setattr(torch.Tensor, "count_nonzero", lambda mask: mask.numel() - 11)  # which is asked on a CPU only
            model(ids[:, 30:], attention_mask=mask, position_ids=position_ids[:, 30:], past_key_values=cache)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["", "pickle"])
def test_cache_can_be_copied_reset_and_used_for_other_rows(llama, copied):
    ids = tokens(3, 30)
    cache = llama(ids[:, :20]).past_key_values
    other = copied(cache)
    expected = llama(ids[:, 20:], past_key_values=cache).logits
    llama(ids[:, 20:25], past_key_values=other)
    other.batch_select_indices(torch.tensor([2, 0]))
    found = llama(ids[[2, 0], 25:], past_key_values=other).logits
    assert largest(found - expected[[2, 0], 5:], expected) <= 1e-5
    cache.reset()
    assert cache.get_seq_length() == cache.allocated_bytes() == 0
    assert largest(llama(ids, past_key_values=cache).logits[:, 20:] - expected, expected) <= 1e-5


PICKLED = {
    "streaming": [{"blocks": [[2, 2]], "sink": 2, "recent": 9}],
    "budgeted": [{"blocks": [[1, 3]], "budgets": [5, 9, 0]}],
    "quantized": [{"blocks": [[2, 2]], "sink": 2, "recent": 9}],
}


@pytest.mark.parametrize("kind", PICKLED)
def test_a_pickled_cache_has_every_buffer_once(kind):
    section = {"layers": PICKLED[kind] * 2, "selection": {"window": 4, "kernel_size": 3, "pool": "max"}}
    if kind == "quantized":
        section["quantization"] = {"bits": 4, "scheme": "kivi", "group_size": None, "residual": 0, "streaming": False}
        section["quantization"] |= {"sink": 4, "rotate": "values", "clip": False}
    _, model = stock_and_emitted("gemma2", 4096, **section)
    ids = tokens(2, 700)
    cache = model(ids[:, :690]).past_key_values
    written = pickle.dumps(cache)
    assert cache.allocated_bytes() < len(written) < cache.allocated_bytes() + 40_000
    loaded = pickle.loads(written)
    assert loaded.allocated_bytes() == cache.allocated_bytes()
    for column in range(690, 700):
        one, other = (model(ids[:, column : column + 1], past_key_values=each).logits for each in (cache, loaded))
        assert one.equal(other)


def test_a_copy_made_in_inference_mode_goes_on(llama):
    ids = tokens(1, 30)
    with torch.inference_mode():
        cache = type(llama(ids[:, :1]).past_key_values)(llama.config, capacity=40)
        llama(ids[:, :20], past_key_values=cache)
        found = llama(ids[:, 20:], past_key_values=copy.deepcopy(cache)).logits
        assert largest(found - llama(ids[:, 20:], past_key_values=cache).logits, found) <= 1e-5


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["1111", "1111"], (False, False)),
        (["0011", "1111"], (True, False)),
        (["1100", "1111"], (False, True)),
        (["0110", "1111"], (True, True)),
        (["0000", "1111"], (True, False)),
    ],
)
def test_padding_is_recognized(rows, expected):
    assert check_padding(torch.tensor([[int(bit) for bit in row] for row in rows])) == expected


@pytest.mark.parametrize("row", ["1011", "0101", "1010", "0110110"])
def test_holes_are_refused(row):
    with pytest.raises(ValueError, match="holes"):
        check_padding(torch.tensor([[int(bit) for bit in row]]))


class TestRefusals:
    """A wrong use raises; it never answers wrongly."""

    def test_holes(self, llama):
        mask = torch.ones(1, 20, dtype=torch.long)
        mask[0, 7] = 0
        for use_cache in (True, False):
            with pytest.raises(ValueError, match="holes"):
                llama(tokens(1, 20), attention_mask=mask, use_cache=use_cache)

    def test_a_decode_step_whose_mask_hides_tokens_of_the_cache(self, llama):
        cache = llama(tokens(1, 20)).past_key_values
        mask = torch.ones(1, 21, dtype=torch.long)
        for places, words in ((slice(7, 9), "holes"), (slice(0, 3), "pads other tokens")):
            with pytest.raises(ValueError, match=words):
                llama(
                    tokens(1, 1), attention_mask=mask.index_fill(1, torch.arange(21)[places], 0), past_key_values=cache
                )
        llama(tokens(1, 1), attention_mask=mask, past_key_values=cache)

    def test_a_mask_of_four_dimensions(self, llama):
        for mask in (torch.ones(1, 1, 20, 20), torch.ones(20)):
            with pytest.raises(TypeError, match="two-dimensional"):
                llama(tokens(1, 20), attention_mask=mask)
        with pytest.raises(TypeError, match="two-dimensional"):
            llama.model(tokens(1, 20), attention_mask=torch.ones(1, 1, 20, 20), use_cache=False)

    def test_going_on_after_right_padding(self, llama):
        mask = torch.ones(2, 20, dtype=torch.long)
        mask[0, 12:] = 0
        cache = llama(tokens(2, 20), attention_mask=mask).past_key_values
        with pytest.raises(ValueError, match="right padding"):
            llama(tokens(2, 1), past_key_values=cache)

    def test_a_mask_that_does_not_cover_the_cache(self, llama):
        cache = llama(tokens(1, 20)).past_key_values
        with pytest.raises(ValueError, match="covers 5 tokens, cache and input have 25"):
            llama(tokens(1, 5), attention_mask=torch.ones(1, 5), past_key_values=cache)

    def test_a_mask_that_changes_its_mind(self, llama):
        cache = llama(tokens(1, 20)).past_key_values
        mask = torch.ones(1, 25, dtype=torch.long)
        mask[0, :3] = 0
        with pytest.raises(ValueError, match="earlier call"):
            llama(tokens(1, 5), attention_mask=mask, past_key_values=cache)

    def test_a_mask_that_pads_more(self, llama):
        ids, mask, _ = left_padded(tokens(2, 20), [20, 15])
        cache = llama(ids, attention_mask=mask).past_key_values
        _, longer, _ = left_padded(tokens(2, 24), [24, 16])
        with pytest.raises(ValueError, match="earlier call"):
            llama(tokens(2, 4), attention_mask=longer, past_key_values=cache)

    def test_another_number_of_rows(self, llama):
        cache = llama(tokens(2, 20)).past_key_values
        with pytest.raises(ValueError, match="holds 2 rows, the input has 1"):
            llama(tokens(1, 1), past_key_values=cache)

    def test_no_input(self, llama):
        with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
            llama()

    def test_a_mask_of_another_length_without_a_cache(self, llama):
        with pytest.raises(ValueError, match="covers 25 tokens, the input has 20"):
            llama(tokens(1, 20), attention_mask=torch.ones(1, 25), use_cache=False)

    def test_an_attention_that_knows_no_heads(self, mixed):
        model = mixed("llama").load()
        model.config._attn_implementation = "sdpa"
        for use_cache in (True, False):
            with pytest.raises(ValueError, match="runs with its own attention"):
                model(tokens(1, 5), use_cache=use_cache)

    def test_another_cache_class(self, llama):
        with pytest.raises(TypeError, match="KVSurgeryCache, got DynamicCache"):
            llama(tokens(1, 5), past_key_values=DynamicCache())
        with pytest.raises(TypeError, match="KVSurgeryCache, got DynamicCache"):
            llama.generate(tokens(1, 5), max_new_tokens=2, past_key_values=DynamicCache())
        # the inner model is stock; its second step with a stock cache must not pass for the real thing
        cache = llama.model(tokens(1, 5), use_cache=True).past_key_values
        with pytest.raises(TypeError, match="KVSurgeryCache"):
            llama.model(tokens(1, 1), past_key_values=cache)

    def test_our_cache_behind_the_models_back(self, llama):
        cache, states = module_of(llama, "kv_cache").KVSurgeryCache(llama.config), torch.zeros(1, 4, 5, 6)
        handle, _ = cache.update(states, states, 0)
        with pytest.raises(RuntimeError, match="filled by calling the converted model"):
            handle.layer.make_room(5)

    @pytest.mark.parametrize("implementation", ["static", "offloaded"])
    def test_another_cache_implementation(self, llama, implementation):
        with pytest.raises(ValueError, match="brings its own KV cache"):
            llama.generate(tokens(1, 5), max_new_tokens=2, cache_implementation=implementation)

    def test_heads_split_over_ranks(self, mixed):
        model = mixed("llama").load()
        attention = model.model.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(attention, name)
            half = projection.weight.shape[0] // 2
            projection.weight = torch.nn.Parameter(projection.weight[:half])
        attention.o_proj.weight = torch.nn.Parameter(attention.o_proj.weight[:, : attention.o_proj.in_features // 2])
        for use_cache in (True, False):
            with pytest.raises(RuntimeError, match="tensor parallelism"):
                model(tokens(1, 5), use_cache=use_cache)

    def test_unknown_or_inconsistent_layout(self, mixed, tmp_path):
        import json
        import shutil

        for name, change, message in (
            ("version", lambda section: section.update(version=9), "version 9 is unknown"),
            ("heads", lambda section: section["layers"][0].update(blocks=[[1, 1]]), "layer 0 2 KV heads"),
        ):
            folder = shutil.copytree(mixed("llama").folder, tmp_path / name)
            config = json.loads((folder / "config.json").read_text())
            change(config["kv_surgery"])
            (folder / "config.json").write_text(json.dumps(config))
            broken = type(mixed("llama"))(folder, folder, mixed("llama").policy)
            with pytest.raises(ValueError, match=message):
                broken.load()


def test_memory_is_free_as_soon_as_nothing_refers_to_it(llama):
    """Whoever drops a cache of many gigabytes cannot wait for the garbage collector."""
    cache = llama.generate(tokens(1, 9), max_new_tokens=3, return_dict_in_generate=True).past_key_values
    gone = weakref.ref(cache), weakref.ref(cache.layers[0])
    gc.collect()
    gc.disable()
    try:
        del cache
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_a_crop_that_one_layer_refuses_changes_none(mixed):
    model = mixed("gemma2").model  # only some of its layers have full heads alone
    cache = model(tokens(1, 60)).past_key_values
    with pytest.raises(ValueError, match="cannot take the cache back"):
        cache.crop(-30)
    assert {layer.seen for layer in cache.layers} == {60}
