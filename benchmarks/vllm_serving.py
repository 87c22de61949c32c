"""Serving with vLLM at equal KV memory: a model and its conversions take turns under a load that is too large.

    make .venv-vllm/ready
    .venv-vllm/bin/python benchmarks/vllm_serving.py MODEL --json serving.json

All requests arrive at once. Each has a random prompt and generates a set number of tokens. The KV budget holds a few
sequences of the original model (`--sequences`). With an `--at-once` that fits the budget all models have the same load,
which shows what the split costs. Each engine has a process of its own. They work in turn, some seconds each, so that a
machine whose speed changes is as fast for all. The load is served `--turns` times, and the median counts; seconds of
CPU are compared within each time. Figures of a CPU are ratios within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvsurgery.api import convert
from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.source import read_config
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.vllm.budgeted import groups_of
from kvsurgery.vllm.quantized import holds_codes

BLOCK = 32  # tokens; the CPU's kernels take multiples
FP8 = "fp8"  # vLLM's own quantized cache
ITEMSIZES = {"float32": 4, "bfloat16": 2, FP8: 1}
ORIGINAL = "original"
SLICE = 10.0  # seconds that an engine works while the others wait


class Served(NamedTuple):
    """A checkpoint, and the cache that vLLM serves it with."""

    folder: Path
    cache_dtype: str = "auto"


@dataclass(frozen=True)
class Load:
    """Requests that arrive together, and the memory for their KV caches in bytes."""

    requests: int
    prompt: int
    new: int
    at_once: int
    budget: int
    chunk: int
    vocabulary: int
    dtype: str
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """One load that was served. Times are in seconds without those in which other engines worked.

    `peak_bytes` are of blocks in use, `running` is a mean over steps. `cpu_seconds` of the engine's process are what a
    busy machine leaves comparable.
    """

    seconds: float
    cpu_seconds: float
    requests_per_second: float
    tokens_per_second: float
    preemptions: int
    running: float
    most_running: int
    peak_bytes: int
    first_token: tuple[float, float]
    latency: tuple[float, float]


def block_bytes(config: dict[str, Any], dtype: str) -> int:
    """Bytes of a block of vLLM's pool for a config, converted or not, and the dtype of a cache without codes."""
    itemsize = ITEMSIZES[dtype]
    if "kv_surgery" in config:
        layout = KVLayout.from_config(config)
        return groups_of(layout, BLOCK, itemsize, holds_codes(layout)).block_bytes
    model = Model.of(config).dimensions
    return model.layers * model.kv_heads * BLOCK * 2 * model.head_dim * itemsize


def serve(served: Served, load: Load, pipe: Connection) -> None:
    """A process with an engine: runs the load whenever it is told to."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1"
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    stored = load.dtype if served.cache_dtype == "auto" else served.cache_dtype
    block = block_bytes(read_config(served.folder), stored)
    llm = LLM(
        str(served.folder),
        dtype=load.dtype,
        kv_cache_dtype=served.cache_dtype,
        enforce_eager=True,
        max_model_len=load.prompt + load.new,
        max_num_seqs=load.at_once,
        max_num_batched_tokens=max(load.chunk, load.at_once),
        block_size=BLOCK,
        num_gpu_blocks_override=load.budget // block,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        disable_log_stats=False,
    )
    cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    assert cache.kv_cache_tensors[0].size == cache.num_blocks * block, "vLLM's blocks have another size"
    pipe.send("ready")
    while pipe.recv() == "run":
        pipe.send(run(llm.llm_engine, load, block, pipe))


def run(engine: Any, load: Load, block: int, pipe: Connection) -> Result:
    """Serve all requests of a load; after each slice of time, wait for word from the pipe."""
    from vllm import SamplingParams

    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free, draw = pool.get_num_free_blocks(), random.Random(load.seed)
    parameters = SamplingParams(temperature=0, max_tokens=load.new, ignore_eos=True)
    preempted = _preemptions(engine)
    for index in range(load.requests):
        prompt = [draw.randrange(load.vocabulary) for _ in range(load.prompt)]
        engine.add_request(f"{time.monotonic()}-{index}", {"prompt_token_ids": prompt}, parameters)
    start, cpu_start, slices = time.monotonic(), time.process_time(), 1
    first_token_times, last_token_times, running, peak = {}, {}, [], 0
    while engine.has_unfinished_requests():
        if time.monotonic() - start > SLICE * slices:
            pause = time.monotonic()
            pipe.send(None)
            pipe.recv()
            start += time.monotonic() - pause
            slices += 1
        for output in engine.step():
            now = time.monotonic() - start
            first_token_times.setdefault(output.request_id, now)
            last_token_times[output.request_id] = now
        running.append(len(scheduler.running))
        peak = max(peak, free - pool.get_num_free_blocks())
    assert pool.get_num_free_blocks() == free, "blocks are lost"
    seconds = time.monotonic() - start
    return Result(
        seconds,
        time.process_time() - cpu_start,
        load.requests / seconds,
        load.requests * load.new / seconds,
        _preemptions(engine) - preempted,
        statistics.mean(running),
        max(running),
        peak * block,
        _percentiles(first_token_times.values()),
        _percentiles(last_token_times.values()),
    )


def _preemptions(engine: Any) -> int:
    return sum(metric.value for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions")


def _percentiles(seconds: Any) -> tuple[float, float]:
    """The median and the 95th percentile."""
    median, percentile_95 = np.percentile([*seconds], (50, 95))
    return float(median), float(percentile_95)


@contextmanager
def engines(models: dict[str, Served], load: Load) -> Generator[dict[str, Connection]]:
    """A process for each, started one after the other."""
    context, pipes, processes = get_context("spawn"), {}, []
    for name, served in models.items():
        pipes[name], child_pipe = context.Pipe()
        processes.append(context.Process(target=serve, args=(served, load, child_pipe)))
        processes[-1].start()
        child_pipe.close()  # so that a process that ends early is noticed
        assert pipes[name].recv() == "ready"
    try:
        yield pipes
    finally:
        for pipe, process in zip(pipes.values(), processes, strict=True):
            pipe.send("end")
            process.join(60)


def recipes(options: argparse.Namespace) -> dict[str, Recipe]:
    """The conversions that are served, by name."""
    found = {}
    for bits in options.bits:
        stored, suffix = {}, ""
        if bits < 16:
            stored, suffix = {"kv_bits": bits}, f", {bits} bits"
        for share in options.shares:
            if share < 1 or stored:
                sizes = {"sink": options.sink, "recent": options.recent} if share < 1 else {}
                found[f"{share:.0%} full{suffix}"] = Recipe.of(sparsity=1 - share, **sizes, **stored)
        for budget in options.budgets:
            found[f"budgets of {budget}{suffix}"] = Recipe.of(rest="budgeted", budget=budget, **stored)
    return found


def models(source: Path, out: Path, options: argparse.Namespace) -> dict[str, Served]:
    """The original, and its conversions in folders in `out`."""
    config = read_config(source)
    model = Model.of(config).dimensions
    if options.profile:
        profile = HeadProfile.load(options.profile)
    else:  # which heads are full does not change how much is stored
        scores = np.random.default_rng(0).random((model.layers, model.kv_heads), dtype=np.float32)
        profile = HeadProfile(scores, "duo", "kv", str(source), model)
    found = {ORIGINAL: Served(source)}
    if options.fp8:
        found[f"{ORIGINAL}, {FP8}"] = Served(source, FP8)
    for name, recipe in recipes(options).items():
        folder = out / name.replace(" ", "-")
        convert(source, folder, profile, recipe)
        found[name] = Served(folder)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians of the times that every model served the load, and ratios to the original."""
    config = read_config(options.source)
    length = options.prompt + options.new
    budget = options.sequences * -(-length // BLOCK) * block_bytes(config, options.dtype)
    load = Load(
        options.requests,
        options.prompt,
        options.new,
        options.at_once,
        budget,
        options.chunk,
        config["vocab_size"],
        options.dtype,
    )
    with tempfile.TemporaryDirectory() as out:
        compared = models(options.source, Path(out), options)
        turns: dict[str, list[Result]] = {name: [] for name in compared}
        with engines(compared, load) as pipes:
            for _ in range(options.turns):
                working = {**pipes}
                while working:
                    for name, pipe in [*working.items()]:
                        pipe.send("run")
                        if (result := pipe.recv()) is not None:
                            turns[name].append(result)
                            print(name, result, flush=True)
                            del working[name]
    medians = {
        name: sorted(results, key=lambda result: result.seconds)[len(results) // 2] for name, results in turns.items()
    }
    original_result = medians[ORIGINAL]
    return {
        "load": asdict(load),
        "results": {name: asdict(result) for name, result in medians.items()},
        "ratios": {
            name: {
                "requests_per_second": result.requests_per_second / original_result.requests_per_second,
                "requests_per_cpu_second": statistics.median(
                    original_turn.cpu_seconds / turn.cpu_seconds
                    for original_turn, turn in zip(turns[ORIGINAL], turns[name], strict=True)
                ),
                "concurrency": result.running / original_result.running,
            }
            for name, result in medians.items()
        },
    }


def table(report: dict[str, Any]) -> list[str]:
    """Lines of Markdown: every model beside the original."""
    lines = [
        "| cache | requests per CPU second | mean concurrent requests | most concurrent | preemptions |",
        "|---|---|---|---|---|",
    ]
    for name, result in report["results"].items():
        ratios = report["ratios"][name]
        cells = (
            name,
            f"× {ratios['requests_per_cpu_second']:.2f}",
            f"{result['running']:.2f} (× {ratios['concurrency']:.2f})",
            f"{result['most_running']}",
            f"{result['preemptions']}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25], help="of heads that stay full")
    parser.add_argument("--bits", type=int, nargs="+", default=[16], help="of the cache; 16 is the model's dtype")
    parser.add_argument("--fp8", action="store_true", help="also serve the original with vLLM's cache of 8-bit floats")
    parser.add_argument("--budgets", type=int, nargs="*", default=[], help="of heads, in place of streaming ones")
    parser.add_argument("--sink", type=int, default=16)
    parser.add_argument("--recent", type=int, default=64)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=4, help="of the original model that the KV budget holds")
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = measure(options)
    print("\n".join(table(report)))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
