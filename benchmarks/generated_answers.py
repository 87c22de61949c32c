"""What the errors of a quantized cache add up to in generated answers: ours and transformers', on a language model.

    pip install optimum-quanto hqq    # what is not installed is left out
    python benchmarks/generated_answers.py MODEL book.txt other.txt --json generated.json
    python benchmarks/generated_answers.py --show generated.json

The stock model is asked to continue pieces of the texts, and answers greedily. Every cache begins with the same states
of the prompts. It reads the stock model's answers, a few tokens at a time: how far does the distribution of the next
token move, and how often is the most likely token another one? Then it generates answers itself: where do they first
differ from the stock model's, and how many tokens are the same at the same place? No answer ends before its last token.
Bytes are those of the storage of all tensors in the cache at the end of the answers, as a model in 16 bit has them. An
interrupted run continues from its JSON file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import comparison
from benchmarks.caches import ORIGINAL, all_full, contenders, filled
from benchmarks.peers.held import held_bytes
from benchmarks.provenance import record_versions
from kvsurgery.bench.caches import unusable
from kvsurgery.display import console
from kvsurgery.evaluate.statistics import interval, resampled_means
from kvsurgery.text.chat import around_turn
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.tokens import token_ids

REQUEST = "Continue this text at length.\n\n"
CHUNK = 16  # tokens of an answer that are read at once; far fewer than a cache quantizes together
QUARTERS = 4


def prompts(tokenizer: PreTrainedTokenizerBase, texts: list[Path], length: int, pieces: int) -> torch.Tensor:
    """Prompts [texts * pieces, length]: in the chat template, a request and a piece of a text."""
    around = around_turn(tokenizer)
    if around is None:
        raise SystemExit("the tokenizer has no chat template; give an instruct model")
    prefix, suffix = token_ids(tokenizer, around[0] + REQUEST), token_ids(tokenizer, around[1])
    piece_length, rows = length - len(prefix) - len(suffix), []
    for text in texts:
        tokens = Haystack.read(str(text), tokenizer, piece_length).tokens.tolist()
        starts = torch.linspace(0, len(tokens) - piece_length, pieces + 2).long().tolist()[1:-1]
        rows += [[*prefix, *tokens[start : start + piece_length], *suffix] for start in starts]
    return torch.tensor(rows)


@torch.inference_mode()
def generated(model: PreTrainedModel, cache: Any, first: torch.Tensor, count: int, end: int) -> torch.Tensor:
    """Greedy answers [rows, count] without the token `end`, which begin with the tokens `first` [rows]."""
    tokens = [first]
    for _ in range(count - 1):
        logits = model(tokens[-1][:, None], past_key_values=cache).logits[:, -1]
        logits[:, end] = -torch.inf
        tokens.append(logits.argmax(-1))
    return torch.stack(tokens, 1)


@torch.inference_mode()
def quarter_figures(
    model: PreTrainedModel, cache: Any, answers: torch.Tensor, original_logs: list[torch.Tensor]
) -> dict[str, list[float]]:
    """Divergence, and share of most likely tokens that agree, by quarter of answers [rows, tokens] that are read.

    Args:
        original_logs: the original's log-probabilities, by chunk; filled by the first contender, the original.
    """
    divergences, agreements = [], []
    for number, chunk in enumerate(answers.split(CHUNK, 1)):
        logs = model(chunk, past_key_values=cache).logits.float().log_softmax(-1)
        if number == len(original_logs):
            original_logs.append(logs)
        divergences.append(F.kl_div(logs, original_logs[number], log_target=True, reduction="none").sum(-1))
        agreements.append((logs.argmax(-1) == original_logs[number].argmax(-1)).float())
    return {name: by_quarter(torch.cat(parts, 1)) for name, parts in (("kl", divergences), ("same", agreements))}


def by_quarter(figures: torch.Tensor) -> list[float]:
    """Means of [rows, tokens] over rows and over the tokens of each quarter."""
    return [quarter.mean().item() for quarter in figures.tensor_split(QUARTERS, 1)]


def differences(answers: torch.Tensor, original: torch.Tensor) -> dict[str, list]:
    """By row of [rows, tokens], the first token that differs, counted from 0, and the share of those that agree."""
    agreement = answers == original
    first_difference = torch.where(agreement.all(1), agreement.shape[1], (~agreement).int().argmax(1))
    return {"first_difference": first_difference.tolist(), "agreement": agreement.float().mean(1).tolist()}


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table; brackets are a 95% bootstrap interval over the answers."""
    new_tokens = report["settings"]["new"]
    quarters = [f"{new_tokens * (number + 1) // QUARTERS:,}" for number in range(QUARTERS)]
    columns = [
        "cache",
        "bytes",
        f"KL up to {quarters[0]}",
        *quarters[1:],
        "same next token",
        "first difference",
        "same tokens",
    ]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    results = report["results"]
    for name, result in sorted(results.items(), key=lambda pair: -pair[1]["kv_bytes"]):
        share = result["kv_bytes"] / results[ORIGINAL]["kv_bytes"]
        cells = [name, f"{share:.0%}", *(f"{kl:.4f}" for kl in result["kl"]), f"{fmean(result['same']):.1%}"]
        if "agreement" in result:
            agreement = interval(fmean(result["agreement"]), resampled_means(np.array([result["agreement"]]), 0)[0])
            cells += [f"{median(result['first_difference']):.0f}"]
            cells += [f"{agreement.mean:.0%} [{agreement.low:.0%}, {agreement.high:.0%}]"]
        lines.append("| " + " | ".join([*cells, *[""] * (len(columns) - len(cells))]) + " |")
    return lines


def measure(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Add what is missing to the results, and write them after each cache."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    assert tokenizer is not None  # for the checker: transformers' types say it may be
    stock_model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    emitted_model = all_full(arguments.model)
    end = tokenizer.eos_token_id
    with torch.inference_mode():
        output = stock_model(prompts(tokenizer, arguments.texts, arguments.prompt, arguments.pieces), logits_to_keep=1)
        output.logits[:, :, end] = -torch.inf
    first_tokens = output.logits[:, -1].argmax(-1)
    states = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
    if "answers" not in report:
        tokens = generated(stock_model, output.past_key_values, first_tokens, arguments.new, end)
        report["answers"] = [" ".join(map(str, answer)) for answer in tokens.tolist()]  # each on one line of the file
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    answers = torch.tensor([[*map(int, answer.split())] for answer in report["answers"]])
    original_logs: list[torch.Tensor] = []
    results = report.setdefault("results", {})
    for name, (model, make) in contenders(stock_model, emitted_model).items():
        begin = time.process_time()
        result: dict[str, Any] = results.get(name, {})
        if name != ORIGINAL and "agreement" in result:
            continue
        if model is stock_model and name != ORIGINAL and (reason := unusable(make)):
            console.stderr.print(f"left out: {name} ({reason})")
            continue
        record_versions(report, name)
        if name == ORIGINAL or "kl" not in result:
            cache = filled(make(), states)
            figures = quarter_figures(model, cache, answers, original_logs)
            result = results[name] = {**figures, "kv_bytes": held_bytes(cache, widest=2)}
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        if name != ORIGINAL:
            result |= differences(generated(model, filled(make(), states), first_tokens, arguments.new, end), answers)
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        console.stderr.print(
            f"{len(results)}: {name}: KL {fmean(result['kl']):.5f}, {time.process_time() - begin:.0f} s"
        )


def main() -> None:
    comparison.run(__doc__.splitlines()[0], measure, table, new=512, pieces=4)


if __name__ == "__main__":
    main()
