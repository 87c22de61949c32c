"""Show what `which_cache.py` found: a table in Markdown, and the figure of the README.

python benchmarks/real_model/cache_report.py which_cache.json --figure docs/figures/cache
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsurgery.evaluate.results import Interval
from kvsurgery.evaluate.statistics import interval, resampled_means
from kvsurgery.report.colours import DARK, LIGHT

ORIGINAL = "original"
OURS = "kvsurgery"
# colours and marks of our series, and of the others', in turn
INKS = {True: ("converted", "series-2", "series-3", "muted", "ink"), False: ("series-1", "series-4", "bad", "muted")}
MARKS = {True: "oDs^PX", False: "x+1234v"}


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


def draw(found: Mapping[str, Any], colours: Mapping[str, str], path: Path) -> None:
    """Write divergence and recall against the bytes held as an SVG, in one set of colours; solid lines are ours."""
    every = [row for row in rows(found) if row.name != ORIGINAL]
    [original] = (row for row in rows(found) if row.name == ORIGINAL)
    figure = Figure(figsize=(9, 5), layout="constrained", facecolor=colours["paper"])
    panels = figure.subplots(1, 2)
    for axes, title in zip(panels, ("divergence of the next token, nats", "facts recalled"), strict=True):
        axes.set_facecolor(colours["paper"])
        axes.tick_params(colors=colours["muted"], which="both", length=0)
        axes.spines[:].set_color(colours["line"])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=colours["line"], linewidth=0.6)
        axes.set_title(title, color=colours["ink"], fontsize=10, loc="left")
        axes.set_xlabel("bytes of the KV cache, of the original's", color=colours["muted"])
        axes.xaxis.set_major_formatter("{x:.0%}")
    panels[0].set_yscale("log")
    panels[1].yaxis.set_major_formatter("{x:.0%}")
    panels[1].axhline(original.recall.mean, color=colours["original"], linestyle=":", label=ORIGINAL)
    looks = {ours: zip(cycle(names), cycle(MARKS[ours]), strict=False) for ours, names in INKS.items()}
    for series in dict.fromkeys(result["series"] for result in found["results"].values()):
        own = sorted((row for row in every if row.series == series), key=lambda row: row.share)
        if own:
            ink, mark = next(looks[series.startswith(OURS)])
            _line(panels, own, colours[ink], mark)
    legend = figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    legend.get_frame().set(facecolor=colours["paper"], edgecolor="none")
    for text in legend.get_texts():
        text.set_color(colours["ink"])
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})


def _line(panels: Sequence[Axes], own: Sequence[Row], colour: str, mark: str) -> None:
    """A series in both panels."""
    style, width = ("-", 1.8) if own[0].series.startswith(OURS) else ("--", 1.2)
    shares = [row.share for row in own]
    for axes, values in zip(panels, ([row.kl for row in own], [row.recall.mean for row in own]), strict=True):
        axes.plot(
            shares,
            values,
            color=colour,
            marker=mark,
            markersize=5,
            linestyle=style,
            linewidth=width,
            label=own[0].series,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, metavar="JSON")
    parser.add_argument("--figure", metavar="PREFIX", help="draw them as PREFIX-light.svg and PREFIX-dark.svg")
    arguments = parser.parse_args()
    found = json.loads(arguments.results.read_text())
    print("\n".join(table(found)))
    if arguments.figure:
        for name, colours in (("light", LIGHT), ("dark", DARK)):
            draw(found, colours, Path(f"{arguments.figure}-{name}.svg"))


if __name__ == "__main__":
    main()
