"""What the page on quantized caches says of quality and of calibrated rotations is what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

from benchmarks import cache_quality, calibrated_rotations, query_rounding
from kvsurgery.templates.kv_layout import ROUNDINGS, Quantization
from tests.docs.pages import figures
from tests.helpers.families import stock

ROOT = Path(__file__).resolve().parents[2]


def test_a_calibrated_rotation_separates_what_varies_together() -> None:
    """Before Hadamard's matrix, directions that vary together are one, the largest first."""
    torch.manual_seed(0)
    mixing = torch.linalg.qr(torch.randn(16, 16)).Q
    states = torch.randn(4000, 16) * torch.linspace(8, 0.1, 16) @ mixing.T
    matrix = calibrated_rotations.calibrated_rotation(states.mT @ states)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(16), atol=1e-5, rtol=0)
    turned = states @ matrix.mT @ calibrated_rotations.rotation(16, torch.float32, torch.device("cpu"))
    spread = turned.std(0)
    assert spread.sort(descending=True).indices.tolist() == [*range(16)]
    assert spread[0] / spread[-1] > 50


@pytest.mark.parametrize("keys", [True, False])
def test_what_lies_in_no_whole_tile_is_exact(keys: bool) -> None:
    torch.manual_seed(0)
    states, how = torch.randn(1, 2, 900, 16), Quantization(2, rotate="none", clip=True)
    back = calibrated_rotations.restored_states(states, torch.eye(16).expand(2, 16, 16), how, keys)
    stop = how.sink + 128 * how.tiles(900 - how.sink)
    assert how.sink < stop < 900
    assert torch.equal(back[:, :, : how.sink], states[:, :, : how.sink])
    assert torch.equal(back[:, :, stop:], states[:, :, stop:])
    difference = (back - states)[:, :, how.sink : stop].abs()
    assert 0.05 < difference.mean() < 1


def test_attention_received_weighs_the_values() -> None:
    """The sums are those of all queries and values of the model, by the weights of its eager attention."""
    model = stock("llama", attn_implementation="eager")
    tokens = torch.from_numpy(np.random.default_rng(0).integers(5, 60, (1, 30)))
    with torch.no_grad():
        output = model(tokens, output_attentions=True)
    found = calibrated_rotations.covariances(model, [tokens])
    values = output.past_key_values.layers[1].values[0]
    received = output.attentions[1][0].unflatten(0, (len(values), -1)).sum((1, 2))
    received[:, : found.sinks] = 0
    expected = (values * received[..., None]).mT @ values
    torch.testing.assert_close(found.values[1], expected, atol=1e-4, rtol=1e-4)


def test_the_documented_losses_of_calibrated_rotations() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "calibrated-rotations.json").read_text())
    assert len(found["windows"]) == calibrated_rotations.WINDOWS
    kl = dict(calibrated_rotations.rows(found))
    page = " ".join((ROOT / "docs" / "quantized-caches.md").read_text().split())
    kivi, per_token = (
        [kl.get(f"{scheme}, {how}", "") for how in ("Hadamard", "values calibrated", "calibrated")]
        for scheme in ("kivi", "per-token")
    )
    assert f"| `kivi` | {' | '.join(kivi)} |" in page
    assert f"| `per-token` | {per_token[0]} | | {per_token[2]} |" in page


@pytest.mark.parametrize("name", ["cache-quality", "cache-quality-gemma3"])
def test_the_documented_quality(name: str) -> None:
    windows = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["windows"]
    for scheme in ("kivi", "per-token"):
        table = cache_quality.table(windows, scheme)
        widths = table[0].count("|") - 2
        assert "".join(table).count("**") == 2 * widths  # a default for each width
    _, unquantized = cache_quality.figures(windows, "unquantized")
    assert unquantized in figures("docs/quantized-caches.md", f"results/{name}.json")
    assert all(window[f"kivi 8 {step}"]["kl"] < 0.00005 for window in windows.values() for step in ("0.1.0", "+ sinks"))


@pytest.mark.parametrize(("scheme", "step"), [("kivi", "+ clipped ranges"), ("per-token", "+ both")])
def test_values_of_2_bits_lose_less_than_keys(scheme: str, step: str) -> None:
    """By the defaults of each width."""
    windows = json.loads((ROOT / "benchmarks" / "results" / "cache-quality.json").read_text())["windows"]
    three, pair, two = (float(cache_quality.figures(windows, f"{scheme} {bits} {step}")[0]) for bits in (3, "k3v2", 2))
    assert three < pair <= 0.0135
    assert pair < two / 3 + 0.0001
    assert 1.35 <= pair / three <= 1.41


@pytest.mark.parametrize(
    ("name", "most"),  # what is asked of a known model at 4, 3, k3v2 and 2 bits, and of others
    [
        ("query-rounding", (0.0011, 0.0065, 0.0135, 0.022)),
        ("query-rounding-gemma3", (0.0011, 0.0065, 0.0135, 0.022)),
        ("query-rounding-qwen", (0.0018, 0.010, 0.015, 0.035)),
    ],
)
def test_rounding_by_the_queries_lowers_the_divergence(name: str, most: tuple[float, ...]) -> None:
    """With every setting on average, and with the best one in every window."""
    windows = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["windows"].values()
    ways = [f"{rotate} {'clipped' if clip else 'whole'}" for rotate, clip in query_rounding.STEPS]
    for bits, bound in zip(query_rounding.WIDTHS, most, strict=True):
        for way in ways:
            nearest, by_queries = (fmean(window[f"{bits} {way} {each}"] for window in windows) for each in ROUNDINGS)
            assert by_queries < nearest, (bits, way)
        nearest, by_queries = (
            [min(window[f"{bits} {way} {rounding}"] for way in ways) for window in windows] for rounding in ROUNDINGS
        )
        assert all(lower < other for lower, other in zip(by_queries, nearest, strict=True)), bits
        assert fmean(by_queries) <= bound


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("cache-quality-gemma3", ("+ rotated values", "+ clipped ranges", "+ clipped ranges")),  # the defaults
        ("cache-quality", ("+ rotated keys", "+ rotated keys", "+ both")),  # what losses.safetensors chooses
    ],
)
def test_what_is_lost_of_two_models(name: str, steps: tuple[str, ...]) -> None:
    """At 4, 3 and 2 bits, as is asked of this cache."""
    windows = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["windows"]
    for bits, step, most in zip((4, 3, 2), steps, (0.0016, 0.008, 0.035), strict=True):
        assert float(cache_quality.figures(windows, f"kivi {bits} {step}")[0]) <= most
