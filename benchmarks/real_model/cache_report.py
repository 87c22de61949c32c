"""Show what `which_cache.py` found: a table in Markdown, and the figure of the README.

python benchmarks/real_model/cache_report.py which_cache.json --figure docs/figures/cache
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import figures

from kvsurgery.evaluate.results import Interval
from kvsurgery.evaluate.statistics import interval, resampled_means

ORIGINAL = "original"


@dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
        share: bytes of its cache over the original's.
        recall: share of facts, with the 95% interval of a bootstrap over texts.
        ratio: perplexity over the original's, paired by text, with its interval.
        kl: divergence from the original, in nats.
    """

    name: str
    series: str
    share: float
    recall: Interval
    ratio: Interval
    kl: float


def rows(found: Mapping[str, Any]) -> list[Row]:
    """What a file of results comes to, the largest caches first."""
    results, texts = found["results"], found["settings"]["prompts"]
    base = results[ORIGINAL]
    made = []
    for name, result in results.items():
        recall = np.reshape(result["right"], (1, texts, -1)).mean(2)
        more = np.array([result["nats"]]) - np.array([base["nats"]])
        made.append(
            Row(
                name,
                result["series"],
                sum(result["kv_bytes"]) / sum(base["kv_bytes"]),
                interval(recall.mean(), resampled_means(recall, 0)[0]),
                interval(math.exp(more.mean()), np.exp(resampled_means(more, 0)[0])),
                float(np.mean(result["kl"])),
            )
        )
    return sorted(made, key=lambda row: -row.share)


def table(found: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| cache | bytes | facts recalled | perplexity | KL |", "|---|---|---|---|---|"]
    for row in rows(found):
        recall = f"{row.recall.mean:.0%} [{row.recall.low:.0%}, {row.recall.high:.0%}]"
        ratio = f"× {row.ratio.mean:.3f} [{row.ratio.low:.3f}, {row.ratio.high:.3f}]"
        loss = ("× 1", "0") if row.name == ORIGINAL else (ratio, f"{row.kl:.4f}")
        lines.append(f"| {row.name} | {row.share:.0%} | {recall} | {loss[0]} | {loss[1]} |")
    return lines


def draw(found: Mapping[str, Any], colours: figures.Colours) -> Figure:
    """Divergence and recall against the bytes held."""
    every = [row for row in rows(found) if row.name != ORIGINAL]
    [original] = (row for row in rows(found) if row.name == ORIGINAL)
    titles = "divergence of the next token, nats", "facts recalled"
    figure, (of_loss, of_recall) = figures.panels(colours, titles, (9, 5))
    of_loss.set_yscale("log")
    of_recall.yaxis.set_major_formatter("{x:.0%}")
    of_recall.axhline(original.recall.mean, color=colours["original"], linestyle=":", label=ORIGINAL)
    names = dict.fromkeys(row["series"] for row in found["results"].values())
    drawn = [name for name in names if any(row.series == name for row in every)]
    for name, look in figures.looks(drawn, colours):
        own = sorted((row for row in every if row.series == name), key=lambda row: row.share)
        shares = [row.share for row in own]
        of_loss.plot(shares, [row.kl for row in own], label=name, **look)
        of_recall.plot(shares, [row.recall.mean for row in own], label=name, **look)
    figures.legend(figure, of_recall, colours)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, metavar="JSON")
    parser.add_argument("--figure", metavar="PREFIX", help="draw them as PREFIX-light.svg and PREFIX-dark.svg")
    arguments = parser.parse_args()
    found = json.loads(arguments.results.read_text())
    print("\n".join(table(found)))
    if arguments.figure:
        figures.save(partial(draw, found), arguments.figure)


if __name__ == "__main__":
    main()
