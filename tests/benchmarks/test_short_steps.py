"""Decode steps over short contexts are measured beside stock, and the docs say what came out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real_model import short_steps
from kvsurgery.checkpoint.model import Model
from kvsurgery.profile.head_profile import HeadProfile
from tests.docs.pages import figures
from tests.helpers.families import stock

ROOT = Path(__file__).resolve().parents[2]


def test_steps_are_measured_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = stock("llama", head_dim=8)
    model.save_pretrained(tmp_path / "model")
    profile, results = tmp_path / "gates.safetensors", tmp_path / "short.json"
    shape = Model.of(model.config.to_dict()).dimensions
    scores = np.linspace(0, 1, shape.layers * shape.kv_heads, dtype=np.float32).reshape(shape.layers, -1)
    HeadProfile(scores, "duo", "kv", "made up", shape).save(profile)
    options = {"--profile": profile, "--lengths": 20, "--steps": 4, "--json": results}
    words = ["short_steps.py", tmp_path / "model", *(word for pair in options.items() for word in pair)]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    short_steps.main()
    found = json.loads(results.read_text())["results"]
    assert [*found] == [*short_steps.recipes(scores.size)]
    assert all(each["20"]["ratio"] > 0 and each["20"]["stock"] > 0 for each in found.values())
    assert "| half of the heads stream |" in capsys.readouterr().out


def test_the_docs_say_how_long_steps_take() -> None:
    """What is not quantized takes as long as stock's steps from the shortest context on."""
    found = json.loads((ROOT / "benchmarks" / "results" / "short-steps.json").read_text())
    for name in ("every head full", "half of the heads stream"):
        ratios = [each["ratio"] for each in found["results"][name].values()]
        assert max(ratios) < 1.01
        assert ratios[-1] < 0.95
    codes = {int(length): each["ratio"] for length, each in found["results"]["4 bits"].items()}
    assert f"{max(codes.values()) - 1:.0%}" in figures("docs/results/speed.md", "takes up to")
    assert all(ratio < 1 for length, ratio in codes.items() if length >= 1024)
