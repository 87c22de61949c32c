"""Padded batches of prompts are measured beside stock, and the docs say what came out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real_model import padded_prompts
from kvsurgery.checkpoint.model import Model
from kvsurgery.profile.head_profile import HeadProfile
from tests.docs.pages import figures
from tests.helpers.families import stock

ROOT = Path(__file__).resolve().parents[2]


def test_batches_are_read_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = stock("llama", head_dim=8)
    model.save_pretrained(tmp_path / "model")
    shape = Model.of(model.config.to_dict()).dimensions
    scores = np.linspace(0, 1, shape.layers * shape.kv_heads, dtype=np.float32).reshape(shape.layers, -1)
    HeadProfile(scores, "duo", "kv", "made up", shape).save(tmp_path / "gates.safetensors")
    options = {"--profile": tmp_path / "gates.safetensors", "--lengths": 40, "--rounds": 2}
    words = [tmp_path / "model", *(word for pair in options.items() for word in pair), "--json", tmp_path / "out.json"]
    monkeypatch.setattr(sys, "argv", ["padded_prompts.py", *map(str, words)])
    padded_prompts.main()
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [*found] == ["every head full", "half of the heads stream"]
    assert all(value > 0 for each in found.values() for value in each["40"].values())
    assert "| half of the heads stream |" in capsys.readouterr().out


def test_the_docs_say_how_long_padded_prompts_take() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "padded-prompts.json").read_text())["results"]
    ratios = {f"{result['2048']['stock ratio']:.2f}" for result in found.values()}
    ratios.add(f"{found['every head full']['512']['stock ratio']:.2f}")
    unpadded = f"{found['every head full']['2048']['unpadded ratio']:.2f}"
    assert {*ratios, unpadded} <= figures("docs/results/speed.md", "without padding takes")
