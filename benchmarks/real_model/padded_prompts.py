"""Reading a batch of prompts of different lengths beside the stock model, on a CPU.

    python benchmarks/real_model/padded_prompts.py MODEL --profile gates.safetensors --json padded.json

Rows of random tokens, padded on the left, have from half of the tokens to all of them. Stock and a converted model read
them in turns, on one thread; the converted model also reads as many columns without padding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from benchmarks.provenance import record_versions
from benchmarks.real_model.models import converted, stock
from benchmarks.real_model.short_steps import in_fresh_memory, table
from kvsurgery.display import console
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe


@torch.inference_mode()
def measure(stock_model: PreTrainedModel, model: PreTrainedModel, rows: int, length: int, rounds: int) -> dict:
    """Median seconds of CPU time that each takes to read the rows, and median ratios to the converted model's."""
    torch.manual_seed(0)
    tokens = torch.randint(stock_model.config.vocab_size, (rows, length))
    padding = torch.linspace(0, length / 2, rows).long()
    mask = (torch.arange(length) >= padding[:, None]).long()
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        readings = {
            "stock": (stock_model, mask),
            "converted": (model, mask),
            "unpadded": (model, torch.ones_like(mask)),
        }
        for name in [*readings][:: -1 if number % 2 else 1]:
            reader, attention_mask = readings[name]
            begin = time.process_time()
            reader(tokens, attention_mask=attention_mask, logits_to_keep=1)
            seconds.setdefault(name, []).append(time.process_time() - begin)
    ratios = {
        f"{name} ratio": statistics.median(one / other for one, other in zip(seconds["converted"], times, strict=True))
        for name, times in seconds.items()
        if name != "converted"
    }
    return {name: statistics.median(times) for name, times in seconds.items()} | ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint")
    parser.add_argument("--profile", type=Path, required=True, help="head scores that say which heads are full")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="tokens of the longest row")
    parser.add_argument("--rows", type=int, default=4, help="prompts of a batch")
    parser.add_argument("--rounds", type=int, default=3, help="how often each reads them")
    parser.add_argument("--json", type=Path, required=True, help="results")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    profile, stock_model = HeadProfile.load(arguments.profile), in_fresh_memory(stock(arguments.model))
    settings = {"lengths": arguments.lengths, "rows": arguments.rows, "rounds": arguments.rounds, "dtype": "float32"}
    report: dict[str, Any] = {"settings": settings, "results": {}}
    recipes = {
        "every head full": Recipe.of(full_heads=profile.model.layers * profile.model.kv_heads),
        "half of the heads stream": Recipe.of(sparsity=0.5),
    }
    for name, recipe in recipes.items():
        model, results = in_fresh_memory(converted(arguments.model, profile, recipe)), {}
        for length in arguments.lengths:
            results[length] = measure(stock_model, model, arguments.rows, length, arguments.rounds)
            console.stderr.print(f"{name}, {length:,} tokens: {results[length]['stock ratio']:.2f} of stock's time")
        report["results"][name] = results
        record_versions(report, name)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(json.loads(arguments.json.read_text()), "stock ratio")))


if __name__ == "__main__":
    main()
