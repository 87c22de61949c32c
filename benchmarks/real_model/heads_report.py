"""Show what `which_heads.py` found: tables in Markdown, and plots.

python benchmarks/real_model/heads_report.py which_heads.json --plot which_heads.png

Several files, of texts of other lengths, are drawn beside each other.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from benchmarks.real_model.paired import HEADS, Scores, outside_window, scores
from kvsurgery.display.figure import new_figure, save_figure

NAME = re.compile(r"(?P<heads>.+), (?P<share>\d+)% full, (?P<size>\d+\+\d+)")
DRAW = re.compile(r"(?<=^random) \d+|, seed \d+$")
RANDOM = "random"
ORIGINAL = "original"
FULL, RECALLED = "full KV heads, %", "facts outside the window recalled"


@dataclass(frozen=True)
class Row:
    """One choice of heads at one share and window, or the original. Draws share a row, as do seeds of one training.

    Attributes:
        heads, share: what was chosen, the per cent of full heads; None of the original.
        scores: with facts outside of this window.
        draws: recall of each draw or seed, lowest first.
    """

    heads: str
    share: int | None
    scores: Scores
    draws: tuple[float, ...] = ()


def windows(report: Mapping[str, Any]) -> list[str]:
    """What streaming heads see, the smallest window first, as sinks+recent."""
    sizes = {match["size"] for name in report["results"] if (match := NAME.fullmatch(name))}
    return sorted(sizes, key=_tokens)


def rows(report: Mapping[str, Any], size: str) -> list[Row]:
    """What results with one window come to, in their order, after the original."""
    results, prompts = report["results"], report["settings"]["prompts"]
    base, is_outside = results[ORIGINAL], outside_window(report, *_tokens(size))
    result_rows = []
    for (heads, share), draws in _draws(results, size).items():
        recalls = sorted(float(np.mean(draw["right"])) for draw in draws)
        result_rows.append(
            Row(heads, share, scores(draws, base, prompts, is_outside), tuple(recalls) if len(draws) > 1 else ())
        )
    return result_rows


def table(report: Mapping[str, Any], size: str) -> list[str]:
    """Lines of a Markdown table for one window: shares from the largest, in each the best recall first."""
    ordered = sorted(rows(report, size), key=lambda row: (-(row.share or 100), -row.scores.outside.mean))
    heads = ["full heads", "chosen by", *HEADS]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in ordered:
        share = "all" if row.share is None else f"{row.share}%"
        cells = row.scores.original_cells if row.share is None else row.scores.cells
        if row.draws:
            unit = "draws" if row.heads == RANDOM else "seeds"
            cells[0] += f" ({row.draws[0]:.0%} to {row.draws[-1]:.0%} in {len(row.draws)} {unit})"
        lines.append(f"| {' | '.join([share, row.heads, *cells])} |")
    return lines


def depth_table(report: Mapping[str, Any], size: str, share: int) -> list[str]:
    """Lines of a Markdown table for one window and share, in per cent: the facts recalled of those in each quarter of
    the texts, by choice of heads; of several draws or seeds the mean."""
    settings, results = report["settings"], report["results"]
    quarter = np.minimum(4 * np.array(report["places"]) // settings["length"], 3)
    columns = [f"{name} quarter" for name in ("first", "second", "third", "last")]
    lines = [f"| {share}% full | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for (heads, draws_share), draws in _draws(results, size).items():
        if draws_share in (None, share):
            recalled = np.mean([draw["right"] for draw in draws], axis=0)
            cells = [f"{recalled[quarter == number].sum():.3g} of {(quarter == number).sum()}" for number in range(4)]
            lines.append(f"| {' | '.join([heads, *cells])} |")
    return lines


def _draws(results: Mapping[str, Any], size: str) -> dict[tuple[str, int | None], list[Mapping[str, Any]]]:
    """Results with one window by choice and share, after the original's. A single seed keeps its number."""
    names: dict[tuple[str, int | None], list[str]] = {}
    for name in results:
        match = NAME.fullmatch(name)
        if match and match["size"] == size:
            names.setdefault((DRAW.sub("", match["heads"]), int(match["share"])), []).append(name)
    drawn: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {(ORIGINAL, None): [results[ORIGINAL]]}
    for (heads, share), draws in names.items():
        [own_heads, *others] = (name.rpartition(f", {share}% full")[0] for name in draws)
        drawn[heads if others or heads == RANDOM else own_heads, share] = [results[name] for name in draws]
    return drawn


def _tokens(size: str) -> tuple[int, int]:
    """Sinks and recent tokens."""
    sink, recent = map(int, size.split("+"))
    return sink, recent


def plot(report: Mapping[str, Any], size: str, path: Path) -> None:
    """Recall and perplexity over the share of full heads, a line for each choice, bars for 95% intervals."""
    figure = new_figure(11, 4.2)
    axes, all_rows = figure.subplots(1, 2), rows(report, size)
    colors = _colors(all_rows)
    for axis, value, label in zip(
        axes, ("outside", "ratio"), (RECALLED, "perplexity over the original's"), strict=True
    ):
        _lines(axis, all_rows, value, colors)
        axis.set(xlabel=FULL, ylabel=label)
    axes[0].set_ylim(0, 1)
    axes[0].legend(frameon=False, fontsize="small")
    save_figure(figure, path)


def plot_lengths(reports: Sequence[Mapping[str, Any]], size: str, path: Path) -> None:
    """Recall over the share of full heads, for texts of each length, of the choices that have several shares."""
    figure = new_figure(4.2 * len(reports), 4.8)
    axes = np.atleast_1d(figure.subplots(1, len(reports), sharey=True))
    rows_by_report = [_with_several_shares(rows(report, size)) for report in reports]
    colors = _colors([*chain(*rows_by_report)])
    for axis, report, report_rows in zip(axes, reports, rows_by_report, strict=True):
        _lines(axis, report_rows, "outside", colors)
        axis.set(xlabel=FULL, title=f"{report['settings']['length']:,} tokens", ylim=(0, 1))
    axes[0].set_ylabel(RECALLED)
    labelled = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(labelled.values(), labelled, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    save_figure(figure, path)


def _with_several_shares(all_rows: Sequence[Row]) -> list[Row]:
    """The original, and choices that were measured at more than one share, without a single seed."""
    shares = Counter(row.heads for row in all_rows if not DRAW.search(row.heads))
    return [row for row in all_rows if row.heads == ORIGINAL or shares[row.heads] > 1]


def _colors(all_rows: Sequence[Row]) -> dict[str, str]:
    """Of each choice, the same in every panel; random heads are gray."""
    names = dict.fromkeys(row.heads for row in all_rows if row.heads not in (ORIGINAL, RANDOM))
    return {name: f"C{number}" for number, name in enumerate(names)} | {RANDOM: "0.6"}


def _lines(axis: Axes, all_rows: Sequence[Row], value: str, colors: Mapping[str, str]) -> None:
    """The original, which comes first, and each choice over its shares."""
    [original_row, *choice_rows] = all_rows
    axis.axhline(getattr(original_row.scores, value).mean, color="0.4", linestyle=":", label="original")
    for heads in dict.fromkeys(row.heads for row in choice_rows):
        _line(axis, value, [row for row in choice_rows if row.heads == heads], colors[heads])
    axis.spines[["top", "right"]].set_visible(False)


def _line(axis: Axes, value: str, choice_rows: Sequence[Row], color: str) -> None:
    """A choice at its shares."""
    heads = choice_rows[0].heads
    choice_rows = sorted(choice_rows, key=lambda row: row.share or 0)
    values = [getattr(row.scores, value) for row in choice_rows]
    bars = np.array([[interval.mean - interval.low, interval.high - interval.mean] for interval in values]).T
    axis.errorbar(
        [row.share or 0 for row in choice_rows],
        [interval.mean for interval in values],
        yerr=bars,
        marker="o",
        markersize=4,
        capsize=2,
        label=heads,
        color=color,
        linestyle="--" if heads == RANDOM else "-",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="JSON")
    parser.add_argument("--plot", type=Path, help="draw each window as a PNG, named after it")
    arguments = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in arguments.results]
    for report in reports:
        for size in windows(report):
            shares = sorted({row.share for row in rows(report, size) if row.share}, reverse=True)
            print(f"{report['settings']['length']:,} tokens, window of the other heads: {size}")
            for lines in (table(report, size), *(depth_table(report, size, share) for share in shares)):
                print("\n".join(["", *lines]))
    if arguments.plot:
        for size in windows(reports[0]):
            path = arguments.plot.with_name(f"{arguments.plot.stem}-{size}{arguments.plot.suffix}")
            if len(reports) == 1:
                plot(reports[0], size, path)
            else:
                plot_lengths(reports, size, path)


if __name__ == "__main__":
    main()
