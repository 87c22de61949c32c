"""The forecast of the KV cache, without an engine."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from kvsurgery.templates.kv_layout import Quantization
from kvsurgery.vllm.forecast import BLOCK, Forecast, forecast, servable_layout, serving_limits
from kvsurgery.vllm.groups import Groups

LAYERS = [{"blocks": [[3, 1]], "sink": 64, "recent": 256}, {"blocks": [[1, 3]], "sink": 64, "recent": 256}]


def config(layers: list = LAYERS, **section) -> dict:
    return {
        "kv_surgery": {"version": 2, "head_dim": 128, "layers": layers, **section},
        "max_position_embeddings": 131_072,
        "num_hidden_layers": len(layers),
        "num_key_value_heads": 4,
    }


def test_a_forecast_counts_blocks() -> None:
    expected = forecast(config())
    # a block holds the 4 full heads of the model, or the 4 streaming ones: 4 blocks of sinks, and a window in 17
    block = 16 * 4 * 2 * 128 * 2
    assert expected.kv_bytes == (131_072 // 16 + 4 + 17) * block
    assert expected.dense_bytes == 2 * 131_072 // 16 * block
    assert expected.dense_token_bytes == 2 * expected.token_bytes == 8 * 2 * 128 * 2
    assert expected.command("my folder") == "vllm serve 'my folder'"


def test_short_sequences_hold_no_more_than_they_have() -> None:
    layout = servable_layout(config())
    assert Forecast.of(Groups(layout, BLOCK), 20).kv_bytes == 2 * 2 * (16 * 4 * 2 * 128 * 2)


def test_chunks_of_the_model_begin_with_a_block() -> None:
    chunked = {"blocks": [[0, 4]], "sink": 0, "recent": 8192, "native": True, "chunked": True}
    block = 16 * 4 * 2 * 128 * 2
    windows = {**chunked, "chunked": False}
    kv_bytes = [
        forecast(config([*LAYERS, layer])).kv_bytes - forecast(config()).kv_bytes for layer in (chunked, windows)
    ]
    assert kv_bytes == [8192 // 16 * block, (8192 // 16 + 1) * block]


def test_heads_in_blocks_are_served_over_as_many_processes() -> None:
    even = [{"blocks": [[1, 1], [1, 1]], "sink": 4, "recent": 8}]
    uneven = [{"blocks": [[2, 0], [0, 2]], "sink": 4, "recent": 8}]
    assert forecast(config(even)).command("DIR") == "vllm serve DIR --tensor-parallel-size 2"
    assert forecast(config(uneven)).command("DIR") == "vllm serve DIR"


def test_processes_get_blocks_for_the_largest_of_their_budgets() -> None:
    layer = {"blocks": [[1, 1], [1, 1]], "budgets": [4, 100]}
    expected = forecast(config([layer], selection=SELECTION))
    assert expected.command("DIR") == "vllm serve DIR --tensor-parallel-size 2"
    page = 16 * 2 * 128 * 2
    # what precedes 100 tokens and the window of 4 is freed
    assert expected.kv_bytes == (131_072 // 16 + 104 // 16 + 1) * page
    assert expected.dense_bytes == 2 * 131_072 // 16 * page
    uneven = {"blocks": [[2, 0], [0, 2]], "budgets": [4, 100]}
    alone, limit = (
        forecast(config([uneven], selection=SELECTION)),
        serving_limits(config([uneven], selection=SELECTION)),
    )
    assert alone.command("DIR") == "vllm serve DIR"
    assert any("1 of 2 processes" in line for line in limit)


def test_the_command_leaves_out_images_that_are_refused() -> None:
    text = {**config(), "use_bidirectional_attention": "vision"}
    assert forecast({**config(), "text_config": text}).command("DIR") == "vllm serve DIR --language-model-only"
    assert forecast(text).command("DIR") == "vllm serve DIR"
    around = {**config(), "model_type": "gemma3", "text_config": config()}
    assert forecast(around).command("DIR") == "vllm serve DIR --language-model-only"


def test_prompts_within_the_context_need_no_reform() -> None:
    assert forecast(config(reform={})) == forecast(config())
    [limit] = serving_limits(config(reform={}))
    assert "REFORM" in limit


BUDGETS = {"blocks": [[1, 3]], "budgets": [4, 4, 4]}
SELECTION = {"window": 4, "kernel_size": 3, "pool": "max"}
QUANTIZATION = asdict(Quantization(4))


@pytest.mark.parametrize("stateful", [{"model_type": "falcon_h1"}, {"layer_types": ["hybrid"] * 2}], ids=str)
def test_models_whose_layers_have_states_beside_their_heads(stateful: dict) -> None:
    budgets, quantized = config([BUDGETS] * 2, selection=SELECTION), config(quantization=QUANTIZATION)
    [limit] = serving_limits(budgets)
    assert "refuses beams" in limit
    assert not serving_limits(quantized)
    assert forecast(quantized).kv_bytes < 0.4 * forecast(config()).kv_bytes
    [limit] = serving_limits({**budgets, **stateful})
    assert "budgeted heads only in models whose layers have no states" in limit
    [limit] = serving_limits({**quantized, **stateful})
    assert "vLLM ignores the quantized cache" in limit
    assert forecast({**quantized, **stateful}) == forecast(config())


def test_tiles_are_forecast_where_a_gpu_reads_them_too() -> None:
    budgets = config([BUDGETS] * 2, selection=SELECTION)
    quantized = config([BUDGETS] * 2, selection=SELECTION, quantization=QUANTIZATION)
    assert serving_limits(quantized) == serving_limits(budgets)
    assert forecast(quantized).kv_bytes < forecast(budgets).kv_bytes
    # full heads in blocks of as many tokens as a tile have no kernel there
    section = {"bits": [4, None], "clip": [False, False]}
    codes, heads = serving_limits(config([BUDGETS] * 2, selection=SELECTION, quantization=QUANTIZATION | section))
    assert "stores 16 bit, except on a CPU" in codes
    assert [heads] == [*serving_limits(budgets)]


def test_what_vllm_cannot_serve() -> None:
    with pytest.raises(ValueError, match="Gemma3nForCausalLM with a KV cache of the original's size"):
        forecast({**config(), "architectures": ["Gemma3nForCausalLM"]})
    assert forecast({**config(), "architectures": ["LlamaForCausalLM"]}) == forecast(config())


@pytest.mark.parametrize("size", ["sink", "recent"])
def test_layers_whose_windows_differ_are_refused(size: str) -> None:
    layers = [LAYERS[0], {**LAYERS[1], size: LAYERS[1][size] + 16}]
    with pytest.raises(ValueError, match="VLLM_PLUGINS"):
        servable_layout(config(layers))
    native = {"blocks": [[0, 4]], "sink": 0, "recent": 512, "native": True}
    assert servable_layout(config([*LAYERS, native])).layers[2].recent == 512
