"""The CPU benchmark with a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import cpu_decode, synthetic
from tests.docs.pages import figures

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "cpu", synthetic.SHAPES["tiny"])


def test_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, steps, batch = tmp_path / "decode.json", 2, 2
    monkeypatch.setattr(
        sys, "argv", ["cpu_decode.py", "--json", str(path), "--memory", "0.0003", "--steps", str(steps)]
    )
    sys.argv += ["--lengths", "500", "--batches", str(batch)]
    cpu_decode.main()
    results = json.loads(path.read_text())["rows"]
    parts = cpu_decode.variants([16, 8, 4, 3, 2])
    assert [(row["sparsity"], row["bits"]) for row in results] == [(part.name, part.bits) for part in parts]
    assert len(parts) == 1 + 3 * 5
    for row, part in zip(results, parts, strict=True):
        assert row["kv_bytes"] == part.kv_bytes(batch, 500, steps + cpu_decode.WARM)
        assert row["x_stock"] == pytest.approx(results[0]["ms"] / row["ms"])
        assert row["x_own_dense"] == pytest.approx(results[1]["ms"] / row["ms"])


@pytest.mark.parametrize("memory", [1e5, 6e5, 1e12])
def test_groups(memory: float) -> None:
    """Together they have every variant once, and what does not fit beside others is alone."""
    parts = cpu_decode.variants([16, 4])
    groups = cpu_decode.groups(parts, 1, 500, 4, memory)
    assert sorted(id(part) for group in groups for part in group) == sorted(map(id, parts))
    for group in groups:
        assert len(group) == 1 or sum(part.kv_bytes(1, 500, 4) for part in group) <= memory
    assert len(groups) == {1e5: len(parts), 1e12: 1}.get(memory, len(groups))


def test_the_documented_figures_are_the_committed_results() -> None:
    results = ROOT / "benchmarks" / "results"
    rows, short = (
        json.loads((results / f"{name}.json").read_text())["rows"] for name in ("cpu-decode", "cpu-decode-short")
    )
    of_stock = [1 / row["x_stock"] for row in short if row["tokens"] == 512 and row["bits"] < 16]
    assert f"{max(of_stock):.2f}" in figures("docs/results/speed.md", "of stock's time")
    ms = {(row["tokens"], row["batch"], row["sparsity"], row["bits"]): row["ms"] for row in rows + short}
    longer = {case: ms[case] / ms[*case[:3], 16] for case in ms if case[3] < 16}
    shown = {f"{ratio:.2f}" for ratio in (min(longer.values()), max(longer.values()))}
    at_16k = {bits: longer[16384, 1, "0.00", bits] for bits in (4, 3)}
    assert shown | {f"{ratio:.2f}" for ratio in at_16k.values()} <= figures(
        "docs/results/speed.md", "with all heads full, a step takes"
    )
