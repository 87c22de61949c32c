"""Figures of docs/ outside of a benchmark's own table are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import recurrent_report
from benchmarks.peers import report
from tests.docs.pages import figures

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()
PEERS = json.loads((ROOT / "benchmarks" / "peers" / "results.json").read_text())


def found(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def after(page: str, begin: str) -> list[str]:
    """The lines of the first table after some words."""
    lines = page.partition(begin)[2].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    return lines[start : lines.index("", start)]


def test_peers_are_documented_as_measured() -> None:
    """docs/results.md has some rows of the table that the script prints."""
    table = report.table(PEERS)
    shown = after(PAGE, "## Beside other methods")
    assert shown[0] == table[0]
    assert len(shown) > 10
    assert set(shown) <= set(table)
    sizes = PEERS["queries"], PEERS["long_queries"], PEERS["long_tokens"], len(PEERS["contenders"])
    assert {f"{size:,}" for size in sizes} <= figures("docs/results.md", "1,024 tokens") | figures(
        "docs/results.md", "peers/results.json"
    )
    assert PEERS["texts"] == 2


def test_where_peers_are_better() -> None:
    rows = PEERS["contenders"]
    ours, snap = rows["kvsurgery, budgets of 64"], rows["SnapKVPress = budgets of 64"]
    assert snap["kv_bytes"] < ours["kv_bytes"]
    assert snap["recall_asked"] == ours["recall_asked"]
    assert snap["recall_later"] < ours["recall_later"]
    assert all(snap[part] < ours[part] for part in ("prefill_ms", "decode_ms"))
    shares = {f"{row['said']:.0%}" for row in (snap, rows["SnapKVPress = duo, 2 full"])}
    assert shares <= figures("docs/results.md", "two full heads")
    duo = [rows[name]["perplexity"] for name in ("DuoAttentionPress, 2 full", "kvsurgery, duo, 2 full")]
    assert duo == sorted(duo)
    quantized, quanto = rows["kvsurgery, 4 bit"], rows["quanto, 4 bit, keys per token"]
    assert quantized["kv_bytes"] > 2 * quanto["kv_bytes"]
    assert quantized["decode_ms"] > quanto["decode_ms"]


def test_long_prompts_of_the_bundled_model() -> None:
    results = found("recurrent")
    assert {row["samples"] for row in results["results"]} == {20, 5}
    rows = {(row["method"], row["tokens"]): row for row in results["results"]}
    lengths = recurrent_report.LINEAR
    ours, above = (
        [f"{1e6 * rows[name, length]['first_s'] / length:.1f}" for length in lengths]
        for name in (recurrent_report.OURS, recurrent_report.ABOVE)
    )
    claims = {claim["what"]: claim["found"] for claim in results["claims"]}
    of_h2o = [
        claims[f"no slower than H2O: {name}"].removesuffix(" of its time").split(", ")[-1]
        for name in (recurrent_report.OURS, recurrent_report.ABOVE)
    ]
    held = results["held_bytes"][recurrent_report.OURS][0]
    shown = {*ours, *above, *of_h2o, f"{held / 2**20:.2f}"}
    assert shown <= figures("docs/results/long-prompts.md", "REFORM's time is linear")


def test_recipes_say_what_small_budgets_hold() -> None:
    row = PEERS["contenders"]["kvsurgery, budgets of 16"]
    assert {f"{row['kv_bytes'] / 1024:.0f}", f"{row['of_full']:.0%}"} <= figures(
        "docs/recipes.md", "budgets that average 16 tokens"
    )
