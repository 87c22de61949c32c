"""The arithmetic of several devices, against counting by hand and by trying everything."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.dimensions import ModelDimensions

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import scale

# as the Hub counts them
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", scale.SHAPES)
def test_weights_of_one_rank_are_all_parameters(name: str) -> None:
    assert scale.SHAPES[name].weights(1, itemsize=1) == PARAMETERS[name]


@given(st.integers(1, 4), st.sampled_from([(4, 2), (4, 4), (6, 3), (4, 1)]), st.data())
def test_strict_keeps_the_best_that_sets_of_heads_allow(
    layers: int, split: tuple[int, int], data: st.DataObject
) -> None:
    heads, blocks = split
    full = data.draw(st.integers(0, layers * heads))
    scores = np.random.default_rng(data.draw(st.integers(0, 99))).random((layers, heads))
    counts = scale.strict(scores, full, blocks)
    assert (counts == counts[:, :1]).all()
    assert abs(counts.sum() - full) <= blocks / 2
    ranked = np.sort(scores)[:, ::-1]

    def kept(numbers: tuple[int, ...]) -> float:
        return sum(row[: number * blocks].sum() for row, number in zip(ranked, numbers, strict=True))

    ways = itertools.product(range(heads // blocks + 1), repeat=layers)
    best = max(kept(way) for way in ways if sum(way) * blocks == counts.sum())
    assert kept(tuple(counts[:, 0])) == pytest.approx(best)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=9), st.sampled_from([1, 2, 4, 8]), st.sampled_from([16, 8, 4]))
def test_blocks_hold_what_the_whole_model_does(full: list[int], blocks: int, bits: int) -> None:
    model, whole = ModelDimensions(len(full), 16, 8, 32), np.array(full)
    [undivided] = scale.block_layouts(whole[:, None], model, bits)
    ways = {"uneven": scale.uneven(whole, blocks), "one block": scale.one_block(whole, blocks, 8)}
    for counts in ways.values():
        assert (counts.sum(1) == whole).all()
        assert counts.min() >= 0
        assert counts.max() <= 8 // blocks
        parts = [layout.kv_bytes(1, 5000) for layout in scale.block_layouts(counts, model, bits)]
        assert sum(parts) == undivided.kv_bytes(1, 5000)
    # nobody stores more than a head more than another
    totals = ways["uneven"].sum(0)
    assert totals.max() - totals.min() <= 1


def test_what_unequal_blocks_cost() -> None:
    # two layers of four heads, so long that what streams does not count: each layer has one full head
    model, tokens = ModelDimensions(2, 4, 4, 32), 10**9
    uneven, one_block = scale.uneven(np.array([1, 1]), 2), scale.one_block(np.array([1, 1]), 2, 4)
    assert uneven.tolist() == [[1, 0], [0, 1]]
    assert one_block.tolist() == [[1, 0], [1, 0]]
    # the first ranks store alike, but wait for each other in both layers; of the second one stores nothing
    assert scale.balance(uneven, model, tokens) == pytest.approx({"bytes": 1, "by_layer": 2}, rel=1e-5)
    assert scale.balance(one_block, model, tokens) == pytest.approx({"bytes": 2, "by_layer": 2}, rel=1e-5)


@given(st.integers(0, 4), st.sampled_from([16, 4]), st.floats(0, 1e6))
def test_context_is_the_longest_that_fits(full: int, bits: int, room: float) -> None:
    model = ModelDimensions(1, 4, 4, 32)
    [layout] = scale.block_layouts(np.array([[max(full, 1)]]), model, bits)
    tokens = scale.context(layout, room)
    assert tokens == 0 or layout.kv_bytes(1, tokens) <= room
    assert layout.kv_bytes(1, tokens + 1) > room


def test_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / "scale.json"), str(tmp_path / "scale.png")]
    monkeypatch.setattr(sys, "argv", ["scale.py", "--models", "llama-3-8b", "--json", files[0], "--plot", files[1]])
    scale.main()
    assert "…" not in capsys.readouterr().out
    rows = json.loads(Path(files[0]).read_text())["rows"]
    assert len(rows) == 4 * len(scale.RANKS)
    dense = {row["ranks"]: row["kv_bytes"]["16"] for row in rows if row["sparsity"] == 0}
    # 32 layers, 8 heads, keys and values of 128 in two bytes
    assert dense == {ranks: 131072 * 32 * 8 * 2 * 128 * 2 // min(ranks, 8) for ranks in scale.RANKS}
    assert Path(files[1]).stat().st_size
