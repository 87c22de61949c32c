"""Decode on a CPU: emitted models against the stock model with its DynamicCache, taking turns in one process.

    python benchmarks/cpu_decode.py --lengths 4096 16384 --batches 1 --steps 20

Four layers, hidden 1,024, 32 query and 8 KV heads of 128, random weights and a cache filled with random states. Stock
concatenates its whole cache at every token, so that beating it is easy; the honest baseline is the emitted model with
every head full. Prints medians in milliseconds a token, and both ratios.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from templates.kv_cache import KVSurgeryCache
from templates.modeling_kvsurgery_llama import LlamaForCausalLM as EmittedLlama

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 32, 8, 128, 1024
SINK, RECENT = 64, 256
SPARSITIES = (0.0, 0.5, 0.75)


def build() -> dict[str, torch.nn.Module]:
    """The stock model, and one emitted model of the same weights for every sparsity."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1 << 20,
    )
    models = {"stock": LlamaForCausalLM(config).eval()}
    for sparsity in SPARSITIES:
        streaming = round(sparsity * KV_HEADS)
        emitted = copy.deepcopy(config)
        layer = {"blocks": [[KV_HEADS - streaming, streaming]], "sink": SINK, "recent": RECENT}
        emitted.kv_surgery = {"version": 1, "head_dim": HEAD_DIM, "layers": [layer] * LAYERS}
        models[f"{sparsity:.2f}"] = EmittedLlama(emitted).eval()
        models[f"{sparsity:.2f}"].load_state_dict(models["stock"].state_dict())
    return models


def filled_cache(model: torch.nn.Module, batch: int, length: int, steps: int) -> DynamicCache | KVSurgeryCache:
    """A cache of `length` random tokens."""
    own = isinstance(model, EmittedLlama)
    cache = KVSurgeryCache(model.config, capacity=length + steps) if own else DynamicCache(config=model.config)
    if own:
        cache.begin(None, batch, length)
    for index in range(LAYERS):
        keys, values = torch.randn(2, batch, KV_HEADS, length, HEAD_DIM).unbind()
        handle, _ = cache.update(keys, values, index)
        if own:
            handle.layer.append(keys, values)
    return cache


@torch.inference_mode()
def measure(models: dict[str, torch.nn.Module], batch: int, length: int, steps: int) -> dict[str, float]:
    """Median seconds of a decode step, the models taking turns."""
    caches = {name: filled_cache(model, batch, length, steps + 2) for name, model in models.items()}
    token = torch.ones(batch, 1, dtype=torch.long)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for step in range(steps + 2):
        for name, model in models.items():
            begin = time.perf_counter()
            model(token, past_key_values=caches[name])
            if step >= 2:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    models = build()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    print(f"{'tokens':>8} {'batch':>5} {'sparsity':>8} {'ms/token':>9} {'x stock':>8} {'x own dense':>11}")
    for length in arguments.lengths:
        for batch in arguments.batches:
            times = measure(models, batch, length, arguments.steps)
            for name, seconds in times.items():
                ratios = f"{times['stock'] / seconds:8.2f} {times['0.00'] / seconds:11.2f}"
                print(f"{length:>8} {batch:>5} {name:>8} {seconds * 1e3:9.2f} {ratios}", flush=True)


if __name__ == "__main__":
    main()
