"""Sections of gpu.py: whole models with random weights and filled caches.

They time `generate`, captures of CUDA graphs, decode steps and prompts in chunks.

The stock model and the emitted ones share their parameters, and their caches hold the same states.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import math
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import DeviceType
from transformers import PreTrainedModel

from benchmarks.gpu_report import Report, free_memory, milliseconds, synchronize
from benchmarks.synthetic import build, dimensions, emitted, empty_cache, fill
from kvsurgery.bench.caches import cache_bytes
from kvsurgery.templates.kv_cache import KVSurgeryCache
from kvsurgery.templates.kv_graph import UNFIT, capture
from kvsurgery.templates.kv_layout import KVLayout


class Target(NamedTuple):
    """How many times longer stock takes by the paper, and at how many tokens."""

    factor: float
    tokens: int


class Case(NamedTuple):
    """A model, the share of its KV heads that is full, and what is measured of it."""

    shape: str
    full: float
    decode: dict[int, Target | None]
    prefill: tuple[int, int, float | None] | None = None  # tokens, of a chunk, target


# tokens at which we compare, and the paper's targets. Its 1.5 holds at 500k tokens, where stock's cache of 65.5 GB and
# 16 GB of weights do not fit in 80 GB: we compare at 400k, and the table says for how many tokens the target is
CASES = [
    Case("Llama-2-7B", 0.25, {100_000: Target(2.2, 100_000)}),
    Case("Llama-3-8B", 0.5, {400_000: Target(1.5, 500_000), 100_000: None}, (320_000, 32_000, 1.63)),
]
TINY = [Case("tiny", 0.5, {700: None}, (1200, 300, None))]
WARM, STEPS = 3, 12
DEPTHS, DEPTH_TOKENS = (32, 16, 8, 2), 4096  # layers of models whose steps are captured, and tokens that they hold
NEW, RUNS = 64, 3  # tokens that `generate` adds; runs, of which the first one compiles
SPARE = WARM + 2 * STEPS + 2  # tokens beside those of a cache: the steps, one in the profiler, one in a graph


class Variant(NamedTuple):
    """A model with one kind of cache."""

    name: str
    model: PreTrainedModel
    bits: int = 16
    attention: str = "sdpa"  # of the stock model


def variants(shape: str, full_share: float, device: str, dtype: torch.dtype) -> list[Variant]:
    """What takes part; all of it shares the parameters of one stock model."""
    stock_model = build(shape, device, dtype)
    heads, _ = dimensions(stock_model.config)
    partly_full = emitted(stock_model, round(full_share * heads))
    result = [Variant("stock, SDPA", stock_model)]
    if device == "cuda" and importlib.util.find_spec("flash_attn"):
        result.append(Variant("stock, flash-attn", stock_model, attention="flash_attention_2"))
    return [
        *result,
        Variant("all full", emitted(stock_model, heads)),
        Variant(f"{full_share:.0%} full", partly_full),
        Variant(f"{full_share:.0%} full, int4", partly_full, bits=4),
    ]


def filled(variant: Variant, tokens: int, spare_tokens: int):
    """A variant's cache with random tokens and room for some more."""
    free_memory()
    model = variant.model
    if variant.name.startswith("stock"):
        model.set_attn_implementation(variant.attention)
    cache = empty_cache(model, tokens + spare_tokens, variant.bits)
    if tokens:
        fill(cache, model.config, 1, tokens, model.dtype, model.device.type)
    return cache


def predicted_bytes(variant: Variant, cache, tokens: int, spare_tokens: int) -> int | None:
    """What the config says that the cache takes; None for stock models."""
    if not isinstance(cache, KVSurgeryCache):
        return None
    layout = KVLayout.from_config(variant.model.config)
    if variant.bits < 16:
        layout = layout.quantized(cache.layers[0].layout.quantization)
    return layout.kv_bytes(1, tokens, spare_tokens, itemsize=variant.model.dtype.itemsize)


@contextmanager
def eager_steps(model: PreTrainedModel) -> Generator[None]:
    """Decode steps run without CUDA graphs."""
    UNFIT.add(model)
    try:
        yield
    finally:
        UNFIT.discard(model)


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock time of some work and of what it started on the device."""
    synchronize()
    begin = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - begin


def device_events(step: Callable[[], object]) -> list:
    """What a step runs on the device by name: kernels, and copies."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    # what the host calls is listed too, with the time of the kernels that it started
    return [event for event in profile.key_averages() if event.device_type == DeviceType.CUDA]


def kernel_milliseconds(step: Callable[[], object]) -> float:
    """Time that a step's kernels take, without the gaps between them in which the device waits for Python."""
    return sum(event.self_device_time_total for event in device_events(step)) / 1e3


def launches(step: Callable[[], object]) -> int:
    """How many kernels and copies a step runs."""
    return sum(event.count for event in device_events(step))


def graph_milliseconds(step: Callable[[], object]) -> float:
    """Time of a step that is replayed from a CUDA graph; every replay is the same step."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return milliseconds(graph.replay, 10)


def peak_bytes() -> int | None:
    """The most memory that tensors took since the peak was reset, weights included."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


@torch.inference_mode()
def decode(report: Report, variant: Variant, tokens: int) -> tuple[dict, torch.Tensor]:
    """Decode steps of one variant: figures, and the first step's logits."""
    cache = filled(variant, tokens, SPARE)
    token = torch.ones(1, 1, dtype=torch.long, device=variant.model.device)

    def step() -> torch.Tensor:
        return variant.model(input_ids=token, past_key_values=cache, logits_to_keep=1).logits

    on_gpu = variant.model.device.type == "cuda"
    free_memory()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    logits = step().float()
    assert logits.isfinite().all()
    times = [seconds(step) for _ in range(WARM - 1 + STEPS)][WARM - 1 :]
    figures = {"ms": 1e3 * statistics.median(times), "peak": peak_bytes(), "tokens": tokens}
    with eager_steps(variant.model):
        figures["eager ms"] = 1e3 * statistics.median(seconds(step) for _ in range(STEPS))
    expected_bytes = predicted_bytes(variant, cache, tokens, SPARE)
    figures |= {"cache": cache_bytes(cache), "kv_bytes": expected_bytes}
    assert expected_bytes in (None, figures["cache"]), (
        f"the cache has {figures['cache']:,} bytes, not {expected_bytes:,}"
    )
    if on_gpu:
        with report.attempt(f"kernel times of {variant.name}"):
            figures["kernels ms"] = kernel_milliseconds(step)
        if expected_bytes:  # stock concatenates, for which a graph would need all of the cache twice
            with report.attempt(f"graph of {variant.name}"):
                figures["graph ms"] = graph_milliseconds(step)
    return figures, logits


def decode_section(report: Report, case: Case, parts: list[Variant]) -> None:
    """Milliseconds a token of every variant, against the stock model and against ours with every head full."""
    columns = {"model": "<10", "tokens": "8,", "variant": "<18", "ms": "8.2f", "eager ms": "8.2f"}
    columns |= {
        "kernels ms": "10.2f",
        "graph ms": "8.2f",
        "x stock": "7.2f",
        "x stock, kernels": "16.2f",
        "x all full": "10.2f",
    }
    columns |= {
        "x all full, graph": "17.2f",
        "target": "6.2f",
        "target at": "9,",
        "cache GB": "8.2f",
        "peak GB": "7.1f",
        "error": "7.0e",
    }
    report.table("decode", columns)
    for tokens, target in case.decode.items():
        results, logits = {}, {}
        for variant in parts:
            name = f"{case.shape}, {tokens:,} tokens, {variant.name}"
            if not report.allows(name, 12):
                continue
            with report.attempt(name):
                results[variant.name], logits[variant.name] = figures, _ = decode(report, variant, tokens)
                stock_figures, dense_figures = results.get("stock, SDPA", {}), results.get("all full", {})
                error, case_target = None, target if variant.name == f"{case.full:.0%} full" else None
                if variant.name == "all full" and "stock, SDPA" in logits:
                    stock_logits = logits["stock, SDPA"]
                    error = ((logits["all full"] - stock_logits).norm() / stock_logits.norm()).item()
                report.add(
                    model=case.shape,
                    variant=variant.name,
                    **figures,
                    **{
                        "x stock": ratio(stock_figures, figures, "ms"),
                        "x stock, kernels": ratio(stock_figures, figures, "kernels ms"),
                        "x all full": ratio(dense_figures, figures, "ms"),
                        "x all full, graph": ratio(dense_figures, figures, "graph ms"),
                        "target": case_target.factor if case_target else None,
                        "target at": case_target.tokens if case_target else None,
                        "cache GB": figures["cache"] / 1e9,
                        "peak GB": figures["peak"] and figures["peak"] / 1e9,
                        "error": error,
                    },
                )


def generate(variant: Variant, tokens: int, graph: bool) -> tuple[float, torch.Tensor, bool]:
    """`generate` as users call it to go on after a conversation of some tokens, whose cache is there.

    Returns:
        Seconds for `NEW` tokens, the tokens, and whether a CUDA graph ran. Capturing it is part of the time.
    """
    model: Any = variant.model  # whose `generate` has stricter types than tokens need
    times = []
    model.generation_config.eos_token_id = None  # random weights might end early
    ids = torch.ones(1, tokens + 1, dtype=torch.long, device=model.device)
    with nullcontext() if graph else eager_steps(model):
        for _ in range(RUNS):
            cache = filled(variant, tokens, NEW + 2)
            synchronize()
            begin = time.perf_counter()
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=NEW,
                do_sample=False,
            )
            synchronize()
            times.append(time.perf_counter() - begin)
            graphed = getattr(getattr(cache, "graph", None), "graph", None) is not None
            del cache
    assert out.shape == (1, tokens + 1 + NEW)
    return min(times[1:]), out[0, -NEW:], graphed


def generate_section(report: Report, device: str) -> None:
    """`generate` with the CUDA graph that users get, without it, and of the stock model."""
    case = CASES[-1] if device == "cuda" else TINY[-1]
    tokens = min(case.decode)
    columns = {"model": "<10", "tokens": "8,", "variant": "<18", "graph": "<5", "new": "4", "seconds": "8.2f"}
    columns |= {"ms a token": "10.2f", "x stock": "7.2f", "x eager": "7.2f", "as eager": "8"}
    report.table("generate", columns)
    parts = {variant.name: variant for variant in variants(case.shape, case.full, device, model_dtype(device))}
    ours, results = f"{case.full:.0%} full", {}
    for name, graph in (("stock, SDPA", False), (ours, False), (ours, True)):
        title = f"generate of {name}, {'CUDA graph' if graph else 'eager'}"
        if not report.allows(title, 15):
            continue
        with report.attempt(title):
            duration, new_tokens, graphed = generate(parts[name], tokens, graph)
            results[name, graph] = {"seconds": duration, "new": new_tokens}
            stock_figures, eager_figures = results.get(("stock, SDPA", False), {}), results.get((ours, False), {})
            report.add(
                model=case.shape,
                tokens=tokens,
                variant=name,
                graph="yes" if graphed else "no",
                new=NEW,
                seconds=duration,
                **{
                    "ms a token": 1e3 * duration / NEW,
                    "x stock": ratio(stock_figures, results[name, graph], "seconds"),
                    "x eager": ratio(eager_figures, results[name, graph], "seconds") if graph else None,
                    # tokens that are those of eager steps
                    "as eager": int((new_tokens == eager_figures["new"]).sum().item())
                    if graph and eager_figures
                    else None,
                },
            )
            assert graphed == (graph and device == "cuda"), "the steps did not run as they were asked to"


@torch.inference_mode()
def capture_figures(variant: Variant, tokens: int) -> dict[str, float | None]:
    """A decode step as Python drives it, its capture as a CUDA graph, and replays; medians of milliseconds."""
    cache = filled(variant, tokens, SPARE)
    token = torch.ones(1, 1, dtype=torch.long, device=variant.model.device)

    def step() -> torch.Tensor:
        return variant.model(input_ids=token, past_key_values=cache, logits_to_keep=1).logits

    with eager_steps(variant.model):
        eager_ms = 1e3 * statistics.median([seconds(step) for _ in range(WARM + STEPS)][WARM:])
    graph = None

    def first_replay() -> None:
        nonlocal graph
        graph, _ = capture(step, token.device)
        graph.replay()

    capture_ms = 1e3 * seconds(first_replay)
    assert graph is not None
    replay_ms = 1e3 * statistics.median(seconds(graph.replay) for _ in range(STEPS))
    figures = {"launches": launches(graph.replay), "eager ms": eager_ms, "capture ms": capture_ms}
    pays_after = math.ceil((capture_ms - replay_ms) / (eager_ms - replay_ms)) if eager_ms > replay_ms else None
    return {**figures, "replay ms": replay_ms, "pays after": pays_after}


def graphs_section(report: Report) -> None:
    """After how many steps the capture of a CUDA graph has paid, by the depth of a model of Llama-3-8B's shape."""
    columns = {"layers": "6", "bits": "4", "tokens": "7,", "launches": "8", "eager ms": "8.2f", "capture ms": "10.1f"}
    report.table("graphs", columns | {"replay ms": "9.2f", "pays after": "10"})
    case = CASES[-1]
    stock_model = build(case.shape, "cuda", model_dtype("cuda"))
    heads, _ = dimensions(stock_model.config)
    gc.unfreeze()  # users' processes have no frozen objects, and a capture collects garbage
    for layers in DEPTHS:
        stock_model.model.layers = stock_model.model.layers[:layers]
        stock_model.config.num_hidden_layers = layers
        model = emitted(stock_model, round(case.full * heads))
        for bits in (16, 4):
            name = f"{layers} layers, {bits} bits"
            if report.allows(name, 5):
                with report.attempt(name):
                    report.add(
                        layers=layers,
                        bits=bits,
                        tokens=DEPTH_TOKENS,
                        **capture_figures(Variant(name, model, bits), DEPTH_TOKENS),
                    )
    gc.freeze()


def ratio(baseline: dict, figures: dict, name: str) -> float | None:
    """How many times longer the baseline takes, where both were measured."""
    return baseline[name] / figures[name] if baseline.get(name) and figures.get(name) else None


@torch.inference_mode()
def prefill_chunk(variant: Variant, past: int, tokens: int) -> tuple[float, int | None]:
    """Seconds of a chunk after a random past, and the peak of memory."""
    cache = filled(variant, past, tokens)
    ids = torch.randint(variant.model.config.vocab_size, (1, tokens), device=variant.model.device)
    free_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    duration = seconds(lambda: variant.model(input_ids=ids, past_key_values=cache, logits_to_keep=1))
    return duration, peak_bytes()


def order(chunks: int) -> list[int]:
    """Which chunks are measured first: the ends, then the middle of the widest gap."""
    chosen_chunks = [0, chunks - 1][:chunks]
    while len(chosen_chunks) < chunks:
        ordered = sorted(chosen_chunks)
        _, low, high = max((high - low, low, high) for low, high in itertools.pairwise(ordered))
        chosen_chunks.append((low + high) // 2)
    return chosen_chunks


def prefill_section(report: Report, case: Case, parts: list[Variant]) -> None:
    """A prompt in chunks: as many of them as there is time for, each after a random past; the rest interpolated.

    What a chunk takes grows linearly with its past. A variant for which a chunk does not fit has earlier ones only.
    """
    assert case.prefill is not None  # as the case was chosen
    prompt_tokens, tokens, target = case.prefill
    parts = [variant for variant in parts if variant.bits == 16]
    columns = {"model": "<10", "past": "8,", "variant": "<18", "seconds": "8.2f", "x stock": "7.2f", "peak GB": "7.1f"}
    report.table("prefill chunks", columns)
    for variant in parts:  # compiles, and warms up
        with report.attempt(f"warm-up of {variant.name}"):
            for past in (0, tokens // 16):
                prefill_chunk(variant, past, tokens // 16)
    seconds_by_variant: dict[str, dict[int, float]] = {variant.name: {} for variant in parts}
    peaks: dict[str, int] = {}
    too_large: dict[str, int] = {}
    for chunk in order(prompt_tokens // tokens):
        for variant in parts:
            chunk_seconds, past = seconds_by_variant[variant.name], chunk * tokens
            if chunk >= too_large.get(variant.name, prompt_tokens // tokens):
                continue
            if not chunk_seconds:
                guess = 8.0
            elif len(chunk_seconds) == 1:
                guess = chunk_seconds[0] * (1 + chunk)
            else:
                guess = _at(chunk_seconds, chunk)
            if report.left < guess + 4:
                continue
            with report.attempt(f"{case.shape}, chunk after {past:,} tokens, {variant.name}"):
                chunk_seconds[chunk], peak = prefill_chunk(variant, past, tokens)
                peaks[variant.name] = max(peak or 0, peaks.get(variant.name, 0))
                stock_seconds = seconds_by_variant["stock, SDPA"].get(chunk)
                row = {"past": past, "tokens": tokens, "seconds": chunk_seconds[chunk], "peak GB": peak and peak / 1e9}
                row["x stock"] = stock_seconds and stock_seconds / chunk_seconds[chunk]
                report.add(model=case.shape, variant=variant.name, **row)
            if chunk not in chunk_seconds:
                too_large[variant.name] = chunk
    columns = {"model": "<10", "tokens": "8,", "variant": "<18", "seconds": "8.1f", "measured": "8", "of chunks": "9"}
    columns |= {"x stock": "7.2f", "x all full": "10.2f", "target": "6.2f", "peak GB": "7.1f"}
    report.table("prefill in chunks", columns)
    totals = {}
    for name, chunk_seconds in seconds_by_variant.items():
        if not {0, prompt_tokens // tokens - 1} <= chunk_seconds.keys():
            report.skip(
                f"{case.shape}, {prompt_tokens:,} tokens, {name}", "no time or memory for its first or last chunk"
            )
            continue
        totals[name] = {"seconds": sum(_at(chunk_seconds, chunk) for chunk in range(prompt_tokens // tokens))}
        report.add(
            model=case.shape,
            tokens=prompt_tokens,
            variant=name,
            seconds=totals[name]["seconds"],
            measured=len(chunk_seconds),
            **{
                "of chunks": prompt_tokens // tokens,
                "x stock": ratio(totals.get("stock, SDPA", {}), totals[name], "seconds"),
                "x all full": ratio(totals.get("all full", {}), totals[name], "seconds"),
                "target": target if name == f"{case.full:.0%} full" else None,
                "peak GB": peaks[name] / 1e9 or None,
            },
        )


def _at(chunk_seconds: dict[int, float], chunk: int) -> float:
    """A chunk's seconds: measured, or on the line between its neighbors."""
    chunks = sorted(chunk_seconds)
    return float(np.interp(chunk, chunks, [chunk_seconds[index] for index in chunks]))


def model_dtype(device: str) -> torch.dtype:
    """What models run in."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def decode_sections(report: Report, device: str) -> None:
    """Decode steps of all models, one after the other."""
    _for_each(report, device, cases(device), decode_section)


def prompt_sections(report: Report, device: str) -> None:
    """Prompts in chunks of the models that have some."""
    _for_each(report, device, [case for case in cases(device) if case.prefill], prefill_section)


def cases(device: str) -> list[Case]:
    """Real sizes on a GPU, tiny ones elsewhere."""
    return CASES if device == "cuda" else TINY


def _for_each(report: Report, device: str, cases: list[Case], section: Callable[..., None]) -> None:
    for case in cases:
        with report.attempt(case.shape):
            free_memory()
            parts = variants(case.shape, case.full, device, model_dtype(device))
            section(report, case, parts)
            report.write()
        del parts
