"""What selecting again costs while budgets hold, as a share of the CPU time of a decode step.

    python benchmarks/real_model/selection_cost.py MODEL --profile er.safetensors --json selection_cost.json

Heads that keep as many tokens at most, with blocks of several sizes, unquantized and in 4 bits, decode `--steps` tokens
on one thread after a prompt of random tokens. Three parts are timed: to remember the queries that will choose
(`watch`); to choose and move what a head keeps (`renew`), which happens once a block; and to quantize the tokens that
this brings into tiles (`quantize`), which every quantized cache does once with each token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging

from benchmarks.real_model.models import converted
from kvsurgery import __version__
from kvsurgery.display import console
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Budgeted, Recipe

BLOCKS, MOST, PARTS = (32, 64, 128), 256, ("watch", "renew", "quantize")
PROMPT = 300  # tokens, more than a head may keep


def recipes() -> dict[str, Recipe]:
    """By name, budgets of `MOST` tokens with window and block, all in one dtype or in 4 bits."""
    by_name = {}
    for block in BLOCKS:
        unquantized = Recipe.of(rest="budgeted", budget=MOST - Budgeted().window - block, hold=block)
        by_name[f"unquantized, blocks of {block}"] = unquantized
        quantized = unquantized.changed(kv_bits=4, kv_scheme="per-token", kv_residual=block)
        by_name[f"4 bits, blocks of {block}"] = quantized
    return by_name


def timed(seconds_by_part: dict[str, float], part: str, call: Callable) -> Callable:
    """A function that adds its time to what is spent on a part; the clock of CPU time would take a tenth of that."""

    def timed_call(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments, **options)
        seconds_by_part[part] += time.perf_counter() - start
        return result

    return timed_call


@torch.inference_mode()
def measure(model: PreTrainedModel, steps: int) -> dict[str, float]:
    """Milliseconds of CPU time of a decode step, and of its parts by the clock on the wall."""
    torch.manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, PROMPT))
    output, seconds_by_part = model(tokens, use_cache=True), dict.fromkeys(PARTS, 0.0)
    layers = output.past_key_values.layers
    for layer in layers:
        for part in ("watch", "renew"):
            setattr(layer.heads[-1], part, timed(seconds_by_part, part, getattr(layer.heads[-1], part)))
    emitted = type(layers[0]).__module__.rpartition(".")[0]
    with ExitStack() as patches:
        for name in (".kv_codes", ".kv_token_codes"):  # of which an unquantized cache has none
            if module := sys.modules.get(emitted + name):
                quantize = timed(seconds_by_part, "quantize", module.quantize_groups)
                patches.enter_context(mock.patch.object(module, "quantize_groups", quantize))
        begin = time.process_time()
        for _ in range(steps):
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
        times = {"step": time.process_time() - begin, **seconds_by_part}
    times["renew"] -= times["quantize"]
    return {part: 1e3 * seconds / steps for part, seconds in times.items()}


def table(report: dict[str, Any]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [
        "| heads | ms a step | to remember queries | to select | both | to quantize |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in report["results"].items():
        watch, renew, quantize = (result[part] / result["step"] for part in PARTS)
        cells = [name, f"{result['step']:.0f}", *(f"{share:.2%}" for share in (watch, renew, watch + renew, quantize))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint")
    parser.add_argument("--profile", type=Path, required=True, help="head scores that budgets follow")
    parser.add_argument("--steps", type=int, default=256, help="tokens that are decoded")
    parser.add_argument("--json", type=Path, required=True, help="results")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    profile = HeadProfile.load(arguments.profile)
    versions = {"kvsurgery": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    report = {"settings": {"steps": arguments.steps}, "versions": versions, "results": {}}
    for name, recipe in recipes().items():
        report["results"][name] = measure(converted(arguments.model, profile, recipe), arguments.steps)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        console.stderr.print(f"{name}: {report['results'][name]}")
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
