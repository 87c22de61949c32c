"""What `run.py` found, for people: a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import colormaps

from benchmarks.peers.contenders import CONTENDERS, STOCK, Contender
from kvsurgery.display import console
from kvsurgery.display.figure import new_figure, save_figure

PANELS = {
    "recall_asked": "answers right, the question in the prompt",
    "recall_later": "answers right, the question after the prompt",
    "perplexity": "perplexity",
}

Row = Mapping[str, Any]


def measured_rows(report: Mapping[str, Any]) -> list[tuple[Contender, Row]]:
    """Contenders in their order, with what was measured of them."""
    rows = report["contenders"]
    return [(contender, rows[contender.name]) for contender in CONTENDERS if contender.name in rows]


def label(contender: Contender, row: Row) -> str:
    """A contender's name; a press is called by the share of the cache that it is told to keep."""
    if contender.equals:
        return f"{contender.series}, {row['said']:.0%}"
    return f"QuantizedCache, {contender.name}" if contender.kind == "quantized" else contender.name


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table; prefill and decode are times as shares of stock's."""
    stock_row = report["contenders"].get(STOCK.name, {})

    def cell(row: Row, name: str, form: str) -> str:
        return format(row[name], form) if name in row else "-"

    def times(row: Row, name: str) -> str:
        return f"{row[name] / stock_row[name]:.2f}" if name in row and name in stock_row else "-"

    def size(row: Row, name: str) -> str:
        return console.size(row[name]) if name in row else "-"

    following_tokens, long_tokens = (f"{report[name]:,} tokens" for name in ("following_tokens", "long_tokens"))
    heads = ["", "KV cache", f"{following_tokens} later", "recall at the end", "recall later"]
    heads += [f"after {long_tokens}: at the end", "later", "perplexity", "prefill", "decode"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for contender, row in measured_rows(report):
        cells = [label(contender, row), size(row, "kv_bytes"), size(row, "kv_bytes_at_end")]
        cells += [cell(row, f"{part}recall_{when}", ".0%") for part in ("", "long_") for when in ("asked", "later")]
        cells += [cell(row, "perplexity", ".2f"), *(times(row, name) for name in ("prefill_ms", "decode_ms"))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def show(report: Mapping[str, Any]) -> None:
    """Print the table, and what was refused or left out."""
    print("\n".join(table(report)))
    for contender, row in measured_rows(report):
        for part, reason in row["refused"].items():
            print(f"{contender.name} refused {part}: {reason}")
    for name, reason in report["left_out"].items():
        print(f"left out: {name} ({reason})")


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Recall and perplexity against the bytes that are really held, a line for each series.

    Raises:
        OutputError: the file cannot be written, or its ending is not a picture format.
    """
    rows = measured_rows(report)
    series = list(dict.fromkeys(contender.series for contender, _ in rows if contender != STOCK))
    converted = {contender.series for contender, _ in rows if contender.kind == "converted"}
    palette = [*map(colormaps["tab10"], range(10)), *map(colormaps["Dark2"], range(8))]
    colors = dict(zip(series, palette, strict=False))
    figure = new_figure(14, 4.5)
    grid = figure.subplots(1, len(PANELS))
    for axes, (name, title) in zip(grid, PANELS.items(), strict=True):
        for series_name in series:
            points = [
                (row["kv_bytes"] / 2**10, row[name])
                for contender, row in rows
                if contender.series == series_name and {name, "kv_bytes"} <= row.keys()
            ]
            style = (
                {"linewidth": 2.2, "marker": "o"} if series_name in converted else {"linestyle": "--", "marker": "x"}
            )
            axes.plot(*zip(*sorted(points), strict=True), label=series_name, color=colors[series_name], **style)
        if name in report["contenders"].get(STOCK.name, {}):
            axes.axhline(report["contenders"][STOCK.name][name], color="0.6", linestyle=":", label="stock")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("KiB that the cache of a prompt holds")
        axes.grid(alpha=0.3)
    for axes in grid[:2]:
        axes.set_ylim(-0.03, 1.03)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False)
    save_figure(figure, path)
