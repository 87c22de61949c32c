"""What rounding keys by the queries gains in a quantized cache: divergence of the next token at each width.

    python benchmarks/query_rounding.py MODEL calibration.txt book.txt --json rounding.json

The covariances of the queries come from passages of the calibration text, read by the stock model. The cache takes
1,024 tokens of the book, and one forward reads the 192 tokens that follow. The divergence is the mean Kullback-Leibler
divergence, in nats, of the distribution of the next token from that with an unquantized cache. Keys have a scale for
each channel (`kivi`), with and without rotation and clipping. An interrupted run continues from its JSON file.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.cache_quality import windows
from benchmarks.provenance import record_versions
from kvsurgery.display import console
from kvsurgery.measure.cache_trial import CacheTrial
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.query_rounding import measured_factors, roundings
from kvsurgery.templates.kv_layout import ROUNDINGS, Quantization

WIDTHS = 4, 3, "k3v2", 2
PROMPT, NEW = 1024, 192
STEPS = {
    ("values", False): "values rotated",
    ("values", True): "+ ranges clipped",
    ("both", False): "keys and values rotated",
    ("both", True): "+ ranges clipped",
}


def settings() -> dict[str, Quantization]:
    """The caches that are compared, by name."""
    return {
        f"{bits} {rotate} {'clipped' if clip else 'whole'} {rounding}": Quantization(
            bits, rotate=rotate, clip=clip, rounding=rounding
        )
        for bits, (rotate, clip), rounding in itertools.product(WIDTHS, STEPS, ROUNDINGS)
    }


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table: divergence with keys rounded to the nearest code, and by the queries."""
    lines = [f"| cache | {' | '.join(f'{bits} bits' if bits != 'k3v2' else bits for bits in WIDTHS)} |"]
    lines.append("|---" * (1 + len(WIDTHS)) + "|")
    measured = report["windows"].values()
    for (rotate, clip), words in STEPS.items():
        cells = []
        for bits in WIDTHS:
            name = f"{bits} {rotate} {'clipped' if clip else 'whole'}"
            cells.append(
                " / ".join(
                    f"{fmean(window[f'{name} {rounding}'] for window in measured):.4f}" for rounding in ROUNDINGS
                )
            )
        lines.append(f"| {' | '.join([words, *cells])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("calibration", type=Path, metavar="TEXT", help="UTF-8 text that queries are measured on")
    parser.add_argument("text", type=Path, metavar="TEXT", help="UTF-8 text that is read")
    parser.add_argument("--passages", type=int, default=4, help="of the calibration text")
    parser.add_argument("--windows", type=int, default=4, help="of the text that is read")
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report: dict[str, Any] = {"windows": {}}
    if arguments.json.exists():
        report = json.loads(arguments.json.read_text())
    report |= {"model": arguments.model.name, "calibration": arguments.calibration.name, "text": arguments.text.name}
    report |= {"prompt": PROMPT, "new": NEW, "passages": arguments.passages}
    measured = MeasuredModel.load(str(arguments.model), dtype="float32", device="cpu")
    model, layers = measured.model, measured.full_layers()
    passages = windows(arguments.calibration, measured.tokenizer, PROMPT + 1, arguments.passages).values()
    read = [CacheTrial(model, measured.layers, passage, PROMPT, []).covariance(layers) for passage in passages]
    factors = measured_factors(torch.stack(read).sum(0), layers, measured.dimensions)
    caches = settings()
    changes = torch.zeros(len(caches), measured.dimensions.layers, measured.dimensions.kv_heads, dtype=torch.int64)
    changes[:, layers] = torch.arange(1, len(caches) + 1)[:, None, None]
    for start, tokens in windows(arguments.text, measured.tokenizer, PROMPT + NEW, arguments.windows).items():
        if str(start) in report["windows"]:
            continue
        trial = CacheTrial(model, measured.layers, tokens, PROMPT, [*caches.values()])
        trial.rounding = roundings(factors, layers, model.device)
        losses = trial.divergence(changes)
        report["windows"][str(start)] = dict(zip(caches, losses.tolist(), strict=True))
        record_versions(report, str(start))
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        console.stderr.print(f"{len(report['windows'])} of {arguments.windows} windows")
    console.stdout.print("\n".join(table(report)))


if __name__ == "__main__":
    main()
