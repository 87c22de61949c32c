"""Which heads have to see everything: gates, other scores, the first layers and random heads, on a real language model.

    python benchmarks/real_model/which_heads.py MODEL --profile gates.safetensors --profile er.safetensors \\
        --facts-in book.txt --text other.txt --json which_heads.json

Every choice of heads converts MODEL at each share of full heads; the other heads stream. Each is measured by the facts
that it recalls and by what follows other texts, or MODEL's own long answers: perplexity, and divergence from the
original. The original answers first, then choices take the shares in turn, so that an interrupted run, which continues
from its JSON file, has comparisons early. `heads_report.py` shows the file.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from benchmarks.provenance import record_versions
from benchmarks.real_model.models import converted, stock
from benchmarks.real_model.trials import Prompt, Window, correct_answers, nats, next_tokens, prompts, windows
from kvsurgery.display import console
from kvsurgery.measure.cache_trial import next_token_divergence
from kvsurgery.measure.own_answers import read_answers
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.loading import load_scores
from kvsurgery.recipe import Recipe
from kvsurgery.text.haystack import Haystack

SHARES = "0.5,0.25,0.75,0.33"
RANDOM = 5  # draws
ORIGINAL = "original"


@dataclass(frozen=True)
class Trials:
    """What every model is asked: about facts, and how windows go on, of which the last are the model's own answers."""

    prompts: list[Prompt]
    windows: list[Window]
    answers: int


@dataclass(frozen=True)
class Choice:
    """Heads by score, at a share of full heads and a window."""

    heads: str
    profile: HeadProfile
    share: float
    sink: int
    recent: int

    @property
    def name(self) -> str:
        """Its key among results."""
        return f"{self.heads}, {self.share:.0%} full, {self.sink}+{self.recent}"

    @property
    def recipe(self) -> Recipe:
        """What the other heads are."""
        return Recipe.of(sparsity=round(1 - self.share, 2), rest="streaming", sink=self.sink, recent=self.recent)


def of_scores(profile: HeadProfile, scores: np.ndarray) -> HeadProfile:
    """A profile of the same model with other scores of its KV heads."""
    return replace(profile, scores=scores.astype(np.float32), granularity="kv", method="ablation", provenance={})


def choices(
    profiles: dict[str, HeadProfile], shares: list[float], sizes: list[tuple[int, int]], draws: int
) -> list[Choice]:
    """All that are compared: shares outermost, the profiles' own choices before those that know nothing."""
    any_profile = next(iter(profiles.values()))
    shape = any_profile.model.layers, any_profile.model.kv_heads
    first_layers = np.repeat(np.linspace(1, 0, shape[0])[:, None], shape[1], axis=1)
    profiles_by_name = dict(profiles) | {"first layers": of_scores(any_profile, first_layers)}
    for seed in range(draws):
        profiles_by_name[f"random {seed}"] = of_scores(any_profile, np.random.default_rng(seed).random(shape))
    return [
        Choice(name, profile, share, *size)
        for size in sizes
        for share in shares
        for name, profile in profiles_by_name.items()
    ]


def measure(model: PreTrainedModel, trials: Trials, original_logs: list[torch.Tensor]) -> dict[str, Any]:
    """Answers by question, and by window the divergence and the mean negative log-likelihood."""
    correct = [correct_answers(model, prompt) for prompt in trials.prompts]
    logs = [next_tokens(model, window) for window in trials.windows]
    return {
        "right": [int(is_correct) for row in correct for is_correct in row],
        "kl": [next_token_divergence(*pair).item() for pair in zip(logs, original_logs, strict=True)],
        "nats": [nats(*pair) for pair in zip(logs, trials.windows, strict=True)],
    }


def options() -> argparse.Namespace:
    """What is typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("--profile", type=Path, action="append", required=True, help="head scores; called by file name")
    parser.add_argument("--facts-in", type=Path, required=True, help="UTF-8 text that facts are hidden in")
    parser.add_argument("--text", type=Path, action="append", default=[], help="UTF-8 text that is continued")
    parser.add_argument(
        "--answers",
        type=Path,
        help="long answers of MODEL to its own prompts, kept by `profile compute --method rlkv-lite`, read like texts",
    )
    parser.add_argument("--length", type=int, default=512, help="tokens of a text with facts")
    parser.add_argument("--facts", type=int, default=4, help="in each")
    parser.add_argument("--prompts", type=int, default=25, help="texts with facts")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens in the cache before those that are predicted")
    parser.add_argument("--new", type=int, default=192, help="tokens that are predicted")
    parser.add_argument("--windows", type=int, default=4, help="of each text")
    parser.add_argument(
        "--size", default="16+64", help="sinks and recent tokens of a streaming head; several: 16+64,.."
    )
    parser.add_argument("--shares", default=SHARES, help="of heads that are full")
    parser.add_argument("--draws", type=int, default=RANDOM, help="choices of random heads")
    parser.add_argument("--only", action="append", help="choices by name, such as 'gates, 50%% full, 16+64'")
    parser.add_argument("--device", default="cpu", help="where models run, such as cuda")
    parser.add_argument("--json", type=Path, required=True, help="results; those there are not computed again")
    arguments = parser.parse_args()
    if not (arguments.text or arguments.answers):
        parser.error("--text or --answers is missing")
    return arguments


def made_trials(arguments: argparse.Namespace) -> Trials:
    """What every model is asked, from the texts and answers that are given."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    assert tokenizer is not None  # for the checker: transformers' types say it may be
    hidden_in = Haystack.read(str(arguments.facts_in), tokenizer, arguments.length)
    text_windows = [
        window
        for text in arguments.text
        for window in windows(
            Haystack.read(str(text), tokenizer, arguments.prompt + arguments.new + 1),
            arguments.prompt,
            arguments.new,
            arguments.windows,
        )
    ]
    answers = read_answers(arguments.answers) if arguments.answers else []
    text_windows += [Window(np.array(answer.prompt + answer.answer), len(answer.prompt)) for answer in answers]
    return Trials(
        prompts(tokenizer, hidden_in, arguments.length, arguments.facts, arguments.prompts, seed=0),
        text_windows,
        len(answers),
    )


def main() -> None:
    arguments = options()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    profiles = {path.stem: load_scores(path) for path in arguments.profile}
    sizes = [(int(sink), int(recent)) for sink, recent in (size.split("+") for size in arguments.size.split(","))]
    selected = [
        choice
        for choice in choices(profiles, [*map(float, arguments.shares.split(","))], sizes, arguments.draws)
        if choice.name in (arguments.only or [choice.name])
    ]
    trials = made_trials(arguments)
    settings = {name: getattr(arguments, name) for name in ("length", "facts", "prompts", "prompt", "new", "windows")}
    settings |= {"facts_in": arguments.facts_in.name, "texts": [text.name for text in arguments.text]}
    settings |= {"answers": trials.answers} if trials.answers else {}
    report = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    if report.setdefault("settings", settings) != settings:
        raise SystemExit(f"{arguments.json} was measured with {report['settings']}; give it another name")
    results = report.setdefault("results", {})
    report["places"] = [place for prompt in trials.prompts for place in prompt.places]
    wanted = [ORIGINAL, *(choice.name for choice in selected)]

    def keep(name: str, facts: dict[str, Any], begin: float) -> None:
        results[name] = facts
        record_versions(report, name, arguments.device)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        done, recall = sum(name in results for name in wanted), np.mean(facts["right"])
        console.stderr.print(
            f"{done} of {len(wanted)}: {name}: {recall:.0%} of facts, KL {np.mean(facts['kl']):.4f}, "
            f"perplexity {np.exp(np.mean(facts['nats'])):.2f}, {time.perf_counter() - begin:.0f} s"
        )

    stock_model = stock(arguments.model, device=arguments.device)
    begin, original_logs = time.perf_counter(), [next_tokens(stock_model, window) for window in trials.windows]
    if ORIGINAL not in results:
        keep(ORIGINAL, measure(stock_model, trials, original_logs), begin)
    del stock_model
    for choice in selected:
        if choice.name in results:
            continue
        begin = time.perf_counter()
        model = converted(arguments.model, choice.profile, choice.recipe, arguments.device)
        keep(choice.name, measure(model, trials, original_logs), begin)


if __name__ == "__main__":
    main()
