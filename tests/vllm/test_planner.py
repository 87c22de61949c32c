"""What vLLM's planner and manager hold for models that are too large to run here, and what `Groups` forecasts."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheConfig, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request

from kvsurgery.templates.kv_layout import TILE, KVLayout, LayerLayout, Quantization
from kvsurgery.vllm.groups import Groups
from kvsurgery.vllm.quantized import holds_codes
from kvsurgery.vllm.spec import ChunkSpec, CodesSpec, SinkWindowSpec

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before 0.33
    planning = kv_cache_utils

SINK, RECENT, SIZE = 64, 256, 16
CHUNK, LONG, NEW = 2048, 131_072, 40
# layers and KV heads
SHAPES = {
    "Llama-3-8B": (32, 8),
    "Llama-3-70B": (80, 8),
    "Qwen3-8B": (36, 8),
    "Qwen3-32B": (64, 8),
    "Llama-2-7B": (32, 32),
}


def model(layers: int, heads: int, share: float, native: int | None = None, seed: int = 0) -> KVLayout:
    """A model with a share of full heads at random; every other layer has a window of its own where one is stated."""
    eligible = [index for index in range(layers) if native is None or index % 2]
    places = [(index, head) for index in eligible for head in range(heads)]
    chosen = random.Random(seed).sample(places, int(share * len(places)))
    full = [sum(index == layer for layer, _ in chosen) for index in range(layers)]
    return KVLayout(
        tuple(
            LayerLayout(((full[index], heads - full[index]),), SINK, RECENT)
            if index in eligible
            else LayerLayout(((0, heads),), 0, native, native=True)
            for index in range(layers)
        ),
        head_dim=128,
    )


def plan_of(layout: KVLayout, quantized: bool = False) -> KVCacheConfig:
    """The cache groups that vLLM makes of a model, in 64 GiB."""
    groups = Groups(layout, SIZE, quantized=quantized)
    specs = {}
    for index, layer in enumerate(layout.layers):
        head_dim = layer.head_dim or layout.head_dim
        common = {"block_size": groups.size, "head_size": head_dim, "dtype": torch.bfloat16}
        window = partial(SinkWindowSpec.of, head_dim=head_dim, dtype=torch.bfloat16)
        name = f"model.layers.{index}.self_attn.native"
        if layer.chunked:
            chunks = ChunkedLocalAttentionSpec(num_kv_heads=layer.heads, attention_chunk_size=layer.recent, **common)
            specs[name] = ChunkSpec.of(chunks, groups.native[index])
            continue
        if layer.native:
            common["block_size"] = groups.native_size
            specs[name] = SlidingWindowSpec(num_kv_heads=layer.heads, sliding_window=layer.recent, **common)
            continue
        if layer.full and quantized and layer.quantization:
            specs[f"{name}.full"] = CodesSpec.of(layer.full, head_dim, layer.quantization.tile_bytes(head_dim))
            specs[f"{name}.newest"] = window(groups.place("newest", index), layer.full)
        elif layer.full:
            blocks = {**common, "block_size": TILE if quantized else groups.size}
            specs[f"{name}.full"] = FullAttentionSpec(num_kv_heads=layer.full, **blocks)
        if layer.streaming and quantized and layer.quantized_window:
            tile_bytes = layer.quantization.tile_bytes(head_dim)
            place = groups.place("tiles", index)
            specs[f"{name}.tiles"] = SinkWindowSpec.of_tiles(place, layer.streaming, head_dim, tile_bytes)
            specs[f"{name}.newest of streaming"] = window(groups.place("newest of streaming", index), layer.streaming)
        elif layer.streaming:
            specs[f"{name}.streaming"] = window(groups.place("streaming", index), layer.streaming)
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLNHC,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
        enable_prefix_caching=False,
    )
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=cache,
        speculative_config=None,
        model_config=SimpleNamespace(max_model_len=LONG + 512),
        max_in_flight_tokens=CHUNK,
    )
    planned = planning.get_kv_cache_groups(config, dict(specs))
    assert sorted(name for group in planned for name in group.layer_names) == sorted(specs)
    plan = planning.get_kv_cache_config_from_groups(config, planned, 64 << 30)
    return kv_cache_utils.generate_scheduler_kv_cache_config([plan])


def assert_groups_are_those_of(plan: KVCacheConfig, groups: Groups) -> None:
    """The last parts of layers' names are the kinds by which `Groups.planned` counts."""
    planned, numbers = groups.planned
    assert planned.width == plan.kv_cache_tensors[0].size // plan.num_blocks
    kinds = [group.layer_names[0].rpartition(".")[2] for group in plan.kv_cache_groups]
    assert {kind: number for kind, number in numbers.items() if number} == Counter(kinds)


def held(plan: KVCacheConfig, prompt: int) -> tuple[int, int]:
    """Blocks of a request at the peak of its prefill and in the midst of decoding."""
    sizes = [group.kv_cache_spec.block_size for group in plan.kv_cache_groups]
    manager = KVCacheManager(
        plan,
        max_model_len=LONG + 512,
        max_in_flight_tokens=CHUNK,
        enable_caching=False,
        hash_block_size=math.gcd(*sizes),
        scheduler_block_size=math.lcm(*sizes),
    )
    parameters = SamplingParams(max_tokens=NEW)
    parameters.update_from_generation_config({}, eos_token_id=100)
    request = Request("r", [0] * prompt, parameters, None)
    free, peak = manager.block_pool.get_num_free_blocks(), 0
    for step in [CHUNK] * (prompt // CHUNK) + [1] * NEW:
        if step == 1:
            request.append_output_token_ids(0)
        assert manager.allocate_slots(request, step) is not None
        request.num_computed_tokens += step
        peak = max(peak, free - manager.block_pool.get_num_free_blocks())
    return peak, free - manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("shape", SHAPES)
def test_memory_is_the_share_of_full_heads_and_the_windows(shape: str, share: float) -> None:
    layout = model(*SHAPES[shape], share)
    plan = plan_of(layout)
    block = plan.kv_cache_tensors[0].size // plan.num_blocks
    peak, decoding = held(plan, LONG)
    tokens = LONG + NEW
    ratio = decoding * block / layout.dense_bytes(1, tokens)
    ideal = layout.kv_bytes(1, tokens) / layout.dense_bytes(1, tokens)
    assert ratio == pytest.approx(ideal, rel=0.01)
    groups = Groups(layout, SIZE)
    assert groups.block_bytes == block
    assert decoding <= groups.blocks(tokens) <= decoding + len(plan.kv_cache_groups)
    assert peak <= groups.blocks(LONG, CHUNK) <= peak + 2 * len(plan.kv_cache_groups)


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("window", [RECENT, 4096])
def test_windows_of_the_model_itself_keep_a_group_of_their_own(window: int, codes: bool) -> None:
    layout = model(42, 8, 0.5, native=window)
    if codes:
        layout = quantized(layout, [FOUR])
    plan = plan_of(layout, codes)
    for group in plan.kv_cache_groups:
        assert len({name.rpartition(".")[2] for name in group.layer_names}) == 1
    block = plan.kv_cache_tensors[0].size // plan.num_blocks
    _, decoding = held(plan, LONG)
    groups = Groups(layout, SIZE, quantized=codes)
    assert groups.block_bytes == block
    assert decoding <= groups.blocks(LONG + NEW) <= decoding + len(plan.kv_cache_groups)


@pytest.mark.parametrize(("heads", "native", "size"), [(2, 2, 256), (2, 8, 256), (4, 16, 256)])
def test_windows_of_the_model_itself_may_have_heads_of_another_number_and_size(
    heads: int, native: int, size: int
) -> None:
    layout = model(20, heads, 0.5, native=1024)
    layout = KVLayout(
        tuple(
            replace(layer, blocks=((0, native),), head_dim=size) if layer.native else layer for layer in layout.layers
        ),
        head_dim=512,
    )
    plan = plan_of(layout)
    block = plan.kv_cache_tensors[0].size // plan.num_blocks
    _, decoding = held(plan, LONG)
    groups = Groups(layout, SIZE)
    assert groups.block_bytes == block
    assert decoding <= groups.blocks(LONG + NEW) <= decoding + len(plan.kv_cache_groups)


def alternating(layers: int, heads: int, full: tuple[int, int]) -> KVLayout:
    """A model in which every other layer has another number of full heads."""
    blocks = [((full[index % 2], heads - full[index % 2]),) for index in range(layers)]
    return KVLayout(tuple(LayerLayout(block, SINK, RECENT) for block in blocks), head_dim=128)


@pytest.mark.parametrize("full", [(0, 2), (1, 3), (2, 2), (7, 8)])
def test_as_many_layers_of_two_widths_do_not_split_the_full_heads(full: tuple[int, int]) -> None:
    layout = alternating(36, 8, full)
    plan = plan_of(layout)
    block = plan.kv_cache_tensors[0].size // plan.num_blocks
    _, decoding = held(plan, LONG)
    groups = Groups(layout, SIZE)
    assert groups.block_bytes == block
    assert decoding <= groups.blocks(LONG + NEW) <= decoding + len(plan.kv_cache_groups)
    ideal = layout.kv_bytes(1, LONG + NEW)
    assert decoding * block == pytest.approx(ideal, rel=0.02)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_chunks_of_the_model_itself_take_no_wider_blocks_than_full_heads(share: float) -> None:
    chunks = LayerLayout(((0, 8),), 0, 8192, native=True, chunked=True)
    full = LayerLayout(((int(8 * share), 8 - int(8 * share)),), SINK, RECENT)
    layout = KVLayout(tuple(full if index % 4 == 3 else chunks for index in range(48)), head_dim=128)
    plan = plan_of(layout)
    block = plan.kv_cache_tensors[0].size // plan.num_blocks
    _, decoding = held(plan, LONG)
    groups = Groups(layout, SIZE)
    assert groups.block_bytes == block
    blocks = groups.blocks(LONG + NEW)  # a whole chunk; here the last one has just begun
    assert decoding <= blocks
    assert blocks * block == pytest.approx(layout.kv_bytes(1, LONG + NEW), rel=0.02)


@pytest.mark.parametrize("seed", range(60))
def test_the_planned_groups_are_those_of_vllm(seed: int) -> None:
    draw = random.Random(seed)
    layers, heads = draw.choice((2, 6, 8, 24, 36, 48, 60, 80)), draw.choice((1, 2, 3, 8))
    native = draw.choice((None, None, RECENT, 8192))
    layout = model(layers, heads, draw.choice((0.05, 0.25, 0.5, 0.75, 0.95)), native, seed)
    if native is None and draw.random() < 0.7:
        layout = alternating(layers, heads, (draw.randrange(heads + 1), draw.randrange(heads + 1)))
    if native == 8192:
        layout = replace(layout, layers=tuple(replace(layer, chunked=layer.native) for layer in layout.layers))
    assert_groups_are_those_of(plan_of(layout), Groups(layout, SIZE))


@pytest.mark.parametrize("seed", range(20))
def test_no_layer_is_lost_whatever_the_shares(seed: int) -> None:
    draw = random.Random(seed)
    plan_of(model(draw.randrange(1, 40), draw.choice((1, 2, 3, 8)), draw.choice((0, 0.05, 0.5, 0.95)), seed=seed))


# of the layers in turn
QUANTIZATIONS = {
    "4 bits": [Quantization(4)],
    "per token": [Quantization(4, "per-token", residual=0, sink=0)],
    "3 bits": [Quantization(3, group_size=32)],
    "3 bits for keys and 2 for values": [Quantization("k3v2")],
    "2 bits": [Quantization(2)],
    "2 bits, small groups": [Quantization(2, group_size=16)],
    "8 bits": [Quantization(8)],
    "by layer": [Quantization(bits) for bits in (4, 8, 3, 4, 2)],
    "some layers": [None, Quantization(4), Quantization(2)],
    "windows too": [Quantization(4, residual=0, streaming=True)],
}


def quantized(layout: KVLayout, quantizations: list[Quantization | None]) -> KVLayout:
    """A layout whose layers have these caches in turn; None: without codes."""
    pairs = zip(layout.layers, cycle(quantizations), strict=False)
    return replace(layout, layers=tuple(replace(layer, quantization=quantization) for layer, quantization in pairs))


@pytest.mark.parametrize("share", [1, 0.5])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("shape", ["SmolLM2-135M", "Llama-3-8B", "Qwen3-8B"])
def test_tiles_take_what_the_config_predicts(shape: str, quantization: str, share: float) -> None:
    layout = model(*SHAPES[shape], share) if shape in SHAPES else replace(model(30, 3, share), head_dim=64)
    layout = quantized(layout, QUANTIZATIONS[quantization])
    plan = plan_of(layout, quantized=True)
    groups = Groups(layout, SIZE, quantized=True)
    block = plan.kv_cache_tensors[0].size // plan.num_blocks
    assert_groups_are_those_of(plan, groups)
    peak, decoding = held(plan, LONG)
    tokens = LONG + NEW
    ideal = layout.kv_bytes(1, tokens)
    assert decoding * block == pytest.approx(ideal, rel=0.04)
    assert decoding <= groups.blocks(tokens) <= decoding + len(plan.kv_cache_groups)
    assert peak <= groups.blocks(LONG, CHUNK) <= peak + 2 * len(plan.kv_cache_groups)


FOUR, EIGHT, TWO = map(Quantization, (4, 8, 2))
STREAMING = Quantization(4, residual=0, streaming=True)


def with_windows(layout: KVLayout, draw: random.Random) -> KVLayout:
    """A layout of which some layers have a window of the model's own, maybe with heads of another size."""
    window = LayerLayout(((0, draw.choice((1, 2, 4))),), 0, draw.choice((FOUR.residual + TILE, 1024)), native=True)
    head_dim = draw.choice((None, 64))
    layers = [replace(window, head_dim=head_dim) if draw.random() < 0.6 else layer for layer in layout.layers]
    return replace(layout, layers=(*layers, layout.layers[-1]))


@pytest.mark.parametrize("seed", range(80))
def test_the_planned_groups_of_tiles_are_those_of_vllm(seed: int) -> None:
    draw = random.Random(seed)
    layers, heads = draw.choice((2, 6, 8, 24, 36)), draw.choice((1, 2, 3, 8))
    layout = model(layers, heads, draw.choice((0.05, 0.25, 0.5, 0.75, 0.95, 1)), seed=seed)
    if draw.random() < 0.5:
        layout = alternating(layers, heads, (draw.randrange(heads + 1), draw.randrange(1, heads + 1)))
    if draw.random() < 0.5:
        layout = with_windows(layout, draw)
        caches = [FOUR], [EIGHT, TWO], [FOUR, Quantization(3)], [None, FOUR], [FOUR] * 4 + [None]
    else:
        caches = [FOUR], [None, TWO], [STREAMING], [STREAMING, STREAMING, None], [STREAMING, replace(STREAMING, bits=8)]
    layout = quantized(layout, draw.choice(caches))
    if holds_codes(layout):  # the layers with codes may have no full heads
        assert_groups_are_those_of(plan_of(layout, quantized=True), Groups(layout, SIZE, quantized=True))
