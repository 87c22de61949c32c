"""Learned sinks of query heads: one more column of the softmax, without a value."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.templates import kv_softmax
from kvsurgery.templates.kv_received import attention_received
from kvsurgery.templates.kv_softmax import Scoring
from tests.helpers.families import largest, tokens
from tests.helpers.surgery import convert_folder


def states(heads, group, tokens, keys, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, heads * group, tokens, 8, generator=generator)
    key, value = (torch.randn(2, heads, keys, 8, generator=generator) for _ in range(2))
    return query, key, value, torch.randn(heads * group, generator=generator) * 3


def weights(query, key, sinks, scale, allowed=None):
    """float64 [batch, query_heads, tokens, keys]: the softmax with a column for the sink, which is then left out."""
    scores = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(0, 9), st.integers(0, 1 << 30))
def test_causal_attention(heads, group, tokens, past, seed):
    query, key, value, sinks = states(heads, group, tokens, past + tokens, seed)
    allowed = torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past)
    expected = weights(query, key, sinks, 0.3, allowed) @ value.double().repeat_interleave(group, 1)
    found = kv_softmax.causal(query, key, value, 0, Scoring(0.3, sinks=sinks))
    assert largest(found - expected, expected) < 1e-5


def test_a_sink_counts_once_where_keys_come_in_parts():
    query, key, value, sinks = states(2, 2, 5, 20)
    scoring = Scoring(0.3, sinks=sinks)
    parts = [kv_softmax.attend_with_lse(query, key[:, :, at], value[:, :, at], None, scoring) for at in PARTS]
    found = scoring.sunk(*kv_softmax.merge(*parts))
    expected = kv_softmax.attend(query, key, value, None, scoring)
    assert largest(found - expected, expected) < 1e-5


PARTS = (slice(7), slice(7, None))


def test_extreme_sinks_and_nothing_to_see():
    query, key, value, _ = states(1, 2, 1, 4)
    plain = kv_softmax.attend(query, key, value, None, Scoring(0.3))
    found = kv_softmax.attend(query, key, value, None, Scoring(0.3, sinks=torch.tensor([-1e4, 1e4])))
    assert largest(found[:, 0] - plain[:, 0], plain) < 1e-6
    assert not found[:, 1].any()
    nothing = torch.zeros(1, 1, 4, dtype=torch.bool)
    assert not kv_softmax.attend(query, key, value, nothing, Scoring(0.3, sinks=torch.zeros(2))).any()


def test_a_selection_sees_the_weights_that_are_left():
    query, key, _, sinks = states(2, 2, 4, 12)
    found = attention_received(query, key, torch.zeros(2, 1, 1, dtype=torch.long), Scoring(0.3, sinks=sinks))
    allowed = torch.ones(4, 12, dtype=torch.bool).tril(8)
    expected = weights(query, key, sinks, 0.3, allowed).unflatten(1, (2, 2)).mean((2, 3))
    assert largest(found - expected, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_dtype(dtype):
    query, key, value, sinks = (part.to(dtype) for part in states(1, 2, 3, 5))
    assert kv_softmax.attend(query, key, value, None, Scoring(0.3, sinks=sinks)).dtype == dtype


def test_budgets_that_hold(checkpoint, tmp_path):
    converted = convert_folder(
        checkpoint("gpt_oss"), tmp_path / "held", rest="budgeted", budget=6, window=3, kernel_size=3, hold=5
    )
    model, ids, ends = converted.model, tokens(2, 60), []
    for sizes in ([20, 40], [20, 13, 1, 26], [20] + [1] * 40):
        cache, stop = None, 0
        for size in sizes:
            output = model(ids[:, stop : stop + size], past_key_values=cache, use_cache=True)
            cache, stop = copy.deepcopy(output.past_key_values), stop + size
        ends.append(output.logits[:, -1].detach())
    assert all(largest(end - ends[0], ends[0]) <= 1e-5 for end in ends)
    with torch.no_grad():
        whole = converted.stock(ids).logits[:, -1]
    assert largest(whole - ends[0], whole) > 1e-3  # what was dropped matters


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_products_are_not_rounded_to_half_precision(dtype):
    """Keys with a bias, as those of Qwen2.5, have products with queries that 16 bits hold coarsely or not at all."""
    query, key, value, _ = states(2, 2, 5, 20)
    query, key, value = ((part + bias).to(dtype) for part, bias in ((query, 0), (key, 3000), (value, 0)))
    query[..., 0] = 400  # beyond float16's range, if it is not scaled before
    found, _ = kv_softmax.attend_with_lse(query, key, value, None, Scoring(1e-3))
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT * 1e-3
    expected = scores.softmax(-1) @ value.double().repeat_interleave(2, 1)
    assert largest(found - expected, expected) < 0.02
