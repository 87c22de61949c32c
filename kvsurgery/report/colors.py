"""The colors of the report: a set for pictures and light pages, and a set for dark pages."""

from __future__ import annotations

# contrast with the paper: text 4.5 and more, lines and marks 3 and more, but for grids and what stands behind
LIGHT = {
    "paper": "#fefefe",
    "panel": "#f3f5f8",
    "ink": "#1b1f27",
    "muted": "#566070",
    "line": "#d6dbe3",
    "original": "#70798a",
    "converted": "#0b63c5",
    "series-1": "#b8560b",
    "series-2": "#1c7d4d",
    "series-3": "#8440ba",
    "series-4": "#c02a66",
    "remaining": "#e9b872",
    "good": "#19743f",
    "bad": "#b3261e",
}
DARK = {
    "paper": "#12151a",
    "panel": "#1b2027",
    "ink": "#e7eaf0",
    "muted": "#a6afbd",
    "line": "#363e4a",
    "original": "#9aa5b6",
    "converted": "#66aefc",
    "series-1": "#f59a54",
    "series-2": "#56cb92",
    "series-3": "#c79bfb",
    "series-4": "#f58bb2",
    "remaining": "#8d6a37",
    "good": "#62d08d",
    "bad": "#ff8a80",
}
# dark-page replacements of the light colors
VARIABLES = {color: f"--{name}" for name, color in LIGHT.items()}
