"""Tables and sentences on a GPU in docs/ and the README are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPORT = json.loads((ROOT / "benchmarks" / "results" / "gpu-nvidia-h100-80gb-hbm3.json").read_text())
PAGE, README = ((ROOT / name).read_text() for name in ("docs/results/speed.md", "README.md"))
ON_A_GPU = " ".join(PAGE.partition("## On a GPU")[2].partition("## Decoding on a CPU")[0].split())


def rows(section: str) -> list[dict]:
    return [row for row in REPORT["rows"] if row["section"] == section]


def test_the_page_says_what_was_measured_on() -> None:
    assert REPORT["device"] == "NVIDIA H100 80GB HBM3"
    versions = f"torch {REPORT['torch'].partition('+')[0]}, Triton {REPORT['triton']} and transformers"
    assert f"{versions} {REPORT['transformers']}" in ON_A_GPU
    assert f"({REPORT['read_bandwidth'] / 1e12:.2f} TB/s)" in ON_A_GPU


def test_what_the_page_says_of_kernels() -> None:
    shares = {(row["batch"], row["bits"], row["full"]): row["share"] for row in rows("kernels")}
    assert f"With half of them full, 4 bits reach {shares[1, 4, 0.5]:.0%} of the bandwidth" in ON_A_GPU
    assert max(share for (batch, bits, _), share in shares.items() if (batch, bits) == (8, 2)) < 0.5
    [failure] = [skip for skip in REPORT["skipped"] if skip["section"] == "kernels"]
    assert failure["what"] == "8 bits, batch 8, 131,072 tokens, 100% full"
    kernels = (ROOT / "docs" / "kernels.md").read_text()
    loaded, alone = ([shares[batch, bits, 1.0] for bits in (16, 4, 2)] for batch in (8, 1))
    assert "{:.0%} with 16 bits, {:.0%} with 4 bits kivi, {:.0%} with 2 bits".format(*loaded) in kernels
    assert "and {:.0%}, {:.0%} and {:.0%} are reached".format(*alone) in kernels


def test_what_the_page_says_of_prompts() -> None:
    """Shares of the matrix units' rate of an H100, and the prompt that stock has no memory for."""
    shares = {(row["kind"], row["past"]): row["TFLOP/s"] / 989 for row in rows("prefill")}
    kernels = " ".join((ROOT / "docs" / "kernels.md").read_text().split())
    full = sorted(share for (kind, _), share in shares.items() if kind == "full")
    streaming = {f"{share:.0%}" for (kind, _), share in shares.items() if kind == "streaming"}
    assert f"{full[0] * 100:.0f} to {full[-1]:.0%} over full heads, which is less than" in kernels
    assert f"and {' '.join(streaming)} over streaming heads" in kernels
    assert any(skip["what"].endswith("stock, SDPA") and skip["why"] == "out of memory" for skip in REPORT["skipped"])


def test_what_the_page_says_of_steps() -> None:
    steps = {(row["model"], row["tokens"], row["variant"]): row["ms"] for row in rows("decode")}
    dense, half, int4 = (steps["Llama-3-8B", 400_000, name] for name in ("all full", "50% full", "50% full, int4"))
    assert round(3 * (1 - half / dense)) == 1
    assert round(2 * (1 - int4 / dense)) == 1
    assert "shortens our step with every head full by a third; with 4 bits in addition, by half" in ON_A_GPU
    assert {row["pays after"] for row in rows("graphs")} == {2, 3}
    assert "this pays after two or three steps" in ON_A_GPU


def test_what_fits_in_80_gb() -> None:
    fits = {row["tokens"]: row["fits"] for row in rows("capacity")}
    assert fits == {3_900_000: "yes", 4_000_000: "no"}
    assert "3,900,000 tokens of one sequence fit in 80 GB, and 4,000,000 do not" in ON_A_GPU
    assert f"{rows('capacity')[0]['dense tokens, by formula']:,}, by formula" in ON_A_GPU
    assert "3.9 million tokens fit in 80 GB" in README


def test_what_the_readme_says_of_generate() -> None:
    stock, eager, graphed = rows("generate")
    assert (stock["tokens"], graphed["graph"]) == (100_000, "yes")
    said, support = " ".join(README.split()), " ".join((ROOT / "docs" / "support.md").read_text().split())
    assert f"takes {graphed['ms a token']:.1f} ms a token with half of Llama-3-8B's heads streaming" in said
    assert f"and stock {stock['ms a token']:.1f} ms." in said
    assert f"{eager['ms a token']:.0f} ms a token, where stock takes {stock['ms a token']:.0f}." in support
