"""`--kv-bits source`: widths by layer that ModelOpt stored in config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsurgery.templates.kv_layout import TILE, KVLayout
from tests.helpers.command import done, nothing_happens, run

FIRST, SECOND = "model.layers.0.self_attn", "model.layers.1.self_attn"
CONVERT = ("convert", "llama", "--kv-bits", "source", "--out", "out")


def store(layers: Any, **settings: Any) -> None:
    """Give the checkpoint `llama` a KV cache by ModelOpt."""
    path = Path("llama/config.json")
    settings = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quantized_layers": layers, **settings}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))


def config(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "config.json").read_text())


def layer_bytes(keys: int, values: int, tokens: int) -> int:
    """Bytes of a layer of 3 heads of 4, in 16 bits but for whole tiles of 128 before the newest 128 tokens and after
    4 sinks: codes, 4 scales and minima for the keys of a tile, and one of each for the values of a token."""
    tiles = (tokens - 4 - 1 - 128) // 128
    tile = 128 * 4 * (keys + values) // 8 + 2 * 2 * (4 + 128)
    slots = 4 + 128 + 128  # sinks, newest tokens, and a tile in the making
    return 3 * (tiles * tile + slots * 2 * 4 * 2)


@pytest.mark.parametrize(
    ("layers", "bits", "widths"),
    [
        ({FIRST: {"quant_algo": "FP8"}, SECOND: {"quant_algo": "NVFP4"}}, [8, 4], [(8, 8), (4, 4)]),
        ({SECOND: {"quant_algo": "FP8_K_NVFP4_V"}}, [None, "k8v4"], [None, (8, 4)]),
    ],
    ids=["mixed", "one left out"],
)
def test_stored_widths_become_the_caches(here: Path, layers: dict, bits: list, widths: list) -> None:
    store(layers, kv_cache_quant_algo="MIXED_PRECISION", kv_cache_schema_version=1)
    facts = json.loads(done(*CONVERT, "--dry-run", "--json").out)
    assert [layer["bits"] for layer in facts["layers"]] == bits
    assert " bits " in done(*CONVERT, "--dry-run").out
    words = "8 bits in 1 layer, 4 in 1" if bits[0] else "k8v4 bits in 1 layer, unquantized in 1"
    assert f"KV cache in {words}" in done(*CONVERT, "--save-recipe", "kept.toml").out
    assert words in done("inspect", "out").out
    assert words in " ".join(Path("out/README.md").read_text().split())
    assert config("out")["kv_surgery"]["quantization"]["bits"] == bits
    tokens = 10 * TILE
    expected = sum(layer_bytes(*pair, tokens) if pair else tokens * 3 * 2 * 4 * 2 for pair in widths)
    assert KVLayout.from_config(config("out")).kv_bytes(1, tokens) == expected
    assert 'bits = "source"' in Path("kept.toml").read_text()
    done("verify", "out", "--source", "llama")
    done("revert", "out", "--out", "back")
    assert Path("back/config.json").read_bytes() == Path("llama/config.json").read_bytes()


@pytest.mark.parametrize(("algorithm", "bits"), [("FP8", "8"), ("NVFP4", "4"), ("FP8_K_NVFP4_V", "k8v4")])
def test_one_width_in_all_layers_is_that_width(here: Path, algorithm: str, bits: str) -> None:
    store({name: {"quant_algo": algorithm} for name in (FIRST, SECOND)}, kv_cache_quant_algo=algorithm)
    done(*CONVERT)
    done("convert", "llama", "--kv-bits", bits, "--out", "explicit")
    assert config("out") == config("explicit")
    for path in [*Path("explicit").glob("*.py"), *Path("explicit").glob("*.safetensors")]:
        assert Path("out", path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("layers", "settings", "words"),
    [
        ([FIRST], {}, "kv_cache_quantized_layers should be an object"),
        (8, {}, "kv_cache_quantized_layers should be an object, not 8"),
        ({}, {}, "lists no layer"),
        ({FIRST: 8}, {}, "should have a quant_algo of FP8, NVFP4, FP8_K_NVFP4_V, not 8"),
        ({FIRST: {"quant_algo": 8}}, {}, "should have a quant_algo of FP8"),
        ({FIRST: {"quant_algo": "INT8"}}, {}, "not {'quant_algo': 'INT8'}"),
        ({"model.layers.2.self_attn": {"quant_algo": "FP8"}}, {}, "layers.2.self_attn' of .* is not the attention"),
        ({"model.layers.0.mlp": {"quant_algo": "FP8"}}, {}, "layers.0.mlp' of .* is not the attention"),
        ({"lm_head": {"quant_algo": "FP8"}}, {}, "'lm_head' of .* is not the attention"),
        ({FIRST: {"quant_algo": "FP8"}, "layers.0.self_attn": {"quant_algo": "NVFP4"}}, {}, "lists layer 0 twice"),
        ({FIRST: {"quant_algo": "FP8"}}, {"kv_cache_schema_version": 2}, "kv_cache_schema_version .* is 2; known is 1"),
    ],
)
def test_lying_maps_are_one_line(here: Path, layers: Any, settings: dict, words: str) -> None:
    store(layers, **settings)
    nothing_happens(here, words, *CONVERT)


def test_without_stored_widths(here: Path) -> None:
    nothing_happens(here, "--kv-bits source: quantization_config of config.json has no kv_cache_quantized", *CONVERT)


def test_measurements_are_not_used(here: Path) -> None:
    result = run(*CONVERT, "--kv-measured", "losses.safetensors")
    assert result.code == 2
    assert "--kv-measured cannot be combined with --kv-bits source" in result.err.splitlines()[-1]
    assert not Path("out").exists()
