"""Draw what `quantized_cache.py` found: the divergence of each cache over its bytes, a panel for each file.

python benchmarks/quantized_report.py --panel "SmolLM2" a.json --panel "another" b.json --figure docs/figures/quantized
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from benchmarks import figures
from benchmarks.caches import ORIGINAL


def series(name: str) -> str:
    """What a cache of any width is called."""
    return re.sub(r",? \d bits", "", name)


def points(report: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Share of the original's bytes and divergence in nats of the caches of each series, the smallest first."""
    results = report["results"]
    original_bytes = results[ORIGINAL][0]["kv_bytes"]
    series_points: dict[str, list[tuple[float, float]]] = {}
    for name, parts in results.items():
        if (loss := fmean(part["kl"] for part in parts)) > 1e-7:  # not the original and what equals it
            series_points.setdefault(series(name), []).append((parts[0]["kv_bytes"] / original_bytes, loss))
    return {name: sorted(values) for name, values in series_points.items()}


def draw(panels: Mapping[str, Mapping[str, Any]], colors: figures.Colors) -> Figure:
    """A panel for each title and its results."""
    figure, row = figures.panels(colors, [*panels], (4 * len(panels), 5))
    names = dict.fromkeys(name for report in panels.values() for name in points(report))
    styles = dict(figures.looks([*names], colors))
    for axes, report in zip(row, panels.values(), strict=True):
        axes.set_yscale("log")
        for name, series_points in points(report).items():
            axes.plot(*zip(*series_points, strict=True), label=name, **styles[name])
    figures.legend(figure, row[0], colors)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--panel", nargs=2, action="append", required=True, metavar=("TITLE", "JSON"))
    parser.add_argument("--figure", required=True, metavar="PREFIX", help="writes PREFIX-light.svg and PREFIX-dark.svg")
    arguments = parser.parse_args()
    panels = {title: json.loads(Path(path).read_text()) for title, path in arguments.panel}
    figures.save(partial(draw, panels), arguments.figure)


if __name__ == "__main__":
    main()
