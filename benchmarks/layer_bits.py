"""What a width for each layer (`--kv-bits auto`) loses on a language model, beside one width of as many bytes.

    python benchmarks/layer_bits.py MODEL losses.safetensors book.txt --json layer-bits.json

The losses are those of `kvsurgery profile compute --method kv-bits`, measured on another text. Every head is full. The
cache holds 1,024 tokens of a passage, and one forward reads the 64 that follow. The divergence is the mean
Kullback-Leibler divergence, in nats, of the distribution of the next token from that with an unquantized cache. Between
whole numbers of bits, layers with two widths in turn take the place of one width. An interrupted run continues from its
JSON file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from benchmarks.provenance import record_versions
from kvsurgery.emit.cache_description import describe_widths
from kvsurgery.heads.dimensions import ModelLayers
from kvsurgery.measure.cache_losses import TrialSizes
from kvsurgery.measure.cache_trial import CacheTrial
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.query_rounding import roundings
from kvsurgery.policy.evidence import Evidence
from kvsurgery.policy.policy import Policy
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.tokens import first_tokens

BUDGETS = {4.0: (4, 4), 3.5: (4, 3), 3.0: (3, 3), 2.5: (3, 2)}  # and the widths of layers in turn of as many bytes


def auto_bits(losses: CacheLosses, path: str, budget: float) -> list[int | str]:
    """The bits of each layer that `convert --kv-bits auto` chooses with every head full."""
    scores = np.ones((losses.model.layers, losses.model.kv_heads), np.float32)
    profile = HeadProfile(scores, "ablation", "kv", losses.base_model, losses.model)
    recipe = Recipe.of(sparsity=0.0, kv_bits="auto", kv_budget=budget, kv_measured=path)
    assert losses.windows is not None  # as the command measures them
    layers = Policy.of(recipe, Evidence(profile, losses=losses), ModelLayers(losses.model, losses.windows)).layers
    return [layer.quantization.bits for layer in layers if layer.quantization]


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown: the mean over passages of each cache, and in how many of them `auto` loses less."""
    lines = [
        f"| bits a value | one width | `auto` | lower in, of {len(report['losses'])} passages | layers of `auto` |",
        "|---|---|---|---|---|",
    ]
    for budget in BUDGETS:
        one_width, auto = (
            [passage[name] for passage in report["losses"].values()] for name in (f"{budget} bits", f"auto {budget}")
        )
        lower = sum(ours < baseline for ours, baseline in zip(auto, one_width, strict=True))
        layers = describe_widths(report["bits"][f"auto {budget}"])
        lines.append(f"| {budget} | {fmean(one_width):.5f} | {fmean(auto):.5f} | {lower} | {layers} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("losses", metavar="LOSSES", help="file of measured cache losses of this model")
    parser.add_argument("text", metavar="TEXT", help="UTF-8 text that the losses were not measured on")
    parser.add_argument("--passages", type=int, default=16)
    parser.add_argument("--json", type=Path, required=True, help="figures of every passage; known ones are kept")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    losses, sizes = CacheLosses.load(arguments.losses), TrialSizes(passages=arguments.passages, scored=64)
    measured = MeasuredModel.load(arguments.model, dtype="float32")
    caches = [losses.best(bits).quantization(bits) for bits in losses.settings]
    index_by_bits = {quantization.bits: number for number, quantization in enumerate(caches, 1)}
    bits = {}
    for budget, widths in BUDGETS.items():
        bits[f"auto {budget}"] = auto_bits(losses, arguments.losses, budget)
        bits[f"{budget} bits"] = np.resize(widths, losses.model.layers).tolist()
    report: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {"losses": {}}
    report |= {"bits": bits, "measured_on": losses.text, "read": Path(arguments.text).name, **vars(sizes)}
    rows = [
        torch.tensor([[index_by_bits[width]] * losses.model.kv_heads for width in layer_widths])
        for layer_widths in bits.values()
    ]
    text = Haystack.read(arguments.text, measured.text, sizes.passages * sizes.length)
    for number, passage in enumerate(sizes.of(text.tokens, first_tokens(measured.text))):
        if str(number) not in report["losses"]:
            trial = CacheTrial(measured.model, measured.layers, passage[None], sizes.context, caches)
            trial.rounding = roundings(losses.rounding, measured.full_layers(), measured.model.device)
            divergences = trial.divergence(torch.stack(rows)).tolist()
            report["losses"][str(number)] = dict(zip(bits, divergences, strict=True))
            record_versions(report, f"passage {number}")
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
