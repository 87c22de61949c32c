"""The benchmark of a width for each layer: its committed figures are the documented ones, of the widths chosen now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import layer_bits
from kvsurgery.profile.cache_losses import CacheLosses

ROOT = Path(__file__).resolve().parents[2]
FOUND = json.loads((ROOT / "benchmarks" / "results" / "layer-bits.json").read_text())


def test_losses_were_measured_in_another_text() -> None:
    assert FOUND["measured_on"] != FOUND["read"]


@pytest.mark.parametrize("budget", layer_bits.BUDGETS)
def test_the_compared_widths_are_those_that_are_chosen(budget: float) -> None:
    path = ROOT / "examples" / "smollm2" / "losses.safetensors"
    auto_bits = layer_bits.auto_bits(CacheLosses.load(path), str(path), budget)
    assert auto_bits == FOUND["bits"][f"auto {budget}"]
    assert sum(auto_bits) <= sum(FOUND["bits"][f"{budget} bits"])
