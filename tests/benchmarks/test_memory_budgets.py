"""What `fit` chooses beside the best of all widths: the committed result, and what is compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import memory_budgets

ROOT = Path(__file__).resolve().parents[2]
FOUND = json.loads((ROOT / "benchmarks" / "results" / "memory-budgets.json").read_text())


def test_the_documented_table_is_the_committed_result() -> None:
    assert "\n".join(memory_budgets.table(FOUND)) in (ROOT / "docs" / "memory-budget.md").read_text()
    assert FOUND["measured_on"] != FOUND["read"]


@pytest.mark.parametrize("memory", FOUND["budgets"])
def test_every_width_that_fits_was_measured(memory: str) -> None:
    row = FOUND["budgets"][memory]
    assert {name.split()[-2] for name in row["policies"]} == {"16", "8", "4", "3", "2"}
    for name in row["policies"]:
        assert FOUND["policies"][name]["total"] <= int(memory) << 20
        assert len([each[name] for each in FOUND["losses"].values()]) == FOUND["passages"]
    expected = {name: FOUND["policies"][name]["expected"] for name in row["policies"]}
    assert row["choice"] == min(expected, key=expected.get)


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
