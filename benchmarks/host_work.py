"""The host's work in an eager decode step on a GPU, beside the stock model's, measured without a GPU.

    python benchmarks/host_work.py --json host-work.json

A model of Llama's layers with tiny widths decodes on one CPU thread, so that Python and the calls of torch take most
of the time. Triton compiles our kernels for an H100 and prepares every launch, but launches nothing; other operations,
such as the projections, run on the CPU. Stock and our models take turns. Needs Triton.

This measures the CPU time of the host alone: not the driver's share of a launch, and nothing that a GPU does. Most of
the time is common to all contenders, so compare their differences from stock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.synthetic import SHAPES, emitted, empty_cache, fill

WIDTHS = SHAPES["tiny"]
FULL_HEADS = WIDTHS["num_key_value_heads"] // 2  # of a layer; the others stream
CONTENDERS = {"stock": 16, "16 bits": 16, "4 bits": 4}
PROMPT = 20
WARM = 5  # steps that are not counted: they compile
DEPTHS = 2, 4  # layers of the models whose operations are counted


@contextmanager
def kernels_do_nothing() -> Generator[list[str]]:
    """Take the path of kernels on the CPU, up to what Triton would launch; yields the names of these kernels."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler import CompiledKernel
    from triton.runtime.driver import driver

    from kvsurgery.templates import kv_attention, kv_cuda
    from tests.ptx.launches import Device

    launched: list[str] = []

    def run(kernel):
        return lambda *arguments: launched.append(kernel.name)

    with (
        patch.object(driver, "_active", Device(90)),
        patch.object(CUDABackend, "make_cubin", lambda *arguments: b""),
        patch.object(CompiledKernel, "_init_handles", lambda kernel: None),
        patch.object(CompiledKernel, "run", property(run)),
        patch.object(kv_cuda.kv_decode, "_multiprocessors", lambda device: 132),
        patch.object(kv_attention, "_path", lambda *states: kv_cuda),
    ):
        yield launched


class Steps:
    """Decode steps of each contender, whose cache has room for all of them."""

    def __init__(self, layers: int, steps: int):
        config = LlamaConfig(**WIDTHS)
        config.num_hidden_layers = layers
        stock = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        ours = emitted(stock, FULL_HEADS)
        self.models: dict[str, PreTrainedModel] = {name: stock if name == "stock" else ours for name in CONTENDERS}
        self.caches = {
            name: empty_cache(model, PROMPT + WARM + steps, CONTENDERS[name]) for name, model in self.models.items()
        }
        for cache in self.caches.values():
            fill(cache, config, 1, PROMPT, torch.bfloat16, "cpu")
        self.token = torch.ones(1, 1, dtype=torch.long)

    @torch.inference_mode()
    def take(self, name: str) -> None:
        """Let a contender decode a token."""
        self.models[name](self.token, past_key_values=self.caches[name])


class Operations(TorchDispatchMode):
    """Counts the operations of torch, views too."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


def calls(work: Callable[[], None]) -> int:
    """How many functions are called, of Python and of C."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def counts() -> dict[str, dict[str, float]]:
    """Calls of functions, operations of torch and launches of our kernels that one more layer adds to a step."""
    totals: dict[str, list[tuple[int, ...]]] = {name: [] for name in CONTENDERS}
    with kernels_do_nothing() as launched:
        for layers in DEPTHS:
            steps = Steps(layers, 2)
            for name, found in totals.items():
                for _ in range(WARM):
                    steps.take(name)
                launched.clear()
                with Operations() as operations:
                    steps.take(name)
                kernels = len(launched)
                found.append((calls(partial(steps.take, name)), operations.count, kernels))
    shallow, deep = DEPTHS
    return {
        name: {
            key: (last - first) / (deep - shallow)
            for key, first, last in zip(("calls", "operations", "launches"), *found, strict=True)
        }
        for name, found in totals.items()
    }


def microseconds(layers: int, steps: int) -> dict[str, float]:
    """Median CPU time of a step of each contender, divided by the layers."""
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    turns = Steps(layers, steps)
    with kernels_do_nothing():
        for _ in range(WARM + steps):
            for name, times in seconds.items():
                begin = time.process_time()
                turns.take(name)
                times.append(time.process_time() - begin)
    return {name: 1e6 * statistics.median(times[WARM:]) / layers for name, times in seconds.items()}


def table(report: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [
        "| of a layer | calls of functions | operations of torch | kernels | CPU time, × stock |",
        "|---" * 5 + "|",
    ]
    stock_time = report["contenders"]["stock"]["microseconds"]
    for name, figures in report["contenders"].items():
        numbers = [f"{figures[key]:.0f}" for key in ("calls", "operations", "launches")]
        lines.append(f"| {name} | {' | '.join(numbers)} | {figures['microseconds'] / stock_time:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100, help="tokens that are decoded")
    parser.add_argument("--json", type=Path, required=True, help="results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    import triton

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "triton": triton.__version__}
    report = {"settings": {"layers": arguments.layers, "steps": arguments.steps}, "versions": versions}
    times = microseconds(arguments.layers, arguments.steps)
    report["contenders"] = {name: {"microseconds": times[name], **found} for name, found in counts().items()}
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
