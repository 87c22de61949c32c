"""Heat maps of head profiles for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.style import Style
from rich.text import Text

from kvsurgery.profile.comparison import Comparison
from kvsurgery.profile.full_heads import full_per_layer
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.ranking import SPARSITIES, shown
from kvsurgery.profile.summary import kind_of_head

# ten levels, each a tenth of the range: a character where there is no color, else matplotlib's viridis
SHADES = " .:-=+*#%@"
SLIDES = "-"  # instead of the number of full heads
COLORS = (
    "#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725",
)  # fmt: skip


def draw(profile: HeadProfile, width: int, color: bool) -> Text:
    """Draw a heat map of layers and heads, and beside it the number of full KV heads at a few sparsities.

    Args:
        width: columns of the terminal; heads that do not fit follow in a second block.
        color: colored cells, else characters.
    """
    side_columns = {}
    for sparsity in SPARSITIES:
        counts = full_per_layer(profile, sparsity)
        side_columns[f"{sparsity * 100:.0f}"] = [SLIDES if count is None else str(count) for count in counts]
    values, scale_end, unit = shown(profile.method, profile.head_scores)
    reduced_note = ", query heads averaged over their KV head" if profile.granularity == "query" else ""
    kind = "no KV cache" if 0 in (profile.windows or ()) else "a sliding window"
    slides_note = "" if profile.eligible.all() else f"; {SLIDES} marks layers with {kind}"
    text = Text(
        f"right: full KV heads of the layer at sparsity {', '.join(map(str, SPARSITIES))}"
        f"{reduced_note}{slides_note}\n\n"
    )
    text.append(_map([_levels(values, scale_end)], side_columns, width, color))
    text.append(_scale(scale_end, color))
    text.append("" if unit == "score" else f", the {unit}")
    return text


def draw_comparison(comparison: Comparison, width: int, color: bool) -> Text:
    """Draw two maps side by side, A on the left, and each layer's mean absolute difference; arguments as in `draw`."""
    kind = kind_of_head(comparison.granularity)
    text = Text(f"{comparison.unit}s of {kind}s: A, B, and the layer's mean |B - A| as a share of the scale\n\n")
    side_columns = {"diff": [f"{difference:.0%}" for difference in comparison.layer_differences / comparison.ceiling]}
    text.append(_map([_levels(values, comparison.ceiling) for values in comparison.values], side_columns, width, color))
    text.append(_scale(comparison.ceiling, color))
    return text


def _levels(values: np.ndarray, scale_end: float) -> np.ndarray:
    """The level of each value: its tenth of the range from 0 to `scale_end`."""
    # a tiny scale would overflow the quotient; float64 holds the least float32
    return np.minimum(values.astype(np.float64) / scale_end * len(SHADES), len(SHADES) - 1).astype(int)


def _map(maps: Sequence[np.ndarray], side_columns: dict[str, list[str]], width: int, color: bool) -> Text:
    """Levels [layers, heads], maps side by side, and right of them columns of text by their title."""
    layers, heads = maps[0].shape
    columns = [
        [cell.rjust(1 + max(map(len, (title, *cells)))) for cell in (title, *cells)]
        for title, cells in side_columns.items()
    ]
    margins = ["".join(row) for row in zip(*columns, strict=True)]
    room = max((width - len("layer|") - len(margins[0])) // len(maps) - len("|"), 8)
    cell = 2 if 2 * heads <= room else 1
    block = min(heads, room // 8 * 8)
    text = Text()
    for start in range(0, heads, block):
        block_heads = range(start, min(start + block, heads))
        marks = "".join(f"{head:<{8 * cell}}" for head in block_heads[::8])[: len(block_heads) * cell]
        text.append(f"layer|{f'{marks:<{len(block_heads) * cell}}|' * len(maps)}{margins[0]}\n")
        for layer in range(layers):
            text.append(f"{layer:>5}|")
            for levels in maps:
                for level in levels[layer, block_heads.start : block_heads.stop]:
                    text.append(*_cell(level, cell, color))
                text.append("|")
            text.append(f"{margins[1 + layer]}\n")
        text.append("\n")
    return text


def _scale(scale_end: float, color: bool) -> Text:
    text = Text("scale|")
    for level in range(len(SHADES)):
        text.append(*_cell(level, 1, color))
    text.append(f"| 0 to {scale_end:.4g}")
    return text


def _cell(level: int, width: int, color: bool) -> tuple[str, Style | None]:
    if color:
        return " " * width, Style(bgcolor=COLORS[level])
    return SHADES[level] * width, None
