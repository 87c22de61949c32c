"""Decode on a CPU: emitted models against the stock model with its DynamicCache, taking turns in one process.

    python benchmarks/cpu_decode.py --lengths 4096 16384 --batches 1 --bits 16 8 4 --json decode.json

Four layers, hidden 1,024, 32 query and 8 KV heads of 128, random weights and caches filled with random states. Stock
concatenates its whole cache at every token, so that beating it is easy; the honest baseline is the emitted model with
every head full and nothing quantized. Prints medians of the CPU time of one thread in milliseconds a token, both
ratios, and the most bytes of keys and values that a cache holds; stock needs one layer's more while it concatenates.

Caches that together exceed `--memory` are measured in groups, one group after the other; within a group they take
turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

from benchmarks.synthetic import build, dimensions, emitted, empty_cache, fill, quantization
from kvsurgery.bench.caches import cache_bytes
from kvsurgery.templates.kv_layout import KVLayout

SPARSITIES = (0.0, 0.5, 0.75)
WARM = 2  # steps that are not counted


class Variant(NamedTuple):
    """A model with one kind of cache."""

    name: str
    bits: int  # 16: nothing is quantized
    model: PreTrainedModel

    def kv_bytes(self, batch: int, length: int, steps: int) -> int:
        """Bytes that its cache will have after so many steps."""
        config, itemsize = self.model.config, self.model.dtype.itemsize
        if not hasattr(config, "kv_surgery"):
            token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
            return batch * (length + steps) * token_bytes
        layout = KVLayout.from_config(config)
        if quantization_settings := quantization(self.bits):
            layout = layout.quantized(quantization_settings)
        return layout.kv_bytes(batch, length, steps, itemsize=itemsize)


def variants(bits: list[int]) -> list[Variant]:
    """The stock model, and emitted ones that share its weights, for every sparsity and width."""
    stock_model = build("cpu", "cpu", torch.float32)
    heads, _ = dimensions(stock_model.config)
    models = {sparsity: emitted(stock_model, heads - round(sparsity * heads)) for sparsity in SPARSITIES}
    return [
        Variant("stock", 16, stock_model),
        *(Variant(f"{sparsity:.2f}", width, model) for sparsity, model in models.items() for width in bits),
    ]


def groups(parts: list[Variant], batch: int, length: int, steps: int, memory: float) -> list[list[Variant]]:
    """Variants whose caches fit in memory together, each in the first group that has room for it."""
    result: list[tuple[list[Variant], float]] = []
    for variant in parts:
        size = variant.kv_bytes(batch, length, steps)
        for index, (group, used_bytes) in enumerate(result):
            if used_bytes + size <= memory:
                result[index] = [*group, variant], used_bytes + size
                break
        else:
            result.append(([variant], size))
    return [group for group, _ in result]


@torch.inference_mode()
def measure(parts: list[Variant], batch: int, length: int, steps: int) -> dict[Variant, tuple[float, int]]:
    """Median seconds of a decode step, the variants taking turns, and the bytes of each cache after the last."""
    caches = []
    for variant in parts:
        caches.append(empty_cache(variant.model, length + steps + WARM, variant.bits))
        fill(caches[-1], variant.model.config, batch, length, variant.model.dtype, "cpu")
    token = torch.ones(batch, 1, dtype=torch.long)
    seconds: list[list[float]] = [[] for _ in parts]
    for _ in range(steps + WARM):
        for variant, cache, times in zip(parts, caches, seconds, strict=True):
            begin = time.process_time()
            variant.model(token, past_key_values=cache)
            times.append(time.process_time() - begin)
    results = (
        (statistics.median(times[WARM:]), cache_bytes(cache)) for times, cache in zip(seconds, caches, strict=True)
    )
    return dict(zip(parts, results, strict=True))


def table(rows: list[dict[str, Any]], tokens: int, batch: int) -> list[str]:
    """Lines of a Markdown table of what was measured at one length and batch."""
    lines = ["| streaming heads | bits | ms a token | × stock | × own dense | KV cache |", "|---" * 6 + "|"]
    for row in rows:
        if (row["tokens"], row["batch"]) == (tokens, batch):
            is_stock = row["sparsity"] == "stock"
            heads = "stock" if is_stock else f"{float(row['sparsity']):.0%}"
            dense_ratio = "" if is_stock else f"{row['x_own_dense']:.2f}"
            figures = f"{row['ms']:.0f} | {row['x_stock']:.1f} | {dense_ratio} | {row['kv_bytes'] / 1e6:.0f} MB"
            lines.append(f"| {heads} | {row['bits']} | {figures} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8, 4, 3, 2], choices=(16, 8, 4, 3, 2))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--memory", type=float, default=12.0, help="gigabytes of caches that are held at once")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    bits = sorted({16, *arguments.bits}, reverse=True)  # 16 is a baseline
    parts = variants(bits)
    facts = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(
        ", ".join(f"{name} {value}" for name, value in facts.items()),
        "- float32, one thread; at 16 bits nothing is quantized",
    )
    ratios = f"{'x stock':>8} {'x own dense':>11}"
    print(f"{'tokens':>8} {'batch':>5} {'sparsity':>8} {'bits':>4} {'ms/token':>9} {ratios} {'KV MB':>9}")
    rows = []
    for length in arguments.lengths:
        for batch in arguments.batches:
            results: dict[Variant, tuple[float, int]] = {}
            variant_groups = groups(parts, batch, length, arguments.steps + WARM, arguments.memory * 1e9)
            for group in variant_groups:
                results |= measure(group, batch, length, arguments.steps)
            stock_seconds, dense_seconds = (results[variant][0] for variant in parts[:2])
            for variant in parts:
                seconds, size = results[variant]
                row = {"tokens": length, "batch": batch, "sparsity": variant.name, "bits": variant.bits}
                row |= {"ms": seconds * 1e3, "x_stock": stock_seconds / seconds, "x_own_dense": dense_seconds / seconds}
                rows.append({**row, "kv_bytes": size, "groups": len(variant_groups)})
                figures = f"{row['ms']:9.2f} {row['x_stock']:8.2f} {row['x_own_dense']:11.2f} {size / 1e6:9.1f}"
                print(f"{length:>8} {batch:>5} {variant.name:>8} {variant.bits:>4} {figures}", flush=True)
            if arguments.json:
                report = {**facts, "steps": arguments.steps, "rows": rows}
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
