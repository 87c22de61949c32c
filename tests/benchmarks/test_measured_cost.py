"""The documented costs of models before and after a conversion are what `kvsurgery bench` measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsurgery.bench.results import Bench
from kvsurgery.display import console
from tests.docs.pages import figures

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "dtype", "page"), [("smollm2", "float32", "speed"), ("qwen", "bfloat16", "qwen")], ids=["SmolLM2", "Qwen"]
)
def test_the_documented_table_is_the_committed_result(name: str, dtype: str, page: str) -> None:
    found = Bench.load(ROOT / "benchmarks" / "results" / f"cost-{name}")
    assert found.settings["dtype"] == dtype
    lines = []
    for row in found.rows:
        assert row.prefill is not None
        assert row.chunked is not None
        assert row.decode is not None
        prefills = [f"{phase.seconds:.1f} s, {console.size(phase.peak_bytes)}" for phase in (row.prefill, row.chunked)]
        cells = [f"{row.tokens:,}", row.contender, *prefills, f"{1e3 * row.decode.seconds:.0f} ms", f"{row.share:.0%}"]
        lines.append(f"| {' | '.join([*cells, console.size(row.kv_bytes)])} |")
    assert "\n".join(lines) in (ROOT / "docs" / "results" / f"{page}.md").read_text()


def test_what_the_page_says_of_qwen() -> None:
    rows = {(row.tokens, row.contender): row for row in Bench.load(ROOT / "benchmarks/results/cost-qwen").rows}

    def ratios(phase: str) -> list[float]:
        seconds = {row: getattr(measured, phase).seconds for row, measured in rows.items()}
        return [seconds[tokens, "converted"] / seconds[tokens, "original"] for tokens in (2048, 8192)]

    page = "docs/results/qwen.md"
    assert {f"{ratio:.0%}" for ratio in ratios("decode")} <= figures(page, "**Decoding** from 4 bits")
    longer = {f"{100 * ratio - 100:.0f}" for ratio in ratios("prefill") + ratios("chunked")}
    assert longer <= {figure.removesuffix("%") for figure in figures(page, "**Prefill** takes")}
