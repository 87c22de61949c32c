"""Show what `which_cache.py` found: a table in Markdown, and the figure of the README.

python benchmarks/real_model/cache_report.py which_cache.json --figure docs/figures/cache
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import figures
from benchmarks.real_model.paired import HEADS, Scores, outside_window, scores
from kvsurgery.recipe import Streaming

ORIGINAL = "original"


@dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
        share: bytes of its cache over the original's.
        scores: with facts outside of the window that streaming heads keep by default.
    """

    name: str
    series: str
    share: float
    scores: Scores


def rows(report: Mapping[str, Any], right: str = "right") -> list[Row]:
    """What a file of results comes to, the largest caches first; `right_at_end` has other answers than `right`."""
    results, texts, sizes = report["results"], report["settings"]["prompts"], Streaming()
    base, is_outside = results[ORIGINAL], outside_window(report, sizes.sink, sizes.recent)
    result_rows = [
        Row(
            name,
            result["series"],
            sum(result["kv_bytes"]) / sum(base["kv_bytes"]),
            scores([{**result, "right": result[right]}], {**base, "right": base[right]}, texts, is_outside),
        )
        for name, result in results.items()
    ]
    return sorted(result_rows, key=lambda row: -row.share)


def asked_table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table: facts recalled that are asked for later, and at the end of the text."""
    heads = ["cache", "bytes", "asked later", HEADS[1], "asked at the end", HEADS[1]]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for later, at_end in zip(rows(report), rows(report, "right_at_end"), strict=True):
        both = [row.scores.original_cells if row.name == ORIGINAL else row.scores.cells for row in (later, at_end)]
        recall = [cell for cells in both for cell in cells[:2]]
        lines.append(f"| {later.name} | {later.share:.0%} | {' | '.join(recall)} |")
    return lines


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table."""
    heads = ["cache", "bytes", *HEADS]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows(report):
        cells = row.scores.original_cells if row.name == ORIGINAL else row.scores.cells
        lines.append(f"| {row.name} | {row.share:.0%} | {' | '.join(cells)} |")
    return lines


def draw(report: Mapping[str, Any], colors: figures.Colors) -> Figure:
    """Divergence and recall against the bytes held."""
    all_rows = rows(report)
    contender_rows = [row for row in all_rows if row.name != ORIGINAL]
    [original_row] = (row for row in all_rows if row.name == ORIGINAL)
    titles = "divergence of the next token, nats", "facts recalled"
    figure, (of_loss, of_recall) = figures.panels(colors, titles, (9, 5.4))
    of_loss.set_yscale("log")
    of_recall.yaxis.set_major_formatter("{x:.0%}")
    of_recall.axhline(original_row.scores.recall.mean, color=colors["original"], linestyle=":", label=ORIGINAL)
    names = dict.fromkeys(row["series"] for row in report["results"].values())
    series_names = [name for name in names if any(row.series == name for row in contender_rows)]
    for name, look in figures.looks(series_names, colors):
        series_rows = sorted((row for row in contender_rows if row.series == name), key=lambda row: row.share)
        shares = [row.share for row in series_rows]
        of_loss.plot(shares, [row.scores.kl.mean for row in series_rows], label=name, **look)
        of_recall.plot(shares, [row.scores.recall.mean for row in series_rows], label=name, **look)
    figures.legend(figure, of_recall, colors)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, metavar="JSON")
    parser.add_argument("--figure", metavar="PREFIX", help="draw them as PREFIX-light.svg and PREFIX-dark.svg")
    arguments = parser.parse_args()
    report = json.loads(arguments.results.read_text())
    print("\n".join((asked_table if report["settings"].get("at_end") else table)(report)))
    if arguments.figure:
        figures.save(partial(draw, report), arguments.figure)


if __name__ == "__main__":
    main()
