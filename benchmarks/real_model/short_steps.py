"""A decode step over a short context beside the stock model's, where little is read and the host's work counts.

    python benchmarks/real_model/short_steps.py MODEL --profile gates.safetensors --json short_steps.json

Stock and a converted model decode one token after the other in turns, on one thread, after a prompt of random tokens.
Both hold their weights in fresh memory: how the pages of a mapped file lie makes more of a difference than the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from benchmarks.real_model.models import converted, stock
from kvsurgery import __version__
from kvsurgery.display import console
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe

WARM = 5  # steps that are not counted


def recipes(heads: int) -> dict[str, Recipe]:
    """What is compared, by name."""
    return {
        "every head full": Recipe.of(full_heads=heads),
        "half of the heads stream": Recipe.of(sparsity=0.5),
        "half of the heads have budgets of 120": Recipe.of(sparsity=0.5, rest="budgeted", budget=120),
        "4 bits": Recipe.of(full_heads=heads, kv_bits=4),
    }


def in_fresh_memory(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, whose weights are in no file."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@torch.inference_mode()
def measure(models: list[PreTrainedModel], length: int, steps: int) -> dict[str, float]:
    """Median milliseconds of CPU time of a step of stock and of a converted model, and the median of their ratio."""
    torch.manual_seed(0)
    tokens = torch.randint(models[0].config.vocab_size, (1, length))
    caches = [DynamicCache(config=models[0].config), None]
    caches = [model(tokens, past_key_values=cache).past_key_values for model, cache in zip(models, caches, strict=True)]
    token, milliseconds = tokens[:, -1:], ([], [])
    for step in range(WARM + steps):
        for index in (0, 1) if step % 2 else (1, 0):
            begin = time.process_time()
            models[index](token, past_key_values=caches[index])
            milliseconds[index].append(1e3 * (time.process_time() - begin))
    converted_times, stock_times = (times[WARM:] for times in reversed(milliseconds))
    ratio = statistics.median(
        converted_time / stock_time for converted_time, stock_time in zip(converted_times, stock_times, strict=True)
    )
    return {"stock": statistics.median(stock_times), "converted": statistics.median(converted_times), "ratio": ratio}


def table(report: dict[str, Any], ratio: str = "ratio") -> list[str]:
    """Lines of a Markdown table of a ratio, by the name that results have for it."""
    lengths = report["settings"]["lengths"]
    lines = [f"| | {' | '.join(f'{length:,} tokens' for length in lengths)} |", "|---" * (len(lengths) + 1) + "|"]
    for name, results in report["results"].items():
        ratios = [f"{result[ratio]:.2f}" for result in results.values()]
        lines.append(f"| {name} | {' | '.join(ratios)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint")
    parser.add_argument("--profile", type=Path, required=True, help="head scores that say which heads are full")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512, 1024, 2048], help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=150, help="tokens that are decoded")
    parser.add_argument("--json", type=Path, required=True, help="results")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    profile, stock_model = HeadProfile.load(arguments.profile), in_fresh_memory(stock(arguments.model))
    versions = {"kvsurgery": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    settings = {"lengths": arguments.lengths, "steps": arguments.steps}
    report = {"settings": settings, "versions": versions, "results": {}}
    for name, recipe in recipes(profile.model.layers * profile.model.kv_heads).items():
        models = [stock_model, in_fresh_memory(converted(arguments.model, profile, recipe))]
        report["results"][name] = {}
        for length in arguments.lengths:
            report["results"][name][length] = measure(models, length, arguments.steps)
            console.stderr.print(f"{name}, {length:,} tokens: {report['results'][name][length]}")
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(json.loads(arguments.json.read_text()))))


if __name__ == "__main__":
    main()
