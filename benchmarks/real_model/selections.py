"""What budgeted heads should select by, at equal bytes: perplexity and recall after a prompt, on two models.

    python benchmarks/real_model/selections.py MODEL --profile er.safetensors --text book.txt --json selections.json

Every head has a budget that holds. A text with facts in it is read as a prompt, then text that follows; facts are asked
for right after the prompt and further on, on a copy of the cache. Only facts that the original recalls at that place
count. Without MODEL the bundled model is measured, on its own task. A run continues from its JSON file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from benchmarks.budgets import HERE, load_task
from benchmarks.provenance import record_versions
from benchmarks.real_model.models import converted, stock
from benchmarks.real_model.trials import Prompt, Question, answered_correctly, hide, needles_of, stated, windows
from kvsurgery.display import console
from kvsurgery.evaluate.results import Interval
from kvsurgery.evaluate.statistics import interval, resampled_means
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from kvsurgery.templates.kv_layout import ATTENTION, SELECTS
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.needle_sets import read_set

ORIGINAL, QUARTERS, FACTS = "original", 4, 4
ASKED = 0, 2, 4  # after how many quarters of what follows


def cases_of_text(model: Path, text: Path, prompt: int, new: int, count: int) -> Iterator[Prompt]:
    """Pieces of a text at even distances, with facts between the sentences of their prompts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer is not None  # for the checker: transformers' types say it may be
    haystack = Haystack.read(str(text), tokenizer, prompt + new + 1)
    rng, needles = np.random.default_rng(0), read_set("fact")
    for piece in windows(haystack, prompt, new, count):
        facts = needles_of(rng, needles, FACTS)
        fact_tokens = sum(map(len, stated(tokenizer, facts)))
        yield hide(tokenizer, piece.tokens[fact_tokens:prompt], piece.tokens[prompt:-1], facts, rng)


def cases_of_task(prompt: int, new: int, count: int) -> Iterator[Prompt]:
    """The bundled model's own task: facts in filler, then filler."""
    task = load_task()
    for seed in range(count):
        rng = np.random.default_rng([seed, prompt])
        [text] = task.texts(rng, 1, prompt, FACTS, 0).tokens.numpy()
        questions = tuple(
            Question([task.RECALL, *text[place + 1 : place + 2 + task.VALUES].tolist()], task.VALUES)
            for place in np.flatnonzero(text == task.REMEMBER)
        )
        yield Prompt(text, questions, task.filler(rng, 1, new)[0])


@torch.inference_mode()
def measure(model: PreTrainedModel, prompt: Prompt) -> dict[str, Any]:
    """Answers right after the prompt, half of what follows and all of it, the mean negative log-likelihood of each
    quarter, and the bytes of the cache in the end."""
    output = model(torch.from_numpy(prompt.text)[None], logits_to_keep=1)
    cache, last_logits = output.past_key_values, output.logits[0]
    correct, nats = [[*map(int, answered_correctly(model, cache, prompt))]], []
    for number, quarter in enumerate(torch.from_numpy(prompt.following)[None].chunk(QUARTERS, 1)):
        logits = model(quarter, past_key_values=cache).logits[0]
        nats.append(F.cross_entropy(torch.cat([last_logits, logits[:-1]]).float(), quarter[0]).item())
        last_logits = logits[-1:]
        if number + 1 in ASKED:
            correct.append([*map(int, answered_correctly(model, cache, prompt, (number + 1) * quarter.shape[1]))])
    states = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    cache_bytes = cache.allocated_bytes() if hasattr(cache, "allocated_bytes") else sum(part.nbytes for part in states)
    return {"right": correct, "nats": nats, "kv_bytes": cache_bytes}


def recipe(select: Literal["attention", "value-norm"], arguments: argparse.Namespace) -> Recipe:
    """Budgets that hold."""
    sizes = {"window": arguments.window, "hold": arguments.hold, "beta": arguments.beta}
    return Recipe.of(rest="budgeted", budget=arguments.budget, select=select, **sizes)


def table(report: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table, of the cases that were measured with all models."""
    quarter = report["settings"]["new"] // QUARTERS
    heads = ["selected by", "KV bytes", f"perplexity up to {quarter:,}"]
    heads += [f"{number * quarter:,}" for number in range(2, QUARTERS + 1)]
    heads += ["than by attention", f"facts recalled after {ASKED[0] * quarter:,}"]
    heads += [*(f"{number * quarter:,}" for number in ASKED[1:]), "than by attention"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    count = min(map(len, report["results"].values()))
    results = {name: of_cases[:count] for name, of_cases in report["results"].items()}
    attention_losses = {name: losses(of_cases) for name, of_cases in results.items()}[ATTENTION]
    shares = {name: recalls(of_cases, results[ORIGINAL]) for name, of_cases in results.items()}
    for name, of_cases in results.items():
        nats, ratio, recall_cell = losses(of_cases), "", ""
        if name not in (ORIGINAL, ATTENTION):
            loss_difference = paired(nats - attention_losses)
            recall_difference = paired(shares[name] - shares[ATTENTION])
            ratio = "× {:.3f} [{:.3f}, {:.3f}]".format(
                *np.exp([loss_difference.mean, loss_difference.low, loss_difference.high])
            )
            recall_cell = f"{recall_difference.mean:+.0%} [{recall_difference.low:+.0%}, {recall_difference.high:+.0%}]"
        cells = [name, console.size(of_cases[0]["kv_bytes"]), *(f"{value:.2f}" for value in np.exp(nats.mean(0)))]
        correct, original_correct = (
            np.array([case["right"] for case in cases]) for cases in (of_cases, results[ORIGINAL])
        )
        counts = zip((correct * original_correct).sum((0, 2)), original_correct.sum((0, 2)), strict=True)
        cells += [ratio, *(f"{recalled} of {known_count}" for recalled, known_count in counts), recall_cell]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def losses(results: list[dict[str, Any]]) -> np.ndarray:
    """Mean negative log-likelihood by quarter, float64 [cases, quarters]."""
    return np.array([case["nats"] for case in results])


def recalls(results: list[dict[str, Any]], original: list[dict[str, Any]]) -> np.ndarray:
    """Share of the facts that the original recalls, float64 [cases, places]; NaN where it recalls none."""
    correct, original_correct = (
        np.array([case["right"] for case in cases], dtype=float) for cases in (results, original)
    )
    with np.errstate(invalid="ignore"):
        return (correct * original_correct).sum(2) / original_correct.sum(2)


def paired(differences: np.ndarray) -> Interval:
    """The mean of differences [cases, places] with the 95% interval of a bootstrap over cases; NaN does not count."""
    of_cases = np.nanmean(differences, 1)[None]
    return interval(of_cases.mean(), resampled_means(of_cases, 0)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("--profile", type=Path, help="head scores that budgets follow; of the bundled model: its own")
    parser.add_argument("--text", type=Path, help="UTF-8 text, with MODEL")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=1024, help="tokens that follow")
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--budget", type=int, default=120)
    parser.add_argument("--beta", type=float, default=1.2)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--hold", type=int, default=128)
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    size = arguments.prompt, arguments.new, arguments.cases
    source = arguments.model or HERE / "model"
    cases = [*(cases_of_text(source, arguments.text, *size) if arguments.model else cases_of_task(*size))]
    names = ("prompt", "new", "cases", "budget", "beta", "window", "hold")
    settings = {name: getattr(arguments, name) for name in names}
    settings["text"] = arguments.text.name if arguments.text else "the bundled model's task"
    report = json.loads(arguments.json.read_text()) if arguments.json.exists() else {"settings": settings}
    if report["settings"] != settings:
        parser.error(f"{arguments.json} was measured with {report['settings']}; give it another name")
    results = report.setdefault("results", {})
    profile = HeadProfile.load(arguments.profile or HERE / "profile.safetensors")
    models = {ORIGINAL: stock(source)}
    models |= {select: converted(source, profile, recipe(select, arguments)) for select in SELECTS}
    for number, case in enumerate(cases):
        for name, model in models.items():
            model_results = results.setdefault(name, [])
            if len(model_results) == number:
                model_results.append(measure(model, case))
                record_versions(report, name)
                arguments.json.write_text(json.dumps(report) + "\n")
                console.stderr.print(f"{number + 1} of {len(cases)}, {name}: {model_results[-1]}")
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
