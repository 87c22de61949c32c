"""What the page on Qwen2.5-Coder-1.5B says of caches is what the committed file holds."""

from __future__ import annotations

import json

import pytest

from benchmarks.real_model import cache_report
from tests.docs.pages import ROOT, figures

PAGE = "docs/results/qwen.md"
ROWS = {
    row.name: row
    for row in cache_report.rows(json.loads((ROOT / "benchmarks/results/which-cache-qwen.json").read_text()))
}


def recall(name: str) -> str:
    return f"{ROWS[name].scores.recall.mean:.0%}"


def kl(name: str) -> str:
    return f"{ROWS[name].scores.kl.mean:.4f}"


def test_four_bits() -> None:
    ours, quanto = "kvsurgery, all heads full, 4 bits", "QuantizedCache, quanto, 4 bits"
    shown = {recall(name) for name in ("original", ours, quanto)} | {kl(ours), kl(quanto)}
    shown |= {f"{ROWS[name].share:.0%}" for name in (ours, quanto)}
    assert shown <= figures(PAGE, "**4 bits**")
    assert ROWS[ours].scores.kl.high < ROWS[quanto].scores.kl.low
    for name in (ours, quanto):
        assert ROWS[name].scores.more.low <= 0 <= ROWS[name].scores.more.high


@pytest.mark.parametrize("share", ["35%", "20%"])
def test_presses_lose_facts_that_are_asked_for_later(share: str) -> None:
    presses = [name for name in ROWS if name.endswith(f"Press, {share}")]
    assert {recall(name) for name in presses} <= figures(PAGE, "**Presses**")
    assert all(ROWS[name].scores.more.high < 0 for name in presses)


def test_budgets() -> None:
    budgets, press = "kvsurgery, budgets of 1024 by er, 4 bits", "SnapKVPress, 35%"
    shown = {f"{ROWS[budgets].share:.0%}", recall(budgets), kl(budgets), kl(press)}
    assert shown <= figures(PAGE, "**Budgets**")
    assert recall(budgets) == recall(press)
