"""Bytes, quality and speed of quantized caches on a language model: ours, those of transformers, and fp8.

    pip install optimum-quanto hqq    # what is not installed is left out
    python benchmarks/quantized_cache.py MODEL book.txt other.txt --json quantized.json
    python benchmarks/quantized_cache.py --show quantized.json

Every cache begins with the same states of a prompt, and reads the tokens that follow it one at a time. The divergence
is the mean Kullback-Leibler divergence, in nats, of the distribution of the next token from the stock model's. A step
of the stock model comes before each step with another cache, and times are CPU times of one thread. Bytes are those of
the storage of all tensors in the cache at the end, as a model in 16 bit has them. An interrupted run continues from its
JSON file.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks import comparison
from benchmarks.caches import ORIGINAL, all_full, contenders, filled
from benchmarks.peers.held import held_bytes
from benchmarks.provenance import record_versions
from kvsurgery.bench.caches import unusable
from kvsurgery.display import console
from kvsurgery.evaluate.statistics import interval, resampled_means
from kvsurgery.text.haystack import Haystack

States = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer


def pieces(model: Path, texts: list[Path], length: int, count: int) -> torch.Tensor:
    """Pieces [texts * count, length] of texts, from places that are evenly spread."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer is not None  # for the checker: transformers' types say it may be
    rows = []
    for text in texts:
        tokens = torch.from_numpy(Haystack.read(str(text), tokenizer, length).tokens)
        starts = torch.linspace(0, len(tokens) - length, count + 2).long().tolist()[1:-1]
        rows += [tokens[start : start + length] for start in starts]
    return torch.stack(rows)


@torch.inference_mode()
def compare_steps(
    models: tuple[PreTrainedModel, PreTrainedModel], caches: tuple[Any, Any], tokens: torch.Tensor
) -> dict[str, Any]:
    """What a model with a cache makes of tokens [1, n + 1] beside the stock model with its own, step by step.

    Args:
        models, caches: the stock model's first; the caches hold the same prompt.
    """
    divergence, nats, seconds = [], [], ([], [])
    for step in range(tokens.shape[1] - 1):
        logs = []
        for model, cache, times in zip(models, caches, seconds, strict=True):
            begin = time.process_time()
            output = model(tokens[:, step : step + 1], past_key_values=cache)
            times.append(time.process_time() - begin)
            logs.append(output.logits[0, -1].float().log_softmax(-1))
        divergence.append(F.kl_div(logs[1], logs[0], log_target=True, reduction="sum").item())
        nats.append(-logs[1][tokens[0, step + 1]].item())
    stock_seconds, model_seconds = map(median, seconds)
    return {"kl": fmean(divergence), "nats": fmean(nats), "stock_seconds": stock_seconds, "seconds": model_seconds}


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table: perplexity relative to the original's; brackets are 95% bootstrap intervals over the
    pieces of text."""
    lines = ["| cache | bytes | KL | perplexity | time of a step |", "|---" * 5 + "|"]
    results = report["results"]
    base = results[ORIGINAL]
    for name, parts in sorted(results.items(), key=lambda pair: -pair[1][0]["kv_bytes"]):
        share = parts[0]["kv_bytes"] / base[0]["kv_bytes"]
        loss = over_pieces([max(part["kl"], 0) for part in parts])
        nats_difference = over_pieces(
            [part["nats"] - original["nats"] for part, original in zip(parts, base, strict=True)]
        )
        cells = [
            "{:.4f} [{:.4f}, {:.4f}]".format(*loss),
            "× {:.3f} [{:.3f}, {:.3f}]".format(*map(math.exp, nats_difference)),
        ]
        if name == ORIGINAL:
            cells = ["0", f"{math.exp(fmean(part['nats'] for part in parts)):.2f}"]
        slower = fmean(part["seconds"] / part["stock_seconds"] for part in parts)
        lines.append(f"| {' | '.join([name, f'{share:.0%}', *cells, f'× {slower:.2f}'])} |")
    return lines


def over_pieces(values: list[float]) -> tuple[float, float, float]:
    """A mean over pieces of text, and its 95% interval; between two pieces, that is their two values."""
    mean_interval = interval(fmean(values), resampled_means(np.array([values]), 0)[0])
    return mean_interval.mean, mean_interval.low, mean_interval.high


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Add what is missing to the results, and write them after each cache."""
    torch.set_num_threads(1)
    length = arguments.prompt + arguments.new + 1
    tokens = pieces(arguments.model, arguments.texts, length, arguments.pieces)
    stock_model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    emitted_model = all_full(arguments.model)
    prompts: list[States] = []
    for piece in tokens:
        with torch.inference_mode():
            cache = stock_model(piece[None, : arguments.prompt], logits_to_keep=1).past_key_values
        prompts.append([(layer.keys, layer.values) for layer in cache.layers])
    results = report.setdefault("results", {})
    for name, (model, make) in contenders(stock_model, emitted_model).items():
        if name in results:
            continue
        if model is stock_model and (reason := unusable(make)):
            console.stderr.print(f"left out: {name} ({reason})")
            continue
        parts = []
        for piece, states in zip(tokens, prompts, strict=True):
            cache_under_test = make()
            if hasattr(cache_under_test, "reserve"):  # a cache of unstated length grows by a quarter at a time
                cache_under_test.reserve(arguments.prompt + arguments.new)
            caches = filled(DynamicCache(config=stock_model.config), states), filled(cache_under_test, states)
            part = compare_steps((stock_model, model), caches, piece[None, arguments.prompt :])
            parts.append({**part, "kv_bytes": held_bytes(caches[1], widest=2)})
        results[name] = parts
        record_versions(report, name)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        console.stderr.print(f"{name}: KL {fmean(part['kl'] for part in parts):.5f}")


def main() -> None:
    comparison.run(__doc__.splitlines()[0], measure, table, new=64, pieces=2)


if __name__ == "__main__":
    main()
