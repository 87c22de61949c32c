"""Recurrent chunked forwarding against projections of the weights, plain forwards, and a reference written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.errors import UnsupportedModel
from kvsurgery.measure.recurrence import RecurrentPass, chunks
from tests.helpers.families import REFORM, largest, stock, tokens
from tests.helpers.measured_models import measured_model, recurrence

TOKENS = tokens(1, 40, seed=5)[0]
WHOLE = recurrence(chunk=1000, budget=1000, keep=0, window=4)
YARN = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
}
HALF = {"partial_rotary_factor": 0.5, "head_dim": 12, "hidden_size": 96}
LONG = {
    # short factors up to 8 positions, then long ones, and both scaled
    "original_max_position_embeddings": 8,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [3.0] * 3},
}
CASES = {**{name: (name, {}) for name in REFORM}, "llama-yarn": ("llama", YARN)}
CASES |= {"phi3-partial": ("phi3", HALF), "phi3-longrope": ("phi3", LONG)}


@pytest.fixture(scope="module", params=CASES)
def model(request):
    name, overrides = CASES[request.param]
    return stock(name, **overrides)


def read(model, reform):
    """{(layer, chunk's start): its states}, of a whole input."""
    reading, seen = RecurrentPass(measured_model(model), TOKENS, reform), {}
    for chunk in chunks(reform, len(TOKENS), len(TOKENS)):
        reading.read(chunk, lambda states: seen.setdefault((states.layer, states.chunk.start), states))
    return seen, reading


@torch.no_grad()
def projected(attention, normed):
    """q, k and v [heads, tokens, head_dim] by the layer's weights, biases and norms, of [tokens, hidden]."""
    config, dim = attention.config, attention.head_dim
    counts = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    if hasattr(attention, "qkv_proj"):
        fused = normed @ attention.qkv_proj.weight.T
        parts = fused.split([count * dim for count in counts], dim=-1)
    else:
        parts = []
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            parts.append(normed @ layer.weight.T + (0 if layer.bias is None else layer.bias))
    parts = list(parts)
    norms = [getattr(attention, "q_norm", None), getattr(attention, "k_norm", None), None]
    for place, (norm, count) in enumerate(zip(norms, counts, strict=True)):
        across_heads = norm is not None and len(norm.weight) != dim
        if across_heads:
            parts[place] = norm(parts[place])
        parts[place] = parts[place].view(len(normed), count, dim).transpose(0, 1)
        if norm is not None and not across_heads:
            parts[place] = norm(parts[place])
    return parts


def test_states_before_rope_are_the_projections(model):
    entered = {}
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, options: entered.update({module.layer_idx: options["hidden_states"][0]}),
            with_kwargs=True,
        )
        for layer in model.model.layers
    ]
    seen, _ = read(model, WHOLE)
    for hook in hooks:
        hook.remove()
    for layer, module in enumerate(model.model.layers):
        states = seen[layer, 0]
        for own, expected in zip(
            (states.query, states.key, states.value), projected(module.self_attn, entered[layer]), strict=True
        ):
            assert own.dtype == torch.float32
            assert largest(own - expected, expected) < 1e-5


def test_hidden_states_enter_their_layer(model):
    seen, _ = read(model, WHOLE)
    with torch.no_grad():
        expected = model(TOKENS[None], output_hidden_states=True).hidden_states
    if model.config.model_type != "gemma2":  # stock SDPA leaves the soft cap out
        for layer in range(len(model.model.layers)):
            assert largest(seen[layer, 0].hidden - expected[layer], expected[layer]) < 1e-5


@pytest.mark.parametrize("chunk", [7, 39])
def test_chunks_change_nothing_where_everything_fits(model, chunk):
    if chunk < 8 == model.config.to_dict().get("original_max_position_embeddings"):
        pytest.skip("up to 8 tokens this model rotates by other factors")
    whole, _ = read(model, WHOLE)
    chunked, _ = read(model, recurrence(chunk, 1000, 0, 4))
    for (layer, _), states in chunked.items():
        part = slice(states.chunk.start, states.chunk.stop)
        for name in ("query", "key", "value", "hidden"):
            expected = getattr(whole[layer, 0], name)[:, part]
            assert largest(getattr(states, name) - expected, expected) < 2e-4
        last = range(part.stop - 1, part.stop)
        torch.testing.assert_close(
            states.attention(last), whole[layer, 0].attention(last)[:, :, : part.stop], rtol=1e-3, atol=1e-4
        )


def test_attention_is_what_the_model_pays():
    """Eager attention returns its weights."""
    model = stock("gemma2")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(TOKENS[None], output_attentions=True).attentions
    seen, _ = read(model, WHOLE)
    asked = range(30, 36)
    for layer, weights in enumerate(expected):
        torch.testing.assert_close(
            seen[layer, 0].attention(asked), weights[0, :, asked.start : asked.stop], rtol=1e-4, atol=1e-5
        )


# a reference for a Llama without biases: loops over heads and tokens, complex rotations, sets of tokens


def rotated(x, position, dim):
    angle = position * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    turned = torch.complex(x[: dim // 2], x[dim // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag])


@torch.no_grad()
def by_hand(model, reform):
    """[(hidden, query, key, value)] by layer and chunk, what each KV head kept at the end, and attention at the end."""
    config, dim = model.config, model.config.hidden_size // model.config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    kept = [[[] for _ in range(config.num_key_value_heads)] for _ in model.model.layers]  # (token, key, value)
    states, paid = {}, {}
    for start in range(0, len(TOKENS), reform.chunk):
        ids = TOKENS[start : start + reform.chunk]
        x = model.model.embed_tokens(ids)
        for index, layer in enumerate(model.model.layers):
            query, key, value = projected(layer.self_attn, layer.input_layernorm(x))
            states[index, start] = x, query, key, value
            out = torch.zeros(len(ids), config.num_attention_heads, dim)
            for shared, before in enumerate(kept[index]):
                entries = before + [(start + i, key[shared, i], value[shared, i]) for i in range(len(ids))]
                turned = [rotated(own, position, dim) for position, (_, own, _) in enumerate(entries)]
                received = torch.zeros(len(entries))
                for head in range(shared * group, (shared + 1) * group):
                    for i in range(len(ids)):
                        position = len(before) + i
                        scores = [
                            rotated(query[head, i], position, dim) @ own / dim**0.5 for own in turned[: position + 1]
                        ]
                        weights = torch.stack(scores).softmax(0)
                        out[i, head] = sum(w * own for w, (_, _, own) in zip(weights, entries, strict=False))
                        if i >= len(ids) - reform.window:
                            received[: position + 1] += weights
                        paid[index, head] = {entries[j][0]: w.item() for j, w in enumerate(weights)}
                stays = {*range(reform.keep), *range(len(entries) - reform.keep, len(entries))}
                others = sorted(set(range(len(entries))) - stays, key=lambda j: -received[j])
                stays |= set(others[: max(0, reform.encode_budget - len(stays))])
                kept[index][shared] = [entry for j, entry in enumerate(entries) if j in stays]
            x = x + layer.self_attn.o_proj(out.flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
    return states, [[[token for token, _, _ in own] for own in layer] for layer in kept], paid


@pytest.mark.parametrize(
    "reform",
    [recurrence(10, 8, 2, 3), recurrence(8, 20, 3, 100), recurrence(17, 6, 0, 1)],
    ids=["often", "all queries", "no ends"],
)
def test_against_loops(reform):
    model = stock("llama", num_hidden_layers=2)
    expected, kept, paid = by_hand(model, reform)
    seen, reading = read(model, reform)
    assert seen.keys() == expected.keys()
    for place, states in seen.items():
        for own, by_loops in zip(
            (states.hidden[0], states.query, states.key, states.value), expected[place], strict=True
        ):
            assert largest(own - by_loops, by_loops) < 1e-4
    assert [layer.places.tolist() for layer in reading.cache.layers] == kept
    [start] = {start for _, start in seen if start + reform.chunk >= len(TOKENS)}
    for layer in range(2):
        weights = seen[layer, start].attention(range(len(TOKENS) - 1, len(TOKENS)))[:, 0]
        for head, own in enumerate(weights):
            by_loops = torch.zeros(len(TOKENS))
            by_loops[list(paid[layer, head])] = torch.tensor(list(paid[layer, head].values()))
            torch.testing.assert_close(own, by_loops, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_layers_with_a_window_keep_their_last_tokens(family):
    model = stock(family)
    _, reading = read(model, recurrence(10, 12, 2, 3))
    for window, layer in zip(measured_model(model).windows, reading.cache.layers, strict=True):
        assert layer.keys.shape == layer.values.shape
        if window is not None:
            assert layer.places.tolist() == [list(range(40 - (window - 1), 40))] * len(layer.places)
        assert layer.places.shape[1] == layer.keys.shape[2] == (12 if window is None else window - 1)


@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 9))
def test_chunks_cover_the_input_and_the_question_is_in_one(chunk, last, tail):
    made = chunks(recurrence(chunk, 8, 2, 1), last + tail, last)
    assert [token for part in made for token in part] == list(range(last + tail))
    assert all(len(part) == chunk for part in made[:-1])
    assert made[-1].start < last <= made[-1].start + chunk


def test_a_context_of_a_chunk_is_read_at_once():
    reform = recurrence(20, 8, 2, 1)
    assert chunks(reform, 30, 20) == [range(30)]
    assert chunks(reform, 30, 21) == [range(20), range(20, 30)]


def test_a_model_without_rope():
    model = stock("llama")
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, inner=inner, **options: inner(*args, **options)
        layer.register_forward_pre_hook(
            lambda module, args, options: (args, {**options, "position_embeddings": None}), with_kwargs=True
        )
    with pytest.raises(UnsupportedModel, match="LlamaAttention takes no cosines and sines of RoPE"):
        read(model, WHOLE)
    assert model.config._attn_implementation == "sdpa"
