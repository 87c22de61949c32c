"""What a figure that matplotlib wrote as SVG draws: its words, and its lines relative to the panel they are in."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

# widths of the lines that are data, unlike those of axes and grids
LINE = re.compile(r'<path d="([^"]*)"[^>]*style="fill: none;[^"]*stroke-width: (?:1\.8|1\.5|1\.2)')


def words(svg: Path) -> list[str]:
    """Titles, labels and legends, without the numbers of axes, which matplotlib chooses."""
    every = re.findall(r"<!-- (.*?) -->", svg.read_text())
    return [each for each in every if not re.fullmatch(r"[\d.,]+%?|\$.*\$", each)]


def lines(svg: Path) -> list[np.ndarray]:
    """The lines of all panels, float64 [points, 2], scaled to what the lines of their panel span.

    Margins and sizes of text, which differ between versions of matplotlib, then make no difference.
    """
    panels = re.split(r'<g id="axes_\d+">', svg.read_text().partition('<g id="legend_1">')[0])[1:]
    found = []
    for panel in panels:
        own = [np.array(re.findall(r"-?\d+\.?\d*", path), float).reshape(-1, 2) for path in LINE.findall(panel)]
        if own:
            every = np.concatenate(own)
            low, high = every.min(0), every.max(0)
            found += [(line - low) / (high - low) for line in own]
    return found
