"""What the serving benchmark converts before it starts an engine, and what it found."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import vllm_serving
from kvsurgery.checkpoint.source import read_config
from kvsurgery.templates.kv_layout import KVLayout
from tests.docs.pages import figures

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny-recall" / "model"


def test_conversions_have_the_shares_of_full_heads_that_are_asked_for(tmp_path: Path) -> None:
    options = Namespace(profile=None, sink=4, recent=8, shares=[0.25, 0.5], bits=[16], budgets=[], fp8=True)
    models = vllm_serving.models(MODEL, tmp_path, options)
    assert [*models] == ["original", "original, fp8", "25% full", "50% full"]
    original, in_floats, *converted = models.values()
    assert (original, in_floats) == ((MODEL, "auto"), (MODEL, "fp8"))
    layouts = [KVLayout.from_config(read_config(served.folder)) for served in converted]
    heads = sum(layer.heads for layer in layouts[0].layers)
    assert [sum(layer.full for layer in layout.layers) for layout in layouts] == [heads // 4, heads // 2]
    assert {(layer.sink, layer.recent) for layout in layouts for layer in layout.layers} == {(4, 8)}


def test_conversions_have_the_bits_and_budgets_that_are_asked_for(tmp_path: Path) -> None:
    options = Namespace(profile=None, sink=4, recent=8, shares=[1.0, 0.5], bits=[16, 4], budgets=[32], fp8=False)
    models = vllm_serving.models(MODEL, tmp_path, options)
    layouts = {name: KVLayout.from_config(read_config(served.folder)) for name, served in [*models.items()][1:]}
    kinds = ["50% full", "budgets of 32"]
    assert [*layouts] == [*kinds, "100% full, 4 bits", *(f"{kind}, 4 bits" for kind in kinds)]
    for name, layout in layouts.items():
        widths = {
            layer.quantization and layer.quantization.bits for layer in layout.layers if layer.full or layer.budgets
        }
        assert widths == {4 if name.endswith("4 bits") else None}
        budgets = [budget for layer in layout.layers for budget in layer.budgets]
        assert bool(budgets) == name.startswith("budgets")
        assert not budgets or sum(budgets) == 32 * len(budgets)


def test_what_the_docs_say_of_quantized_caches_and_budgets() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "vllm-serving-codes.json").read_text())
    ratios, results = report["ratios"], report["results"]
    codes, streaming, budgets = "100% full, 4 bits", "50% full, 4 bits", "budgets of 512"
    assert round(ratios[codes]["concurrency"], 1) == 2.0
    throughput = [
        f"{ratios[name]['requests_per_cpu_second']:.2f}" for name in (codes, streaming, budgets, f"{budgets}, 4 bits")
    ]
    concurrency = [f"{ratios[name]['concurrency']:.1f}" for name in (streaming, budgets)]
    most = [str(results[name]["most_running"]) for name in (codes, streaming)]
    assert {*throughput, *concurrency, *most} <= figures("docs/vllm.md", "requests run at once")
    assert all(results[name]["preemptions"] > results["original"]["preemptions"] for name in (codes, streaming))
    assert str(report["load"]["requests"]) in figures("docs/vllm.md", "In another run")


def test_what_the_docs_say_beside_vllms_8_bit_floats() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "vllm-serving-bfloat16.json").read_text())
    floats, codes, streaming = (report["ratios"][name] for name in [*report["ratios"]][1:])
    assert codes["concurrency"] == pytest.approx(floats["concurrency"], abs=0.1)
    throughput = {f"{ratios['requests_per_cpu_second']:.2f}" for ratios in (floats, codes, streaming)}
    shown = {*throughput, f"{streaming['concurrency']:.1f}"}
    assert shown <= figures("docs/vllm.md", "as many requests at once as 8-bit floats")


def test_what_the_docs_say_of_a_model_of_1500_million_parameters() -> None:
    for name in ("qwen", "qwen-half"):
        report = json.loads((ROOT / "benchmarks" / "results" / f"vllm-serving-{name}.json").read_text())
        _, converted = report["ratios"].values()
        assert f"{converted['requests_per_cpu_second']:.2f}" in figures("docs/vllm.md", "On this model too")
        assert [result["most_running"] for result in report["results"].values()] == [4, report["load"]["requests"]]


def test_what_the_docs_say_of_codes_at_equal_load() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "vllm-equal-load-codes.json").read_text())
    assert all(result["preemptions"] == 0 for result in report["results"].values())
    names = ("100% full, 4 bits", "50% full, 4 bits")
    shown = {f"{report['ratios'][name]['requests_per_cpu_second']:.2f}" for name in names}
    assert shown <= figures("docs/vllm.md", "where memory binds nothing")
