"""What `fit` chooses beside the best of all widths: the committed result, and what is compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import memory_budgets
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.measure.cache_trial import EXACT, Window
from kvsurgery.policy.prices import Candidate
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_layout import Quantization

ROOT = Path(__file__).resolve().parents[2]
FOUND = {
    model: json.loads((ROOT / "benchmarks" / "results" / f"memory-budgets{suffix}.json").read_text())
    for model, suffix in {"SmolLM2": "", "Gemma 3": "-gemma3"}.items()
}


@pytest.mark.parametrize("model", FOUND)
def test_losses_were_measured_in_another_text(model: str) -> None:
    assert FOUND[model]["measured_on"] != FOUND[model]["read"]


@pytest.mark.parametrize(
    ("model", "memory"), [(model, memory) for model in FOUND for memory in FOUND[model]["budgets"]]
)
def test_the_best_of_every_width_that_fits_was_measured(model: str, memory: str) -> None:
    found = FOUND[model]
    row, best = found["budgets"][memory], {}
    for name, policy in found["policies"].items():
        heads, width = int(name.split()[0]), name.split()[-2]
        if policy["total"] <= int(memory) << 20 and heads > best.get(width, (0, ""))[0]:
            best[width] = heads, name
    assert {name for _, name in best.values()} == {*row["policies"]}
    for name in row["policies"]:
        assert len([each[name] for each in found["losses"].values()]) == found["passages"]
    expected = {name: found["policies"][name]["expected"] for name in row["policies"]}
    assert row["choice"] == min(expected, key=expected.get)


def test_layers_with_a_window_of_their_own_keep_it() -> None:
    model = ModelDimensions(layers=3, query_heads=4, kv_heads=2, head_dim=8)
    scores = np.array([[0.5, 0.1], [0, 0], [0.2, 0.9]], dtype=np.float32)
    profile = HeadProfile(scores, "kv-bits", "kv", "model", model, windows=(None, 16, None))
    four = Quantization(4)
    policies = [
        Candidate(3, "streaming", None, how, kv_bytes=0, chunk=0, workspace=0, total=0, loss=0.0)
        for how in (None, four)
    ]
    assert memory_budgets.rows_of(policies, profile, [four, Window(4, 8)]).tolist() == [
        [[EXACT, 2], [EXACT, EXACT], [EXACT, EXACT]],
        [[1, 2], [EXACT, EXACT], [1, 1]],
    ]


def test_the_table_names_the_best_of_what_was_measured() -> None:
    found = {
        "policies": {"1 heads in 4 bits": {"expected": 0.1}, "3 heads in 2 bits": {"expected": 0.2}},
        "budgets": {"9": {"choice": "1 heads in 4 bits", "policies": ["1 heads in 4 bits", "3 heads in 2 bits"]}},
        "losses": {
            "0": {"1 heads in 4 bits": 0.3, "3 heads in 2 bits": 0.1},
            "1": {"1 heads in 4 bits": 0.3, "3 heads in 2 bits": 0.3},
        },
    }
    assert memory_budgets.table(found)[-1] == (
        "| 9 MiB | 1 heads in 4 bits | 0.1000 | 0.3000 | 3 heads in 2 bits | 0.2000 | 50% |"
    )
