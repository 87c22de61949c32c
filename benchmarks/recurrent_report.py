"""What `recurrent.py` found, for people: tables, a picture, and whether what has to hold does."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import colormaps

from kvsurgery.display import console
from kvsurgery.display.figure import new_figure, save_figure

OURS, ABOVE, WORST = "REFORM", "REFORM, best above layer 0", "REFORM, worst heads"
RANDOM = "REFORM, random heads"  # and a number
H2O = ("H2O", "H2O, encode budget")
RECALLED = (2048, 4096, 8192, 65536)  # lengths at which something is claimed of recall,
LINEAR = (16384, 32768, 65536)  # and of time

Row = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """What has to hold, and what was found."""

    what: str
    found: str
    holds: bool


def claimed(name: str) -> bool:
    """Whether something is claimed of what a method recalls."""
    return name in (OURS, WORST, *H2O) or name.startswith(RANDOM)


def verdicts(results: list[Row], held_bytes: Mapping[str, tuple[int, int]]) -> list[Claim]:
    """Every claim, as far as these lengths tell.

    Args:
        held_bytes: by method, bytes that reading the longest prompt has left, counted and by the formula.
    """
    lengths = sorted({row["tokens"] for row in results})
    claims = [claim for length in lengths if length in RECALLED for claim in _recall(_at(results, length), length)]
    counted_bytes, predicted_bytes = max(held_bytes.values(), key=lambda sizes: sizes[0] / sizes[1])
    finding = f"at most {console.size(counted_bytes)} of {console.size(predicted_bytes)}"
    claims.append(
        Claim(
            f"reading {lengths[-1]:,} tokens leaves what encode_bytes says", finding, counted_bytes <= predicted_bytes
        )
    )
    for name in (OURS, ABOVE):
        seconds = [_at(results, length)[name]["first_s"] / length for length in lengths if length in LINEAR]
        if len(seconds) > 1:
            spread = max(seconds) / min(seconds) - 1
            finding = f"{', '.join(f'{1e6 * each:.1f}' for each in seconds)} µs a token: {spread:.1%}"
            claims.append(Claim(f"time is linear within 15%: {name}", finding, spread <= 0.15))
        for baseline in H2O:
            ratios = [
                _total_seconds(rows[name]) / _total_seconds(rows[baseline])
                for rows in (_at(results, each) for each in lengths)
            ]
            finding = f"{', '.join(f'{ratio:.2f}' for ratio in ratios)} of its time"
            claims.append(Claim(f"no slower than {baseline}: {name}", finding, max(ratios) <= 1))
    return claims


def _recall(rows: Mapping[str, Row], length: int) -> list[Claim]:
    """Whole answers count for REFORM, and every right word for what it is compared with."""
    ours, h2o, worst_recall = rows[OURS]["exact"], rows[H2O[0]]["words"], rows[WORST]["words"]
    random = statistics.fmean(row["words"] for name, row in rows.items() if name.startswith(RANDOM))
    return [
        Claim(f"REFORM recalls 95% at {length:,}", f"{ours:.0%}", ours >= 0.95),
        Claim(f"H2O recalls less than 30% at {length:,}", f"{h2o:.0%}", h2o < 0.3),
        Claim(f"worst heads recall 20 points less at {length:,}", f"{worst_recall:.0%}", worst_recall <= ours - 0.2),
        Claim(f"random heads recall 20 points less at {length:,}", f"{random:.0%} on average", random <= ours - 0.2),
    ]


def _at(results: list[Row], length: int) -> dict[str, Row]:
    return {row["method"]: row for row in results if row["tokens"] == length}


def _total_seconds(row: Row) -> float:
    """Seconds of prompt and answer."""
    return row["first_s"] + (row["new_tokens"] - 1) * row["token_s"]


def show(results: list[Row], claims: list[Claim]) -> None:
    """Print tables."""
    console.stdout.width = max(console.stdout.width, 110)
    longest = max(row["tokens"] for row in results)

    def ending(name: str, form: Callable[[Any], str]) -> Callable[[Mapping[int, Row]], str]:
        return lambda row: form(row[longest][name]) if longest in row else "-"

    print("\n".join(recall_table(results)))
    seconds = {
        "ms a token": ending("token_s", lambda seconds: f"{1e3 * seconds:.2f}"),
        "last pass": lambda row: (
            f"{row[longest]['forward_s'] / row[longest]['first_s']:.1%}" if longest in row else "-"
        ),
    }
    _print(results, "CPU seconds to the first token", lambda row: f"{row['first_s']:.3f}", seconds)
    process = {"process": ending("process_bytes", console.size)}
    _print(results, "The most that tensors hold", lambda row: console.size(row["peak_bytes"]), process)
    rows = [(claim.what, claim.found, "yes" if claim.holds else "NO") for claim in claims]
    console.stdout.print(console.table("What has to hold", ["", "found", "holds"], rows))


def recall_table(results: list[Row]) -> list[str]:
    """Lines of a Markdown table: the share of exact answers by length, or their number where fewer prompts are read."""
    lengths = sorted({row["tokens"] for row in results})
    most_samples = max(row["samples"] for row in results)
    heads = ["method", *(f"{length:,} tokens" for length in lengths)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in dict.fromkeys(row["method"] for row in results):
        rows = {row["tokens"]: row for row in results if row["method"] == name}
        cells = dict.fromkeys(lengths, "-")
        for length, row in rows.items():
            fewer = f"{row['exact'] * row['samples']:.0f} of {row['samples']}"
            cells[length] = fewer if row["samples"] < most_samples else f"{row['exact']:.0%}"
        lines.append(f"| {' | '.join([name, *cells.values()])} |")
    return lines


def _print(
    results: list[Row],
    title: str,
    cell: Callable[[Row], str],
    extra_columns: Mapping[str, Callable[[Mapping[int, Row]], str]],
) -> None:
    """A table of methods by length, with `extra_columns` that are made of a method's rows."""
    lengths = sorted({row["tokens"] for row in results})
    table = []
    for name in dict.fromkeys(row["method"] for row in results):
        rows = {row["tokens"]: row for row in results if row["method"] == name}
        cells = [cell(rows[length]) if length in rows else "-" for length in lengths]
        table.append((name, *cells, *(column(rows) for column in extra_columns.values())))
    columns = ["method", *(f"{length / 1024:g}k" for length in lengths), *extra_columns]
    console.stdout.print(console.table(title, columns, table))


def plot(results: list[Row], path: Path) -> None:
    """Recall, time and memory against length, a line for each method.

    Raises:
        OutputError: the file cannot be written, or its ending is not a picture format.
    """
    figure = new_figure(14, 4.5)
    panels = {
        "answers that are right": lambda row: row["exact"],
        "CPU seconds to the first token": lambda row: row["first_s"],
        "MiB that tensors hold at most": lambda row: row["peak_bytes"] / 2**20,
    }
    names = list(dict.fromkeys(row["method"] for row in results))
    colors = map(colormaps["tab20"], range(20))
    styles: dict[str, dict[str, Any]] = {}
    for name in names:
        if name.startswith(RANDOM):
            styles[name] = {"color": "0.75", "linestyle": ":", "marker": "."}
        else:
            styles[name] = {"color": next(colors), "marker": "o", "markersize": 3}
    styles[OURS] |= {"color": "black", "linewidth": 2.5, "zorder": 3}
    grid = figure.subplots(1, len(panels))
    for axes, (title, value) in zip(grid, panels.items(), strict=True):
        for name in names:
            # random heads once in the legend
            label = name if not name.startswith(RANDOM) else RANDOM if name == f"{RANDOM} 1" else None
            rows = [row for row in results if row["method"] == name]
            axes.plot([row["tokens"] for row in rows], [value(row) for row in rows], label=label, **styles[name])
        lengths = sorted({row["tokens"] for row in results})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length / 1024:g}k" for length in lengths])
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("tokens of the prompt")
        axes.grid(alpha=0.3)
    for axes in grid[1:]:
        axes.set_yscale("log")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False)
    save_figure(figure, path)
