"""Reading a prompt chunk by chunk: embeddings are what projections make, and what is kept is what is said."""

import gc
import importlib
import weakref
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.errors import UnsupportedModel
from kvsurgery.templates.kv_encode import Rotation, best_places
from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.templates.kv_reform import Reform
from tests.helpers.emitted import emitted
from tests.helpers.encode_bytes import encode_bytes
from tests.helpers.families import FAMILIES, REFORM, largest, tokens
from tests.helpers.surgery import convert_folder, reform_profile

SMALL = {"chunk": 8, "encode_budget": 12, "window": 3, "keep": 2, "pool": 3, "recompute_budget": 16, "query_length": 2}


def every_head(config, layer):
    """All embedding heads of one layer."""
    counts = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    return tuple((layer, state, head) for state, count in counts.items() for head in range(count))


def encoder(model, **settings):
    """An encoder of the code that the model runs: a converted model has a copy of its own."""
    code = importlib.import_module(type(model).__module__.rpartition(".")[0] + ".kv_encode")
    return code.Encoder(model.model, KVLayout.from_config(model.config), Reform(**{**SMALL, **settings}))


def projected(model, layer, ids):
    """States of all heads of a layer [tokens, heads * head_dim], q, k and v in turn, from its modules in one pass."""
    attention, outputs = model.model.layers[layer].self_attn, {}
    names = ["qkv_proj"] if hasattr(attention, "qkv_proj") else ["q_proj", "k_proj", "v_proj"]
    names += [name for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    hooks = [
        getattr(attention, name).register_forward_hook(lambda *a, name=name: outputs.__setitem__(name, a[2]))
        for name in names
    ]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    if "qkv_proj" in outputs:
        return outputs["qkv_proj"][0]
    parts = [outputs.get(f"{state}_norm", outputs[f"{state}_proj"]) for state in "qk"] + [outputs["v_proj"]]
    # norms of single heads come as [1, tokens, heads, head_dim], or with the middle two swapped
    flat = [
        part[0] if part.ndim == 3 else (part if part.shape[1] == ids.shape[1] else part.transpose(1, 2)).flatten(2)[0]
        for part in parts
    ]
    return torch.cat(flat, -1)


def test_what_was_read_is_freed_without_collecting_garbage() -> None:
    """Or the caches of several prompts would fill a GPU."""
    model = emitted("llama", 2)
    gc.disable()
    try:
        reading = encoder(model, heads=((0, "k", 0), (1, "v", 1)))
        reading.read(input_ids=tokens(1, 40))
        layers = [weakref.ref(layer) for layer in reading.cache.layers]
        del reading
        assert [layer() for layer in layers] == [None, None]
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def reading(checkpoint, tmp_path_factory):
    """A family's checkpoint with streaming heads that reads long prompts."""

    def convert(family):
        source, out = checkpoint(family), tmp_path_factory.mktemp("out") / f"{family}-reform"
        return convert_folder(source, out, sparsity=0.5, reform=reform_profile(source), sizes=SMALL)

    return cache(convert)


@pytest.mark.parametrize("family", REFORM)
def test_embeddings_are_the_states_before_rope(reading, family):
    model, ids = reading(family).model, tokens(1, 29)
    own = every_head(model.config, 3)
    found = encoder(model, heads=own, chunk=7, encode_budget=40).read(input_ids=ids)
    # a converted model's own forward has streaming heads, which reading a prompt has not
    plain = reading(family).stock
    order = [reading(family).policy.layers[3].order.index(head) for head in range(model.config.num_key_value_heads)]
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    states = projected(plain, 3, ids).unflatten(-1, (len(own), -1))
    by_query = [place * group + within for place in order for within in range(group)]
    queries = len(by_query)
    places = by_query + [queries + place for place in order] + [queries + len(order) + place for place in order]
    expected = torch.nn.functional.normalize(states, dim=-1)
    assert largest(found.unflatten(-1, (len(own), -1))[:, places] - expected, expected) < 2e-5


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*REFORM}))
def test_families_that_it_does_not_cover_are_refused(reading, family):
    with pytest.raises(UnsupportedModel, match="REFORM does not cover"):
        reading(family)


def rope(states, positions, theta):
    """RoPE as complex numbers: states [..., places, head_dim] at positions [places]."""
    half = states.shape[-1] // 2
    angle = positions[:, None] * theta ** (-torch.arange(half) / half)
    turned = torch.complex(states[..., :half], states[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


@torch.no_grad()
def read_by_hand(model, ids, heads, chunk, budget, window, keep, compressor):
    """Embeddings, head by head: every KV head has a list of the tokens that it keeps, in the order of the prompt."""
    config, stack = model.config, model.model
    kv_heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    group, theta = config.num_attention_heads // kv_heads, 10_000.0
    kept = [[(torch.zeros(0, dim), torch.zeros(0, dim)) for _ in range(kv_heads)] for _ in stack.layers]
    result = []
    for part in ids[0].split(chunk):
        hidden, found = stack.embed_tokens(part), {}
        for index, layer in enumerate(stack.layers):
            normed, attention = layer.input_layernorm(hidden), layer.self_attn
            states = {name: getattr(attention, f"{name}_proj")(normed).unflatten(-1, (-1, dim)) for name in "qkv"}
            found |= {
                (index, name, head): states[name][:, head] for name in "qkv" for head in range(states[name].shape[1])
            }
            outputs, weights = [], []
            for head in range(kv_heads):
                keys = torch.cat([kept[index][head][0], states["k"][:, head]])
                values = torch.cat([kept[index][head][1], states["v"][:, head]])
                places = torch.arange(len(keys))
                turned = rope(keys, places, theta)
                own = []
                for query in range(head * group, head * group + group):
                    asking = rope(states["q"][:, query], places[-len(part) :], theta)
                    scores = asking @ turned.T / dim**0.5
                    own.append(scores.masked_fill(places > places[-len(part) :, None], -torch.inf).softmax(-1))
                    outputs.append(own[-1] @ values)
                weights.append(torch.stack(own))
                kept[index][head] = keys, values
            for head in range(kv_heads):
                keys, values = kept[index][head]
                if len(keys) <= budget:
                    continue
                score = weights[head][:, -window:].mean((0, 1))
                if compressor == "tova":
                    score = torch.stack([own[:, -1].mean(0) for own in weights]).mean(0)
                elif compressor == "streaming":
                    score = torch.arange(len(keys))
                middle = range(keep, len(keys) - keep)
                best = sorted(middle, key=lambda place: (-score[place].item(), place))[: budget - 2 * keep]
                chosen = [*range(keep), *sorted(best), *range(len(keys) - keep, len(keys))]
                kept[index][head] = keys[chosen], values[chosen]
            hidden = hidden + attention.o_proj(torch.cat(outputs, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        result.append(torch.cat([torch.nn.functional.normalize(found[head], dim=-1) for head in heads], -1))
    return torch.cat(result)


@pytest.mark.parametrize("compressor", ["h2o", "tova", "streaming"])
@pytest.mark.parametrize(("length", "chunk", "budget"), [(50, 8, 12), (41, 16, 9), (30, 5, 30), (12, 50, 4)])
def test_recurrence_equals_lists_of_kept_tokens(compressor, length, chunk, budget):
    model, ids = emitted("llama"), tokens(1, length)
    heads = (*every_head(model.config, 1), (3, "k", 2), (3, "q", 5), (2, "v", 0))
    settings = {"chunk": chunk, "window": 3, "keep": 2, "compressor": compressor}
    found = encoder(model, heads=heads, encode_budget=budget, **settings).read(input_ids=ids)
    expected = read_by_hand(model, ids, heads, budget=budget, **settings)
    assert largest(found - expected, expected) < 2e-5


def test_the_ends_stay_and_the_best_by_hand():
    importance = torch.tensor([[0.0, 5, 1, 4, 2, 4, 0], [9.0, 0, 0, 0, 0, 0, 9]])
    # the first, the last, then 5 and the earlier 4; of equal ones the earlier
    assert best_places(importance, 4, 1).tolist() == [[0, 1, 3, 6], [0, 1, 2, 6]]
    assert best_places(importance, 2, 0).tolist() == [[1, 3], [0, 6]]


@given(st.data())
def test_the_ends_stay_and_the_best(data):
    budget = data.draw(st.integers(1, 28))
    keep = data.draw(st.integers(0, budget // 2))
    places = data.draw(st.integers(budget + 1, 30))
    rows = st.lists(st.integers(0, 4), min_size=places, max_size=places)
    importance = torch.tensor(data.draw(st.lists(rows, min_size=1, max_size=3))).float()
    ends = {*range(keep), *range(places - keep, places)}
    for row, chosen in zip(importance, best_places(importance, budget, keep).tolist(), strict=True):
        assert chosen == sorted(set(chosen))
        assert len(chosen) == budget
        assert ends <= set(chosen)
        dropped = set(range(places)) - set(chosen)
        assert all(row[out] <= row[kept] for out in dropped for kept in set(chosen) - ends)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_windows_of_the_model_move_with_the_chunks(reading, family):
    """Their first layer has a window of 9 tokens, so a budget of 10 forgets nothing that the second would notice."""
    model, ids = reading(family).model, tokens(1, 40)
    assert KVLayout.from_config(model.config).layers[0].native
    heads = every_head(model.config, 1)
    at_once = encoder(model, heads=heads, chunk=40, encode_budget=40).read(input_ids=ids)
    in_parts = encoder(model, heads=heads, chunk=6, encode_budget=10).read(input_ids=ids)
    assert largest(in_parts - at_once, at_once) < 2e-5


def test_layers_above_the_exit_never_run():
    model, calls = emitted("llama"), []
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_hook(lambda *_, index=index: calls.append(index))
    encoder(model, heads=((2, "k", 1), (0, "v", 3))).read(input_ids=tokens(1, 20))
    assert calls == [0, 1] * 3  # three chunks; of layer 2, the projections only


def test_what_is_held_from_chunk_to_chunk_is_what_is_predicted():
    model = emitted("llama")
    reading = encoder(model, heads=((2, "k", 1), (1, "v", 3)))
    for length in (3, 50):
        reading = encoder(model, heads=((2, "k", 1), (1, "v", 3)))
        embeddings = reading.read(input_ids=tokens(1, length))
        stored = [
            states for layer in reading.cache.layers if layer.is_initialized for states in (layer.keys, layer.values)
        ]
        held = sum(states.untyped_storage().nbytes() for states in (*stored, embeddings) if states.numel())
        assert held == encode_bytes(reading.reform, length, kv_heads=4, head_dim=6, itemsize=4)


def test_another_forward_in_the_middle_of_a_chunk_is_left_alone():
    """As of another thread: the model's modules have hooks while a prompt is read."""
    model, ids = emitted("llama"), tokens(1, 20)
    heads, hooks, between = ((2, "k", 1), (1, "v", 3)), [], []
    expected, alone = encoder(model, heads=heads).read(input_ids=ids), model(ids).logits

    def forward(*_):
        hooks.pop().remove()
        between.append(model(ids).logits)

    def after_chunk(_):
        if not between:
            hooks.append(model.model.layers[0].mlp.register_forward_hook(forward))

    assert encoder(model, heads=heads).read(after_chunk, input_ids=ids).equal(expected)
    assert between[0].equal(alone)
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)


def test_progress_counts_tokens():
    seen = []
    encoder(emitted("llama"), heads=((0, "k", 0),)).read(seen.append, input_ids=tokens(1, 20))
    assert seen == [8, 8, 4]


def test_embeddings_of_inputs_embeds_are_those_of_the_ids():
    model, ids = emitted("llama"), tokens(1, 20)
    settings = {"heads": ((2, "k", 1), (1, "v", 3))}
    embeds = model.get_input_embeddings()(ids)
    assert encoder(model, **settings).read(inputs_embeds=embeds).equal(encoder(model, **settings).read(input_ids=ids))


@pytest.mark.parametrize("partial", [0, 2])
def test_turning_back_undoes_rope(partial):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 3, 7, 8, generator=generator)
    angle = torch.rand(1, 1, 7, (8 - partial) // 2, generator=generator).repeat(1, 1, 1, 2) * 6
    scaled = Rotation(angle.cos() * 1.3, angle.sin() * 1.3)  # attention factors of scaled RoPE
    assert torch.allclose(scaled.turn_back(scaled.turn(states)), states, atol=1e-6)
