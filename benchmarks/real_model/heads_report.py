"""Show what `which_heads.py` found: a table in Markdown, and a plot.

python benchmarks/real_model/heads_report.py which_heads.json --plot which_heads.png
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from kvsurgery.evaluate.results import Interval
from kvsurgery.evaluate.statistics import interval, resampled_means
from kvsurgery.figure import new_figure, save_figure

NAME = re.compile(r"(?P<heads>.+), (?P<share>\d+)% full, (?P<size>\d+\+\d+)")
DRAW = re.compile(r"random \d+")
RANDOM = "random"
ORIGINAL = "original"


@dataclass(frozen=True)
class Row:
    """One choice of heads at one share, or the original; random draws are one row.

    Attributes:
        heads, share, size: what was chosen, the per cent of full heads, sinks and recent tokens; None of the original.
        recall: share of facts, with the 95% interval of a bootstrap over prompts.
        ratio: perplexity over the original's, paired by window, with its interval.
        kl: divergence from the original, in nats.
        draws: recall of each draw, lowest first.
    """

    heads: str
    share: int | None
    size: str | None
    recall: Interval
    ratio: Interval
    kl: float
    draws: tuple[float, ...] = ()


def rows(found: Mapping[str, Any]) -> list[Row]:
    """What a file of results comes to, in its order: the original, then by size and share."""
    results, prompts = found["results"], found["settings"]["prompts"]
    base = np.array(results[ORIGINAL]["nats"])
    grouped: dict[tuple[str, int | None, str | None], list[Mapping[str, Any]]] = {}
    for name, result in results.items():
        if name == ORIGINAL:
            grouped[ORIGINAL, None, None] = [result]
            continue
        match = NAME.fullmatch(name)
        assert match is not None, name  # which_heads.py writes them so
        heads = RANDOM if DRAW.fullmatch(match["heads"]) else match["heads"]
        grouped.setdefault((heads, int(match["share"]), match["size"]), []).append(result)
    made = []
    for (heads, share, size), alike in grouped.items():
        right = np.array([np.reshape(each["right"], (prompts, -1)).mean(1) for each in alike])
        harm = np.array([np.array(each["nats"]) - base for each in alike]).mean(0)
        recall, more = right.mean(0)[None], harm[None]
        made.append(
            Row(
                heads,
                share,
                size,
                interval(recall.mean(), resampled_means(recall, 0)[0]),
                interval(math.exp(more.mean()), np.exp(resampled_means(more, 0)[0])),
                float(np.mean([each["kl"] for each in alike])),
                tuple(sorted(right.mean(1).tolist())) if len(alike) > 1 else (),
            )
        )
    return made


def table(found: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table: shares from the largest, in each the best recall first; and by window, if several."""
    every = rows(found)
    ordered = sorted(every, key=lambda row: (_window(row), -(row.share or 100), -row.recall.mean))
    heads = ["full heads", "chosen by", "facts recalled", "perplexity", "KL"]
    several = len({row.size for row in every if row.size}) > 1
    if several:
        heads.insert(2, "window of the others")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in ordered:
        share = "all" if row.share is None else f"{row.share}%"
        draws = f" ({row.draws[0]:.0%} to {row.draws[-1]:.0%} in {len(row.draws)} draws)" if row.draws else ""
        cells = [share, row.heads, *([(row.size or "").replace("+", " + ")] if several else [])]
        cells.append(f"{row.recall.mean:.0%} [{row.recall.low:.0%}, {row.recall.high:.0%}]{draws}")
        if row.share is None:
            cells += ["× 1", "0"]
        else:
            cells += [f"× {row.ratio.mean:.3f} [{row.ratio.low:.3f}, {row.ratio.high:.3f}]", f"{row.kl:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _window(row: Row) -> tuple[int, ...]:
    """Sinks and recent tokens of its streaming heads, none of the original."""
    return tuple(map(int, row.size.split("+"))) if row.size else ()


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Recall and perplexity over the share of full heads, a line for each choice, bars for 95% intervals."""
    every = rows(found)
    figure = new_figure(11, 4.2)
    axes = figure.subplots(1, 2)
    [original] = (row for row in every if row.share is None)
    for axis, value, label in zip(
        axes, ("recall", "ratio"), ("facts recalled", "perplexity over the original's"), strict=True
    ):
        axis.axhline(getattr(original, value).mean, color="0.4", linestyle=":", label="original")
        for heads in dict.fromkeys(row.heads for row in every if row.share is not None):
            _line(axis, heads, value, [row for row in every if row.heads == heads])
        axis.set(xlabel="full KV heads, %", ylabel=label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(0, 1)
    axes[0].legend(frameon=False, fontsize="small")
    save_figure(figure, path)


def _line(axis: Axes, heads: str, value: str, own: Sequence[Row]) -> None:
    """A choice at its shares."""
    own = sorted(own, key=lambda row: row.share or 0)
    values = [getattr(row, value) for row in own]
    bars = np.array([[each.mean - each.low, each.high - each.mean] for each in values]).T
    axis.errorbar(
        [row.share or 0 for row in own],
        [each.mean for each in values],
        yerr=bars,
        marker="o",
        markersize=4,
        capsize=2,
        label=heads,
        color="0.6" if heads == RANDOM else None,
        linestyle="--" if heads == RANDOM else "-",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, metavar="JSON")
    parser.add_argument("--plot", type=Path, help="draw them as a PNG")
    arguments = parser.parse_args()
    found = json.loads(arguments.results.read_text())
    print("\n".join(table(found)))
    if arguments.plot:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
