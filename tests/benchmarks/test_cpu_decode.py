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
    slowest = min(row["x_stock"] for row in short if row["tokens"] == 512 and row["bits"] < 16)
    assert f"{1 / slowest - 1:.0%}" in figures("docs/results/speed.md", "slower than stock")
    at = {(row["sparsity"], row["bits"]): row for row in rows if (row["tokens"], row["batch"]) == (16384, 1)}
    ms = {(row["tokens"], row["batch"], row["sparsity"], row["bits"]): row["ms"] for row in rows + short}
    longer = {
        width: [ms[*case, width] / ms[*case, 16] for *case, bits in ms if bits == width] for width in (8, 4, 3, 2)
    }
    shown = {f"{ratio:.2f}" for ratio in (min(longer[4]), max(longer[4]), max(longer[3]))}
    assert shown <= figures("docs/results/speed.md", "all lengths, batches")
    at_16k = {bits: at["0.00", bits]["ms"] / at["0.00", 16]["ms"] for bits in (8, 4, 3, 2)}
    assert max(at_16k[bits] for bits in (8, 4, 2)) <= 1
    assert at_16k[3] == pytest.approx(4 / 3, abs=0.02)
