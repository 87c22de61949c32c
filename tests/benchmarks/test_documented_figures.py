"""Figures of docs/ outside of a benchmark's own table are those of the committed results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "peers"))

import recurrent_report
import report

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()
PEERS = json.loads((ROOT / "benchmarks" / "peers" / "results.json").read_text())


def found(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def sentences(page: str) -> str:
    return " ".join(page.split())


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
    said = sentences(PAGE)
    assert (
        f"on {PEERS['queries']} prompts of 1,024 tokens and {PEERS['long_queries']} of {PEERS['long_tokens']:,}" in said
    )
    assert (PEERS["texts"], f"all {len(PEERS['contenders'])} contenders" in said) == (2, True)


def test_where_peers_are_better() -> None:
    rows = PEERS["contenders"]
    ours, snap = rows["kvsurgery, budgets of 64"], rows["SnapKVPress = budgets of 64"]
    assert snap["kv_bytes"] < ours["kv_bytes"]
    assert snap["recall_asked"] == ours["recall_asked"]
    assert snap["recall_later"] < ours["recall_later"]
    assert all(snap[part] < ours[part] for part in ("prefill_ms", "decode_ms"))
    assert f"{snap['said']:.0%} that of budgets of 64" in sentences(PAGE)
    assert f"{rows['SnapKVPress = duo, 2 full']['said']:.0%} is the share that two full heads take" in sentences(PAGE)
    duo = [rows[name]["perplexity"] for name in ("DuoAttentionPress, 2 full", "kvsurgery, duo, 2 full")]
    assert duo == sorted(duo)
    quantized, quanto = rows["kvsurgery, 4 bit"], rows["quanto, 4 bit, keys per token"]
    assert quantized["kv_bytes"] > 2 * quanto["kv_bytes"]
    assert quantized["decode_ms"] > quanto["decode_ms"]


def test_long_prompts_of_the_bundled_model() -> None:
    results, page = found("recurrent"), (ROOT / "docs" / "results" / "long-prompts.md").read_text()
    said = sentences(page)
    assert {row["samples"] for row in results["results"]} == {20, 5}
    rows = {(row["method"], row["tokens"]): row for row in results["results"]}
    lengths = recurrent_report.LINEAR
    ours, above = (
        [f"{1e6 * rows[name, length]['first_s'] / length:.1f}" for length in lengths]
        for name in (recurrent_report.OURS, recurrent_report.ABOVE)
    )
    assert f"16k, 32k and 64k tokens, one core reads a token in {ours[0]}, {ours[1]} and {ours[2]} µs" in said
    assert f"with heads above layer 0, in {above[0]}, {above[1]} and {above[2]} µs" in said
    claims = {claim["what"]: claim["found"] for claim in results["claims"]}
    of_h2o = [
        claims[f"no slower than H2O: {name}"].removesuffix(" of its time").split(", ")[-1]
        for name in (recurrent_report.OURS, recurrent_report.ABOVE)
    ]
    assert f"this is {of_h2o[0]} and {of_h2o[1]} times what H2O takes" in said
    assert (
        f"{max(held for held, _ in [results['held_bytes'][recurrent_report.OURS]]) / 2**20:.2f} MiB in host memory"
        in said
    )


def test_recipes_say_what_small_budgets_hold() -> None:
    row = PEERS["contenders"]["kvsurgery, budgets of 16"]
    said = sentences((ROOT / "docs" / "recipes.md").read_text())
    assert f"a cache of {row['kv_bytes'] / 1024:.0f} KiB, {row['of_full']:.0%} of the original's" in said
