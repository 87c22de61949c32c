"""What the page on quantized caches says of calibrated rotations is what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[2]


def test_the_documented_losses_of_calibrated_rotations() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "calibrated-rotations.json").read_text())
    windows = found["windows"].values()
    kivi, calibrated, values, per_token, per_token_calibrated = (
        f"{fmean(window[name] for window in windows):.4f}"
        for name in (
            "kivi, Hadamard",
            "kivi, calibrated",
            "kivi, values calibrated",
            "per-token, Hadamard",
            "per-token, calibrated",
        )
    )
    page = " ".join((ROOT / "docs" / "quantized-caches.md").read_text().split())
    assert f"from {kivi} to {calibrated} with kivi (to {values} with only values calibrated)" in page
    assert f"from {per_token} to {per_token_calibrated} with per-token scales" in page
