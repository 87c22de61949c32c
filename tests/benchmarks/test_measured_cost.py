"""The documented cost of SmolLM2 before and after a conversion is what `kvsurgery bench` measured."""

from __future__ import annotations

from pathlib import Path

from kvsurgery.bench.results import Bench
from kvsurgery.display import console

ROOT = Path(__file__).resolve().parents[2]


def test_the_documented_table_is_the_committed_result() -> None:
    found = Bench.load(ROOT / "benchmarks" / "results" / "cost-smollm2")
    assert found.settings["dtype"] == "float32"
    lines = []
    for row in found.rows:
        assert row.prefill is not None
        assert row.chunked is not None
        assert row.decode is not None
        prefills = [f"{phase.seconds:.1f} s, {console.size(phase.peak_bytes)}" for phase in (row.prefill, row.chunked)]
        cells = [f"{row.tokens:,}", row.contender, *prefills, f"{1e3 * row.decode.seconds:.0f} ms", f"{row.share:.0%}"]
        lines.append(f"| {' | '.join([*cells, console.size(row.kv_bytes)])} |")
    assert "\n".join(lines) in (ROOT / "docs" / "results" / "speed.md").read_text()
