"""Budgeted heads of several processes keep budgets of their own, in cache groups that all processes have in common."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from kvsurgery.checkpoint.source import read_config
from kvsurgery.policy.tensor_parallel import arrange
from kvsurgery.templates.kv_layout import KVLayout, LayerLayout, Quantization, Selection
from kvsurgery.vllm.budgeted import BudgetedGroups
from kvsurgery.vllm.processes import common_part, places
from tests.helpers.cases import some
from tests.vllm.serving import (
    BLOCK,
    BUDGETED,
    assert_equal,
    assert_held_as_forecast,
    cached_tokens,
    converted,
    engine,
    generate,
    prompts,
    reference,
)
from tests.vllm.test_codes import BY_LAYER, TOLERANCE, change_quantization

SELECTION = Selection(window=4)


def laid_out(budgets: np.ndarray, full: np.ndarray, blocks: int, caches: Sequence[Quantization | None]) -> KVLayout:
    """Heads as the converter lays them out for so many processes; each layer has one of the caches."""
    arranged = zip(budgets, full, arrange(full, budgets, blocks), caches, strict=True)
    layers = [
        LayerLayout(
            counts,
            0,
            1,
            budgets=tuple(int(row[head]) for head in order if not is_full[head]),
            selection=SELECTION,
            quantization=cache,
        )
        for row, is_full, (order, counts), cache in arranged
    ]
    return KVLayout(tuple(layers), head_dim=64)


def model(draw: random.Random, blocks: int) -> KVLayout:
    """A small model with random budgets, full heads and caches."""
    layers, heads = draw.randrange(1, 7), blocks * draw.randrange(1, 5)
    full = np.zeros((layers, heads), dtype=bool)
    for row in full:
        row[draw.sample(range(heads), blocks * draw.randrange(heads // blocks + 1))] = True
    budgets = np.array([[int(2 ** draw.uniform(0, 12)) for _ in range(heads)] for _ in range(layers)])
    return laid_out(budgets, full, blocks, draw.choices((None, Quantization(4), Quantization(8)), k=layers))


def common(layout: KVLayout, processes: int) -> KVLayout:
    found = common_part(layout, processes)
    assert found is not None
    return found


def budgets_of(part: KVLayout) -> list[int]:
    return [budget for layer in part.layers for budget in layer.budgets]


@pytest.mark.parametrize("seed", range(50))
def test_groups_of_all_processes_have_room_for_each_and_waste_little(seed: int) -> None:
    draw = random.Random(seed)
    layout = model(draw, blocks=draw.choice((1, 2, 3, 4, 8)))
    for processes in layout.processes:
        shared = common(layout, processes)
        bins = BudgetedGroups(shared, BLOCK).bins
        for part in layout.parts(processes):
            assert [layer.full for layer in part.layers] == [layer.full for layer in shared.layers]
            assert sorted(places(part)) == sorted(places(part).values()) == sorted(bins)
            for (layer, head), place in places(part).items():
                assert part.layers[layer].budgets[head] + SELECTION.window <= bins[place].kept
                assert part.layers[layer].quantization == shared.layers[place[0]].quantization
            # rounds of `arrange` bound the difference in each layer
            spreads = [
                (max(whole.budgets) - min(whole.budgets)) * len(layer.blocks)
                for whole, layer in zip(layout.layers, part.layers, strict=True)
                if whole.budgets
            ]
            assert 0 <= sum(budgets_of(shared)) - sum(budgets_of(part)) <= sum(spreads)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_assignment_to_places_needs_less(seed: int) -> None:
    draw = random.Random(seed)
    layout = model(draw, blocks=4)
    layout = replace(layout, layers=tuple(replace(layer, quantization=None) for layer in layout.layers))
    least = sum(budgets_of(common(layout, 4)))
    parts = [budgets_of(part) for part in layout.parts(4)]
    for _ in range(100):
        shuffled = [draw.sample(budgets, len(budgets)) for budgets in parts]
        assert sum(map(max, zip(*shuffled, strict=True))) >= least


@pytest.mark.parametrize(("processes", "percent"), [(2, 3), (4, 9), (8, 18)])
def test_documented_memory(processes: int, percent: int) -> None:
    """What vLLM holds of a complete prompt, beside what the largest process would hold alone."""
    layers, heads, tokens = 32, 8, 8192
    ratios = []
    for seed in range(20):
        draw = random.Random(seed)
        budgets = np.array([[int(draw.expovariate(1 / 512)) for _ in range(heads)] for _ in range(layers)])
        layout = laid_out(budgets, np.zeros_like(budgets, dtype=bool), processes, [None] * layers)
        alone = max(BudgetedGroups(part, 16).sequence_bytes(tokens) for part in layout.parts(processes))
        ratios.append(BudgetedGroups(common(layout, processes), 16).sequence_bytes(tokens) / alone)
    assert round(100 * (mean(ratios) - 1)) == percent


def test_a_place_has_the_largest_budget_of_any_process() -> None:
    layers = [
        LayerLayout(((1, 2), (1, 2)), 0, 1, budgets=budgets, selection=SELECTION)
        for budgets in ((3, 90, 50, 8), (5, 100, 7, 6))
    ]
    layout = KVLayout((layers[0], layers[1]), head_dim=64)
    # 100, 90, 5 and 3 in one process, 50, 8, 7 and 6 in the other
    assert [layer.budgets for layer in common(layout, 2).layers] == [(100, 90), (7, 6)]
    assert common(layout, 2).layers[0].blocks == ((1, 2),)
    assert places(layout.parts(2)[0]) == {(1, 1): (0, 0), (0, 1): (0, 1), (1, 0): (1, 0), (0, 0): (1, 1)}
    for other in ({"quantization": Quantization(4)}, {"head_dim": 128}):
        layout = KVLayout((layers[0], replace(layers[1], **other)), head_dim=64)
        assert [layer.budgets for layer in common(layout, 2).layers] == [(90, 8), (100, 6)]


def test_processes_with_other_numbers_of_full_heads_have_none_in_common() -> None:
    layer = LayerLayout(((1, 1), (0, 2)), 0, 1, budgets=(3, 9, 5), selection=SELECTION)
    layout = KVLayout((layer,), head_dim=64)
    assert common_part(layout, 2) is None
    assert common(layout, 1).layers[0].budgets == (9, 5, 3)


EIGHT_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}
CHECKPOINTS: dict[str, tuple[dict[str, Any], int, float]] = {
    "whole prompts": ({"tp": 2}, 512, 1e-3),
    # full heads of a process lie in two places
    "chunks, laid out for four": ({"tp": 4, "model": EIGHT_HEADS}, 48, 1e-3),
    "codes by layer": ({"tp": 2, "sparsity": 1, "budget": 130, "kv_bits": 4, "kv_residual": 0}, 48, TOLERANCE),
}
ROWS = prompts(lengths=(3, 31, 33, 130, 300))


@pytest.mark.parametrize("kind", some(CHECKPOINTS, 2))
def test_two_processes_give_the_tokens_of_one_and_of_the_emitted_model(kind: str, tmp_path: Path) -> None:
    options, chunk, tolerance = CHECKPOINTS[kind]
    checkpoint = converted("llama", tmp_path, **{**BUDGETED, **options})
    if "kv_bits" in options:
        change_quantization(checkpoint.folder, BY_LAYER["budgets in some layers"])
    layout = KVLayout.from_config(read_config(checkpoint.folder))
    first, second = layout.parts(2)
    assert sorted(budgets_of(first)) != sorted(budgets_of(second))
    wanted = reference(checkpoint.model, ROWS)
    with engine(checkpoint.folder, max_num_batched_tokens=chunk) as llm:
        alone = generate(llm, ROWS)
    assert_equal(alone, wanted, tolerance)
    shared = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(checkpoint.folder, max_num_batched_tokens=chunk, **shared) as llm:
        found = generate(llm, ROWS)
        assert_held_as_forecast(llm, common(layout, 2), ROWS[4], quantized="kv_bits" in options)
        before = cached_tokens(llm)
        again = generate(llm, ROWS)
        assert "kv_bits" in options or cached_tokens(llm) > before
    for shared_tokens in (found, again):
        assert_equal(shared_tokens, alone, tolerance)
        assert_equal(shared_tokens, wanted, tolerance)
