"""What a quantized cache loses on a language model: divergence of the next token, and perplexity.

    python benchmarks/cache_quality.py MODEL book.txt other.txt --windows 2 --json quality.json

MODEL is converted with every head full. The cache takes 1,024 tokens of a text, and one forward reads the 192 tokens
that follow, as a later prompt. The divergence is the mean Kullback-Leibler divergence, in nats, of the distribution of
the next token from that with an unquantized cache. The settings begin with the cache of version 0.1.0 and add one part
after the other. An interrupted run continues from its JSON file.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from benchmarks.caches import all_full
from benchmarks.provenance import record_versions
from kvsurgery.display import console
from kvsurgery.measure.cache_trial import next_token_divergence, next_token_logs
from kvsurgery.templates.kv_layout import Quantization
from kvsurgery.text.tokens import first_tokens, token_ids

WIDTHS = {4: "4 bits", 3: "3 bits", "k3v2": "k3v2", 2: "2 bits"}  # of the table
STEPS = {
    "0.1.0": "scheme of version 0.1.0",
    "+ sinks": "+ sinks",
    "+ rotated values": "+ values rotated",
    "+ clipped ranges": "+ ranges clipped",
    "+ rotated keys": "+ sinks, keys and values rotated",
    "+ both": "+ ranges clipped",
}


def settings() -> dict[str, Quantization | None]:
    """The caches that are compared, by name."""
    quantizations: dict[str, Quantization | None] = {"unquantized": None}
    for scheme in ("kivi", "per-token"):
        for bits in (8, 4, 3, "k3v2", 2):
            base = Quantization(bits, scheme, sink=0, rotate="none", clip=False)
            steps = (
                base,
                replace(base, sink=4),
                replace(base, sink=4, rotate="values"),
                replace(base, sink=4, rotate="values", clip=True),
                replace(base, sink=4, rotate="both"),
                replace(base, sink=4, rotate="both", clip=True),
            )
            count = 3 if (scheme, bits) == ("kivi", 8) else len(steps)
            quantizations |= {
                f"{scheme} {bits} {name}": quantization
                for name, quantization in [*zip(STEPS, steps, strict=True)][:count]
            }
    return quantizations


@torch.inference_mode()
def next_tokens(
    model: PreTrainedModel, quantization: Quantization | None, prompt: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] after each of `tokens` [1, tokens], which follow a prompt [1, prompt]."""
    cache_class = type(model(tokens[:, :1]).past_key_values)
    return next_token_logs(model, prompt, tokens, cache_class(model.config, quantization=quantization))


def measure(
    model: PreTrainedModel, tokens: torch.Tensor, prompt: int, quantizations: dict[str, Quantization | None]
) -> dict:
    """Divergence and mean log-probability of [1, prompt + new + 1] tokens, by setting."""
    prompt_tokens, new_tokens = tokens[:, :prompt], tokens[:, prompt:-1]
    exact = next_tokens(model, None, prompt_tokens, new_tokens)
    losses = {}
    for name, quantization in quantizations.items():
        logs = exact if quantization is None else next_tokens(model, quantization, prompt_tokens, new_tokens)
        divergence = next_token_divergence(logs, exact).item()
        losses[name] = {"kl": divergence, "nats": F.nll_loss(logs, tokens[0, prompt + 1 :]).item()}
    return losses


def windows(text: Path, tokenizer: Any, length: int, count: int) -> dict[int, torch.Tensor]:
    """Pieces of a text at even distances after what the tokenizer begins with, int64 [1, length], by their places."""
    prefix = torch.tensor([first_tokens(tokenizer)], dtype=torch.long)
    tokens, length = torch.tensor([token_ids(tokenizer, text.read_text(encoding="utf-8"))]), length - prefix.shape[1]
    starts = torch.linspace(0, tokens.shape[1] - length, count + 2).long().tolist()[1:-1]
    return {start: torch.cat([prefix, tokens[:, start : start + length]], 1) for start in starts}


def figures(windows: Mapping[str, Mapping[str, Mapping[str, float]]], name: str) -> tuple[str, str]:
    """Divergence and perplexity with a cache, over all windows that have it."""
    results = [window[name] for window in windows.values() if name in window]
    kl, nats = (fmean(result[metric] for result in results) for metric in ("kl", "nats"))
    return f"{kl:.4f}", f"{math.exp(nats):.2f}"


def table(windows: Mapping[str, Mapping[str, Mapping[str, float]]], scheme: str) -> list[str]:
    """Lines of a Markdown table: divergence and perplexity by what a scheme has, and by bits; defaults are bold."""
    measured = {name for window in windows.values() for name in window}
    widths = {bits: title for bits, title in WIDTHS.items() if f"{scheme} {bits} + sinks" in measured}
    lines, caches = [f"| cache | {' | '.join(widths.values())} |", "|---" * (1 + len(widths)) + "|"], settings()
    for step, words in STEPS.items():
        cells = []
        for bits in widths:
            cell = " / ".join(figures(windows, f"{scheme} {bits} {step}"))
            cells.append(f"**{cell}**" if caches[f"{scheme} {bits} {step}"] == Quantization(bits, scheme) else cell)
        lines.append(f"| {' | '.join([words, *cells])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("texts", type=Path, nargs="+", metavar="TEXT", help="UTF-8 texts")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens in the cache")
    parser.add_argument("--new", type=int, default=192, help="tokens that follow them")
    parser.add_argument("--windows", type=int, default=4, help="of each text")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument(
        "--json", type=Path, required=True, help="figures of every window; those there are not repeated"
    )
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    assert tokenizer is not None  # for the checker: transformers' types say it may be
    size = {"prompt": arguments.prompt, "new": arguments.new}
    report = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    report = {"model": arguments.model.name, **size, "windows": {}, **report}
    if {name: report[name] for name in size} != size:
        parser.error(f"{arguments.json} was measured with other --prompt and --new; give it another name")
    length = arguments.prompt + arguments.new + 1
    caches = {
        name: quantization
        for name, quantization in settings().items()
        if quantization is None or arguments.only in name
    }
    model = all_full(arguments.model)
    for text in arguments.texts:
        for start, tokens in windows(text, tokenizer, length, arguments.windows).items():
            window = report["windows"].setdefault(f"{text.name} {start}", {})
            missing_caches = {name: quantization for name, quantization in caches.items() if name not in window}
            if missing_caches:
                window |= measure(model, tokens, arguments.prompt, missing_caches)
                record_versions(report, f"{text.name} {start}")
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    rows = [(name, *figures(report["windows"], name)) for name in caches]
    console.stdout.print(console.table(f"{len(report['windows'])} windows", ["cache", "KL", "perplexity"], rows))


if __name__ == "__main__":
    main()
