"""Tables and sentences on a GPU in docs/ and the README are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

from tests.docs.pages import figures, numbers

ROOT = Path(__file__).resolve().parents[2]
REPORT = json.loads((ROOT / "benchmarks" / "results" / "gpu-nvidia-h100-80gb-hbm3.json").read_text())
PAGE, KERNELS = "docs/results/speed.md", "docs/kernels.md"


def rows(section: str) -> list[dict]:
    return [row for row in REPORT["rows"] if row["section"] == section]


def test_the_page_says_what_was_measured_on() -> None:
    assert REPORT["device"] == "NVIDIA H100 80GB HBM3"
    versions = numbers(" ".join(REPORT[name].partition("+")[0] for name in ("torch", "triton", "transformers")))
    assert versions <= figures(PAGE, REPORT["device"].partition(" 80GB")[0])
    assert f"{REPORT['read_bandwidth'] / 1e12:.2f}" in figures(PAGE, "TB/s")


def test_what_the_page_says_of_kernels() -> None:
    shares = {(row["batch"], row["bits"], row["full"]): row["share"] for row in rows("kernels")}
    assert f"{shares[1, 4, 0.5]:.0%}" in figures(PAGE, "of the bandwidth")
    assert max(share for (batch, bits, _), share in shares.items() if (batch, bits) == (8, 2)) < 0.5
    [failure] = [skip for skip in REPORT["skipped"] if skip["section"] == "kernels"]
    assert failure["what"] == "8 bits, batch 8, 131,072 tokens, 100% full"
    for batch, topic in ((8, "4 bits kivi"), (1, "With one sequence")):
        assert {f"{shares[batch, bits, 1.0]:.0%}" for bits in (16, 4, 2)} <= figures(KERNELS, topic)


def test_what_the_page_says_of_prompts() -> None:
    """Shares of the matrix units' rate of an H100, and the prompt that stock has no memory for."""
    shares = {(row["kind"], row["past"]): row["TFLOP/s"] / 989 for row in rows("prefill")}
    full = sorted(share for (kind, _), share in shares.items() if kind == "full")
    streaming = {f"{share:.0%}" for (kind, _), share in shares.items() if kind == "streaming"}
    assert {f"{full[0] * 100:.0f}", f"{full[-1]:.0%}", *streaming} <= figures(KERNELS, "989 and 312 TFLOPS")
    assert any(skip["what"].endswith("stock, SDPA") and skip["why"] == "out of memory" for skip in REPORT["skipped"])


def test_what_the_page_says_of_steps() -> None:
    steps = {(row["model"], row["tokens"], row["variant"]): row["ms"] for row in rows("decode")}
    dense, half, int4 = (steps["Llama-3-8B", 400_000, name] for name in ("all full", "50% full", "50% full, int4"))
    assert round(3 * (1 - half / dense)) == 1
    assert round(2 * (1 - int4 / dense)) == 1
    assert {row["pays after"] for row in rows("graphs")} == {2, 3}


def test_what_fits_in_80_gb() -> None:
    fits = {row["tokens"]: row["fits"] for row in rows("capacity")}
    assert fits == {3_900_000: "yes", 4_000_000: "no"}
    shown = {f"{tokens:,}" for tokens in (*fits, rows("capacity")[0]["dense tokens, by formula"])}
    assert shown <= figures(PAGE, "by formula")
    assert "3.9" in figures("README.md", "**On an H100**")


def test_what_the_readme_says_of_generate() -> None:
    stock, eager, graphed = rows("generate")
    assert (stock["tokens"], graphed["graph"]) == (100_000, "yes")
    assert {f"{row['ms a token']:.1f}" for row in (stock, graphed)} <= figures("README.md", "**On an H100**")
    assert {f"{row['ms a token']:.0f}" for row in (eager, stock)} <= figures("docs/support.md", "Without a graph")
