"""Heads in blocks: exact counts, blocks that weigh the same, the best heads kept, and every head in one place."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.checkpoint.model import Model
from kvsurgery.emit.config import converted_config
from kvsurgery.errors import PolicyError
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.heads.kinds import BUDGETED, full_heads
from kvsurgery.policy.tensor_parallel import arrange
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_layout import KVLayout
from tests.helpers.deciding import decided


def profile(scores):
    layers, heads = np.shape(scores)
    return HeadProfile(
        np.array(scores, dtype=np.float32), "ablation", "kv", "test", ModelDimensions(layers, heads, heads, 8)
    )


@st.composite
def cases(draw):
    """A profile with many ties, the model's own windows, and a number of blocks that divides the heads."""
    blocks, size, layers = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    heads = blocks * size
    values = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    scores = draw(st.lists(values, min_size=layers * heads, max_size=layers * heads))
    windows = draw(st.lists(st.sampled_from([None, None, 16]), min_size=layers, max_size=layers))
    windows[draw(st.integers(0, layers - 1))] = None
    return profile(np.reshape(scores, (layers, heads))), windows, blocks


def masks(policy):
    """bool [layers, heads]: what is full, by source head."""
    return np.array([[head in full_heads(layer) for head in range(len(layer.order))] for layer in policy.layers])


def layout_of(policy, model):
    config = {
        "model_type": "llama",
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.query_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_size": 64,
        "max_position_embeddings": 4096,
    }
    return KVLayout.from_config(converted_config(Model.of(config), policy))


@given(cases(), st.data(), st.booleans())
def test_every_head_has_one_place_in_blocks_of_equal_size(case, data, uneven):
    made, windows, blocks = case
    eligible = windows.count(None) * made.model.kv_heads
    count = data.draw(st.integers(0, eligible))
    options = {"full_heads": count, "tp": blocks, "tp_uneven": uneven, "sink": 3, "recent": 5}
    policy = decided(made, windows, **options)
    assert policy == decided(made, windows, **options)
    for layer, window in zip(policy.layers, windows, strict=True):
        assert sorted(layer.order) == list(range(made.model.kv_heads))
        own = layer.blocks
        assert [sum(block) for block in own] == [made.model.kv_heads // blocks] * blocks
        assert sum(full for full, _ in own) == layer.full == len(full_heads(layer))
        assert len({full for full, _ in own}) <= (2 if uneven else 1)
        assert max(full for full, _ in own) - min(full for full, _ in own) <= 1
        if layer.native:
            assert (window, layer.order, layer.full) == (layer.recent, tuple(range(made.model.kv_heads)), 0)
        places = iter(layer.order)
        for block in own:
            for kind in block:
                heads = [next(places) for _ in range(kind)]
                assert heads == sorted(heads)
    if uneven:
        ordinary = decided(made, windows, **{**options, "tp": 1, "tp_uneven": False})
        assert (masks(policy) == masks(ordinary)).all()
        assert policy.rounded == 0
        held = (
            [sum(layer.blocks[block][0] for layer in policy.layers) for block in range(blocks)] if blocks > 1 else [0]
        )
        assert max(held) - min(held) <= 1
    else:
        assert policy.full == count + policy.rounded
        assert policy.full % blocks == 0
        assert -blocks < 2 * policy.rounded <= blocks


@given(cases(), st.data(), st.booleans())
def test_neighbors_of_a_unit_are_full_together_and_stay_side_by_side(case, data, has_budgets):
    made, windows, blocks = case
    heads = made.model.kv_heads
    tp = 1 if has_budgets else blocks
    unit = data.draw(st.sampled_from([size for size in range(1, heads // tp + 1) if heads // tp % size == 0]))
    count = data.draw(st.integers(0, windows.count(None) * heads))
    others = {"rest": "budgeted", "budget": 9, "window": 2} if has_budgets else {"sink": 3, "recent": 5}
    policy = decided(made, windows, full_heads=count, tp=tp, head_unit=unit, **others)
    for layer in policy.layers:
        runs = [layer.order[start : start + unit] for start in range(0, heads, unit)]
        assert all(run == tuple(range(run[0], run[0] + unit)) and run[0] % unit == 0 for run in runs)
        assert all(full % unit == 0 for full, _ in layer.blocks)
    assert policy.full == count + policy.rounded
    assert -unit * tp < 2 * policy.rounded <= unit * tp
    full, scores = masks(policy), made.scores.reshape(len(windows), -1, unit).mean(-1)
    eligible = [window is None for window in windows]
    if tp == 1 and 0 < full[eligible].sum() < full[eligible].size:
        units = full.reshape(len(windows), -1, unit).all(-1)[eligible]
        assert scores[eligible][units].min() >= scores[eligible][~units].max() - 1e-6


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"head_unit": 0}, "`heads.head_unit` must be 1 or more, got 0"),
        ({"head_unit": 3}, "divide the 4 KV heads"),
        ({"head_unit": 4, "tp": 2}, "divide the 2 KV heads"),
        ({"head_unit": 2, "tp": 2, "tp_uneven": True}, "`devices.tp_uneven`"),
        ({"head_unit": 2, "tp": 2, "rest": "budgeted", "budget": 9}, "streaming heads"),
    ],
)
def test_units_that_no_layer_has(options, named):
    made = profile([[0.1, 0.2, 0.3, 0.4]])
    with pytest.raises(PolicyError, match=named):
        decided(made, (None,), full_heads=2, **options)


@given(cases(), st.data())
def test_no_other_choice_in_multiples_has_better_heads(case, data):
    made, windows, blocks = case
    count = data.draw(st.integers(0, windows.count(None) * made.model.kv_heads))
    policy = decided(made, windows, full_heads=count, tp=blocks)
    eligible = [row for row, window in zip(made.scores, windows, strict=True) if window is None]
    # every way to give each layer a multiple of the blocks, of the same sum, with the layer's best heads
    sums = [[float(np.sort(row)[::-1][:full].sum()) for full in range(0, len(row) + 1, blocks)] for row in eligible]
    ways = product(*(range(len(each)) for each in sums))
    best = max(
        sum(each[runs] for each, runs in zip(sums, way, strict=True))
        for way in ways
        if sum(way) * blocks == policy.full
    )
    assert float(made.scores[masks(policy)].sum()) == pytest.approx(best)


@given(cases())
def test_one_block_is_the_ordinary_policy(case):
    made, windows, _ = case
    policy = decided(made, windows, sparsity=0.5)
    assert policy == decided(made, windows, sparsity=0.5, tp=1)
    assert "tp" not in policy.options
    assert all(len(layer.blocks) == 1 for layer in policy.layers)


@given(
    st.integers(1, 3).map(lambda power: 2**power),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_processes_hold_budgets_that_differ_by_less_than_a_head(blocks, size, layers, seed, data):
    generator = np.random.default_rng(seed)
    made = profile(generator.pareto(1, (layers, blocks * size)) + 0.01)
    full = data.draw(st.integers(0, layers * blocks * size - 1))
    budget = data.draw(st.integers(1, 300))
    policy = decided(made, rest="budgeted", budget=budget, full_heads=full, tp=blocks)
    if not policy.counts[BUDGETED]:
        return
    layout, largest = layout_of(policy, made.model), max(max(layer.budgets, default=0) for layer in policy.layers)
    prompt = largest + 100
    for processes in layout.processes:
        held = [part.kv_bytes(1, prompt) for part in layout.parts(processes)]
        assert sum(held) == layout.kv_bytes(1, prompt)
        assert max(held) - min(held) <= 2 * largest * made.model.head_dim * 2


def test_budgets_are_dealt_by_hand():
    full = np.zeros((2, 4), dtype=bool)
    budgets = np.array([[50, 10, 30, 40], [7, 60, 20, 5]])
    # 50 | 40, then 30 to the lighter: 60 | 70; 60 to the lighter: 120 | 90, then 7 to the lighter: 125 | 97
    (first, counts), (second, _) = arrange(full, budgets, 2)
    assert counts == ((0, 2), (0, 2))
    assert {frozenset(first[:2]), frozenset(first[2:])} == {frozenset({0, 1}), frozenset({2, 3})}
    assert {frozenset(second[:2]), frozenset(second[2:])} == {frozenset({1, 3}), frozenset({0, 2})}
    sums = [
        sum(budgets[layer][head] for layer, order in enumerate((first, second)) for head in order[at : at + 2])
        for at in (0, 2)
    ]
    assert sorted(sums) == [97, 125]


def test_uneven_heads_fall_to_the_lightest_block():
    full = np.array([[True, False, False, False], [True, False, False, False], [False] * 4, [True] * 4])
    blocks = arrange(full, None, 2)
    assert [layer.counts for layer in blocks] == [
        ((1, 1), (0, 2)),
        ((0, 2), (1, 1)),
        ((0, 2), (0, 2)),
        ((2, 0), (2, 0)),
    ]
    assert [layer.order for layer in blocks] == [(0, 1, 2, 3), (1, 2, 0, 3), (0, 1, 2, 3), (0, 1, 2, 3)]


def test_neighbors_balance():
    # four blocks get 8, 4, 2 and 1 tokens of a layer: two processes hold 8 + 1 and 4 + 2, not 8 + 4 and 2 + 1
    [(order, _)] = arrange(np.zeros((1, 4), dtype=bool), np.array([[8, 4, 2, 1]]), 4)
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset({0, 3}), frozenset({1, 2})}


@pytest.mark.parametrize(("blocks", "heads"), [(3, 8), (0, 8), (16, 8)])
def test_blocks_divide_the_heads(blocks, heads):
    with pytest.raises(PolicyError, match=r"`devices.tp` must divide the 8 KV heads of a layer \(1, 2, 4, 8\), got"):
        decided(profile(np.ones((1, heads))), tp=blocks)


def test_rounding_by_hand():
    scores = np.array([[9, 1, 1, 1], [5, 5, 0, 0], [4, 4, 4, 0]])
    chosen = {count: decided(profile(scores), full_heads=count, tp=2) for count in range(1, 8)}
    # sums of pairs: 10 and 2, 10 and 0, 8 and 4; an odd number is rounded up
    assert [chosen[count].rounded for count in range(1, 8)] == [1, 0, 1, 0, 1, 0, 1]
    assert [[layer.full for layer in chosen[count].layers] for count in (2, 4, 6)] == [[2, 0, 0], [2, 2, 0], [2, 2, 2]]
    assert [layer.full for layer in chosen[7].layers] == [2, 2, 4]
    assert decided(profile(scores), threshold=4, tp=2).rounded == 0
