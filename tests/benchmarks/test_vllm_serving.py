"""What the serving benchmark converts before it starts an engine, and what it found."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from benchmarks import vllm_serving
from kvsurgery.checkpoint.source import read_config
from kvsurgery.templates.kv_layout import KVLayout

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny-recall" / "model"


def test_conversions_have_the_shares_of_full_heads_that_are_asked_for(tmp_path: Path) -> None:
    options = Namespace(profile=None, sink=4, recent=8)
    folders = vllm_serving.conversions(MODEL, tmp_path, [0.25, 0.5], options)
    assert [*folders] == ["dense", "25% full", "50% full"]
    layouts = [KVLayout.from_config(read_config(folder)) for name, folder in folders.items() if name != "dense"]
    heads = sum(layer.heads for layer in layouts[0].layers)
    assert [sum(layer.full for layer in layout.layers) for layout in layouts] == [heads // 4, heads // 2]
    assert {(layer.sink, layer.recent) for layout in layouts for layer in layout.layers} == {(4, 8)}
