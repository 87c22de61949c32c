"""Charts of the report: one description draws both the PNG for the model card and the SVG for the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

from kvsurgery.display.figure import inline_svg, new_figure, save_figure
from kvsurgery.heads.lengths import length_name
from kvsurgery.report.colors import LIGHT, VARIABLES
from kvsurgery.system.sizes import size

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

WIDTH, HEIGHT = 4.6, 2.9  # inches of a panel
FONT = 10  # points; on a phone, a panel is about as wide in CSS pixels as here in points
MAX_NAME_WIDTH = 28  # letters of a name in a chart
MOST_TICKS = 7


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: a short title.
        alt: a description of the content, for screen readers.
        draw: the function that draws it.
        height: in inches.
    """

    title: str
    alt: str
    draw: Callable[[Axes], None]
    height: float = HEIGHT


@dataclass(frozen=True)
class Chart:
    """Panels that belong together: one picture in a model card; side by side on a page that is wide enough.

    Attributes:
        name: of the file, without its ending.
        panels: in reading order.
        columns: of them in the picture.
        note: how to read them.
    """

    name: str
    panels: tuple[Panel, ...]
    columns: int = 2
    note: str = ""

    @property
    def alt(self) -> str:
        """A description of the picture, for screen readers."""
        return " ".join(panel.alt for panel in self.panels)

    def save(self, folder: Path) -> None:
        """Write the PNG.

        Raises:
            OutputError: the file cannot be written.
        """
        columns = min(self.columns, len(self.panels))
        rows = [self.panels[start : start + columns] for start in range(0, len(self.panels), columns)]
        heights = [max(panel.height for panel in row) + 0.3 for row in rows]
        figure = new_figure(WIDTH * columns, sum(heights))
        figure.set_facecolor(LIGHT["paper"])
        grid = figure.subfigures(len(rows), columns, squeeze=False, height_ratios=heights)
        for subfigure, panel in zip(grid.flat, self.panels, strict=False):
            _draw_panel(subfigure.subplots(), panel)
            title = {"x": 0.02, "ha": "left", "fontsize": FONT + 1, "color": LIGHT["ink"]}
            subfigure.suptitle(label(panel.title, 60), **title).set_parse_math(False)
        save_figure(figure, folder / f"{self.name}.png")

    def svgs(self) -> list[str]:
        """An SVG element of each panel, without its title."""
        elements = []
        for place, panel in enumerate(self.panels):
            figure = new_figure(WIDTH, panel.height)
            _draw_panel(figure.subplots(), panel)
            elements.append(inline_svg(figure, f"{self.name}-{place}", panel.alt, VARIABLES))
        return elements


MARKERS = "D^vPX<>"  # as many as share no factor with the number of colors, so that few contenders look alike


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The color and marker of each model or contender; the original's are the same in all charts."""
    fixed_styles = {"original": ("original", "o"), "converted": ("converted", "s")}
    other_names = [name for name in names if name not in fixed_styles]
    colors = ["series-1", "series-2", "series-3", "series-4", *["converted"] * ("converted" not in names)]
    styles = fixed_styles | {
        name: (colors[place % len(colors)], MARKERS[place % len(MARKERS)]) for place, name in enumerate(other_names)
    }
    return {name: {"color": LIGHT[styles[name][0]], "marker": styles[name][1], "ms": 4.5, "lw": 1.6} for name in names}


def curve(
    axes: Axes,
    lines: Mapping[str, Mapping[Any, float]],
    lengths: Sequence[Any],
    look: Mapping[str, Mapping[str, Any]],
    unit: str = "tokens",
) -> None:
    """Draw a line of values by length for each name, with the legend above.

    Args:
        lengths: numbers of tokens, which are on a logarithmic axis, or names of lengths, which are evenly spaced.
    """
    from matplotlib.ticker import NullLocator

    are_numbers = all(isinstance(length, int) for length in lengths)
    places = {length: length if are_numbers else place for place, length in enumerate(lengths)}
    for name, values in lines.items():
        points = sorted((places[length], value) for length, value in values.items() if math.isfinite(value))
        axes.plot([place for place, _ in points], [value for _, value in points], label=label(name), **look[name])
    if are_numbers:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    tick_lengths = lengths[:: -(-len(lengths) // MOST_TICKS) or 1]
    axes.set_xticks(
        [places[length] for length in tick_lengths], [tokens(length) for length in tick_lengths], parse_math=False
    )
    axes.set_xlabel(unit)
    names_above(axes)


def bars(
    axes: Axes, values: Mapping[str, float], look: Mapping[str, Mapping[str, Any]], text: Callable[[float], str]
) -> None:
    """Draw a bar for each name, from zero, with its value at the end; for results of a single length.

    Args:
        text: a value as people read it.
    """
    names = [*values]
    colors = [look[name]["color"] for name in names]
    axes.barh(range(len(names)), [values[name] for name in names], height=0.62, color=colors)
    for place, name in enumerate(names):
        value = axes.annotate(text(values[name]), (values[name], place), (4, 0), textcoords="offset points")
        value.set(ha="left", va="center", fontsize=FONT - 1, color=LIGHT["ink"])
    axes.set_yticks(range(len(names)), [label(name) for name in names], parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.45 * max(values.values()))  # room for the text of the longest
    axes.set_xticks([])
    axes.grid(False)


def byte_axis(axis: Axis, base: int, most: int = 8) -> None:
    """Label a logarithmic axis of bytes, after data and margins, at `most` powers of `base` or fewer.

    Where it is too short for two of them, the labels are at even steps.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullFormatter

    low, high = axis.get_view_interval()
    powers = LogLocator(base=base, numticks=most)
    if sum(low <= tick <= high for tick in powers.tick_values(low, high)) >= 2:
        axis.set_major_locator(powers)
    else:
        axis.set_major_locator(MultipleLocator(2.0 ** math.floor(math.log2((high - low) / 2))))
    axis.set_major_formatter(FuncFormatter(lambda count, _: plain_size(count)))
    axis.set_minor_formatter(NullFormatter())


def perplexity_axis(axes: Axes) -> None:
    """Label an axis of perplexities. It spans at least 2% of them, so that noise does not look like loss."""
    low, high = axes.get_ylim()
    margin = max(0.0, (low + high) / 2 / 50 - (high - low)) / 2
    axes.set_ylim(low - margin, high + margin)
    axes.set_ylabel("perplexity")


def names_above(axes: Axes, columns: int = 2, handles: Sequence[Artist] | None = None) -> None:
    """Draw the legend between title and axes, for all that is drawn or for these handles."""
    legend = axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        fontsize=FONT,
        labelcolor=LIGHT["ink"],
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.2,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def tokens(count: Any) -> str:
    """A number of tokens for an axis: 500, 4k, 1M. Names of lengths do not change."""
    return length_name(count) if isinstance(count, int) else label(count)


def plain_size(count: float) -> str:
    """Bytes for a chart: 16 GiB, 1.50 GiB."""
    return size(count).replace(".00", "")


def label(name: Any, max_width: int = MAX_NAME_WIDTH) -> str:
    """A name from a file as a chart label: one line, and only the end of a long name."""
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(name))
    if text.startswith("_"):  # matplotlib leaves such names out of legends
        text = f"\N{ZERO WIDTH SPACE}{text}"
    # letters of East Asia are as wide as two
    widths = [2 if east_asian_width(letter) in "WF" else 1 for letter in text]
    if sum(widths) <= max_width:
        return text
    tail_fits = (sum(widths[start:]) <= max_width - 1 for start in range(len(text)))
    return "…" + text[[*tail_fits].index(True) :]


def _draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw a panel in the colors that are named in the page's style sheet."""
    axes.set_facecolor("none")
    axes.set_axisbelow(True)
    axes.grid(color=LIGHT["line"], lw=0.6)
    panel.draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT["line"])
    axes.tick_params(which="both", color=LIGHT["line"], labelcolor=LIGHT["muted"], labelsize=FONT)
    for text in (axes.xaxis.label, axes.yaxis.label):
        text.set(color=LIGHT["muted"], fontsize=FONT)
