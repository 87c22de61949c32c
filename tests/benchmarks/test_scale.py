"""The arithmetic of several devices, against counting by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scale
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_layout import Quantization
from tests.helpers.deciding import decided

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


def test_what_unequal_blocks_cost() -> None:
    # two layers of four heads over two ranks, so long that what streams does not count
    model, tokens = ModelDimensions(2, 4, 4, 32), 10**9
    profile = HeadProfile(np.array([[0.75, 0, 0, 0.25], [0, 0, 0.5, 0]], np.float32), "duo", "kv", "by hand", model)
    found = {}
    for uneven in (False, True):
        policy = decided(profile, full_heads=2, tp=2, tp_uneven=uneven)
        found[uneven] = scale.balance(scale.layout_of(policy, model).parts(2), tokens)
        # asked for are 0.75 and 0.5; alike are two of the first layer, 0.75 and 0.25
        assert scale.score(profile.scores, policy) == (1.25 if uneven else 1)
    # each rank has one full head; if in different layers, they wait for each other in both
    assert found[False] == pytest.approx({"bytes": 1, "by_layer": 1}, rel=1e-5)
    assert found[True] == pytest.approx({"bytes": 1, "by_layer": 2}, rel=1e-5)


@given(st.integers(0, 4), st.sampled_from([16, 4]), st.floats(0, 1e6))
def test_context_is_the_longest_that_fits(full: int, bits: int, room: float) -> None:
    model = ModelDimensions(1, 4, 4, 32)
    profile = HeadProfile(np.ones((1, 4), np.float32), "duo", "kv", "by hand", model)
    layout = scale.layout_of(decided(profile, full_heads=max(full, 1)), model)
    layout = layout if bits == 16 else layout.quantized(Quantization(bits))
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
    for row in rows:
        assert row["balance"]["strict"] == pytest.approx({"bytes": 1, "by_layer": 1})
        # heads that are asked for differ in number from layer to layer
        assert row["sparsity"] == 0 or row["ranks"] == 1 or row["balance"]["uneven"]["by_layer"] > 1
    assert Path(files[1]).stat().st_size
