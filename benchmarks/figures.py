"""How figures of the documentation look: panels, lines and legends in one set of colors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsurgery.report.colors import DARK, LIGHT

OURS = "kvsurgery"
# colors and marks of our series, and of the others', in turn
INKS = {True: ("converted", "series-2", "series-3", "muted", "ink"), False: ("series-1", "series-4", "bad", "muted")}
MARKS = {True: "oDs^PX", False: "x+1234v"}

Colors = Mapping[str, str]


def panels(colors: Colors, titles: Sequence[str], size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure of one row of panels, over the bytes of caches as shares of the original's."""
    figure = Figure(figsize=size, layout="constrained", facecolor=colors["paper"])
    row = figure.subplots(1, len(titles), squeeze=False)[0].tolist()
    for axes, title in zip(row, titles, strict=True):
        axes.set_facecolor(colors["paper"])
        axes.tick_params(colors=colors["muted"], which="both", length=0)
        axes.spines[:].set_color(colors["line"])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=colors["line"], linewidth=0.6)
        axes.set_title(title, color=colors["ink"], fontsize=10, loc="left")
        axes.set_xlabel("bytes of the KV cache, of the original's", color=colors["muted"])
        axes.xaxis.set_major_formatter("{x:.0%}")
    return figure, row


def looks(series: Sequence[str], colors: Colors) -> Iterator[tuple[str, dict]]:
    """How each series is drawn: ours with solid lines."""
    kinds = {ours: zip(cycle(names), cycle(MARKS[ours]), strict=False) for ours, names in INKS.items()}
    for name in series:
        ours = name.startswith(OURS)
        ink, mark = next(kinds[ours])
        style, width = ("-", 1.8) if ours else ("--", 1.2)
        yield (
            name,
            {"color": colors[ink], "marker": mark, "markersize": 5, "linestyle": style, "linewidth": width},
        )


def legend(figure: Figure, axes: Axes, colors: Colors) -> None:
    """A legend below, of what one panel shows."""
    box = figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    box.get_frame().set(facecolor=colors["paper"], edgecolor="none")
    for text in box.get_texts():
        text.set_color(colors["ink"])


def save(draw: Callable[[Colors], Figure], prefix: str) -> None:
    """Draw a figure for light and dark pages: PREFIX-light.svg and PREFIX-dark.svg."""
    for name, colors in (("light", LIGHT), ("dark", DARK)):
        path = Path(f"{prefix}-{name}.svg")
        with matplotlib.rc_context({"svg.hashsalt": path.stem}):
            draw(colors).savefig(path, metadata={"Date": None})
