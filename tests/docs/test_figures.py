"""The figures of the documentation show what the committed results and the present byte counts are.

Files differ between versions of matplotlib, so what they draw is compared: words, and lines.
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks import figures, quantized_report
from benchmarks.real_model import cache_report
from kvsurgery.conversion.prepared import PreparedConversion
from kvsurgery.policy.evidence import Evidence
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from kvsurgery.report.colors import DARK, LIGHT
from tests.helpers import svg

ROOT = Path(__file__).resolve().parents[2]
FIGURES, RESULTS = ROOT / "docs" / "figures", ROOT / "benchmarks" / "results"
THEMES = {"light": LIGHT, "dark": DARK}
MANY = 20  # points, of which matplotlib leaves some out


def found(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def assert_same_figures(folder: Path, name: str) -> None:
    """In both themes, words are equal, and lines have the same points, or the same course where some are left out."""
    for theme in THEMES:
        own, committed = (place / f"{name}-{theme}.svg" for place in (folder, FIGURES))
        assert svg.words(own) == svg.words(committed)
        lines, others = svg.lines(own), svg.lines(committed)
        assert len(lines) == len(others) > 0
        for line, other in zip(lines, others, strict=True):
            if len(line) > MANY:
                line, other = np.interp(other[:, 0], *line.T), other[:, 1]
            np.testing.assert_allclose(line, other, atol=0.005)


def test_caches_are_drawn_as_measured(tmp_path: Path) -> None:
    figures.save(partial(cache_report.draw, found("which-cache")), str(tmp_path / "cache"))
    assert_same_figures(tmp_path, "cache")


def test_quantized_caches_are_drawn_as_measured(tmp_path: Path) -> None:
    panels = {
        "SmolLM2, 1,024 tokens: KL, nats": found("quantized-cache-1024"),
        "SmolLM2, 4,096 tokens": found("quantized-cache-4096"),
        "bundled model, 1,024 tokens": found("quantized-cache-bundled"),
    }
    figures.save(partial(quantized_report.draw, panels), str(tmp_path / "quantized"))
    assert_same_figures(tmp_path, "quantized")


def heads_and_memory() -> ModuleType:
    """The script that draws the README's figure."""
    spec = util.spec_from_file_location("heads_and_memory", FIGURES / "heads_and_memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_heads_are_drawn_with_the_bytes_that_are_predicted(tmp_path: Path) -> None:
    """Bytes that a cache allocates are compared with the predicted ones elsewhere."""
    script = heads_and_memory()
    profile = HeadProfile.load(script.PROFILE)
    lengths = range(script.LENGTHS[0], script.LENGTHS[-1] + 1)
    token = 2 * profile.model.layers * profile.model.kv_heads * profile.model.head_dim * 4
    whole = [length * token for length in script.LENGTHS]
    curves, full = [script.Curve("original", "original", whole, whole)], []
    for name, color, bits in (("converted", "converted", None), ("converted, 4 bits", "series-2", 4)):
        recipe = Recipe.of(full_heads=4, sink=4, recent=32, kv_bits=bits)
        layout = PreparedConversion.prepare(script.MODEL, recipe, Evidence(profile)).policy.layout
        predicted = {length: layout.kv_bytes(1, length, itemsize=4) for length in lengths}
        curves.append(script.Curve(name, color, [predicted[each] for each in script.LENGTHS], [*predicted.values()]))
        full = [layer.full for layer in layout.layers]
    assert profile.scores is not None
    for theme, colors in THEMES.items():
        script.draw(profile.scores.T, full, curves, colors, tmp_path / f"heads-{theme}.svg")
    assert_same_figures(tmp_path, "heads")
    [said] = re.findall(r'heads-light\.svg" alt="([^"]+)"', (ROOT / "README.md").read_text())
    assert re.findall(r"\d+\.\d+", said) == [f"{curve.allocated[-1] / script.MIB:.2f}" for curve in curves]


def test_another_figure_is_found(tmp_path: Path) -> None:
    """The comparison fails where one value differs."""
    results = found("which-cache")
    name = next(name for name in results["results"] if name.startswith("SnapKVPress"))
    results["results"][name]["kl"] = [2 * loss for loss in results["results"][name]["kl"]]
    figures.save(partial(cache_report.draw, results), str(tmp_path / "cache"))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_figures(tmp_path, "cache")
