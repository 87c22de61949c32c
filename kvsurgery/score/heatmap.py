"""A head profile for people: facts, a heat map in the terminal, the same as a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.style import Style
from rich.text import Text

from kvsurgery.decide.policy import decide
from kvsurgery.errors import KVSurgeryError, OutputError
from kvsurgery.score.profile import METHODS, HeadProfile

SPARSITIES = (0.25, 0.5, 0.75)
# ten levels, each a tenth of the range: a character where there is no colour, else matplotlib's viridis
SHADES = " .:-=+*#%@"
COLOURS = (
    "#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725",
)  # fmt: skip


def facts(profile: HeadProfile) -> dict[str, Any]:
    """What `profile show --json` prints, scores aside."""
    top = profile.scores.max()
    return {
        "method": profile.method,
        "granularity": profile.granularity,
        "base_model": profile.base_model,
        "base_revision": profile.base_revision,
        "model": asdict(profile.model),
        "shape": list(profile.scores.shape),
        "score_min": float(profile.scores.min()),
        "score_max": float(top),
        "at_max": int((profile.scores == top).sum()),
        "sink": profile.sink,
        "recent": profile.recent,
        "full_heads_per_layer": {str(sparsity): full_heads(profile, sparsity) for sparsity in SPARSITIES},
        "hash": profile.hash,
        "provenance": profile.provenance,
    }


def full_heads(profile: HeadProfile, sparsity: float) -> list[int]:
    """KV heads of each layer that stay full at a sparsity, if no layer has a sliding window of its own."""
    return [
        layer.full
        for layer in decide(profile, [None] * profile.model.layers, sparsity=sparsity, rest="streaming").layers
    ]


def describe(profile: HeadProfile) -> str:
    """The facts in two lines."""
    layers, heads = profile.scores.shape
    kind = "KV" if profile.granularity == "kv" else "query"
    scores = profile.scores
    at_max = int((scores == scores.max()).sum())
    return (
        f"{profile.base_model} ({profile.model})\n"
        f"{profile.method} scores of {layers} x {heads} {kind} heads: {scores.min():.4g} to {scores.max():.4g}, "
        f"mean {scores.mean(dtype=np.float64):.4g}, {at_max} of {scores.size} at the maximum"
    )


def draw(profile: HeadProfile, width: int, colour: bool) -> Text:
    """Rows of layers, columns of heads, and beside them the KV heads that stay full at a few sparsities.

    Args:
        profile: what to draw.
        width: columns of the terminal; heads that do not fit follow in a second block.
        colour: coloured cells, else characters.
    """
    layers, heads = profile.scores.shape
    counts = np.array([full_heads(profile, sparsity) for sparsity in SPARSITIES]).T
    room = max(width - len("layer |") - len("|") - 4 * len(SPARSITIES), 8)
    cell = 2 if 2 * heads <= room else 1
    block = min(heads, room // 8 * 8)
    ceiling = _ceiling(profile)
    # a tiny top would overflow the quotient; float64 holds the least float32
    levels = np.minimum(profile.scores.astype(np.float64) / ceiling * len(SHADES), len(SHADES) - 1).astype(int)

    reduced = ", query heads averaged over their KV head" if profile.granularity == "query" else ""
    text = Text(f"right: full KV heads of the layer at sparsity {', '.join(map(str, SPARSITIES))}{reduced}\n\n")
    for start in range(0, heads, block):
        end = min(start + block, heads)
        marks = "".join(f"{head:<{8 * cell}}" for head in range(start, end, 8))[: (end - start) * cell]
        text.append(f"layer |{marks:<{(end - start) * cell}}|{''.join(f'{s:4.0%}' for s in SPARSITIES)}\n")
        for layer in range(layers):
            text.append(f"{layer:>5} |")
            for level in levels[layer, start:end]:
                text.append(*_cell(level, cell, colour))
            text.append(f"|{''.join(f'{count:4}' for count in counts[layer])}\n")
        text.append("\n")
    text.append("scale |")
    for level in range(len(SHADES)):
        text.append(*_cell(level, 1, colour))
    text.append(f"| 0 to {ceiling:.4g}")
    return text


def plot(profile: HeadProfile, path: str | Path) -> None:
    """Write the heat map as a picture: layers across, heads down.

    Raises:
        KVSurgeryError: matplotlib is not installed.
        OutputError: the file cannot be written, or its ending is no picture format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KVSurgeryError("--plot needs matplotlib: pip install 'kvsurgery[plot]'") from error
    layers, heads = profile.scores.shape
    # cells of a fifth of an inch, within what a page holds
    across, down = (min(max(0.2 * count, least), 14) for count, least in ((layers, 6), (heads, 1.6)))
    figure = Figure(figsize=(across + 1.6, down + 1.2), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        profile.scores.T, cmap="viridis", vmin=0, vmax=_ceiling(profile), aspect="auto", interpolation="nearest"
    )
    axes.set_title(f"{profile.base_model}\n{profile.method} scores", fontsize="medium", wrap=True, parse_math=False)
    axes.set_xlabel("layer")
    axes.set_xticks(_ticks(layers))
    axes.set_yticks(_ticks(heads))
    axes.set_ylabel("KV head" if profile.granularity == "kv" else "query head")
    group = profile.model.group
    if profile.granularity == "query" and group > 1:
        axes.set_ylabel("query head, lines between KV heads")
        axes.hlines(np.arange(group, heads, group) - 0.5, -0.5, layers - 0.5, "white", lw=0.5)
    figure.colorbar(image, ax=axes, label="score", pad=0.02)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {path}: {error}") from error


def _ceiling(profile: HeadProfile) -> float:
    """The score drawn brightest: the method's bound, else the largest, or 1 if all are 0."""
    return METHODS[profile.method] or float(profile.scores.max()) or 1.0


def _cell(level: int, width: int, colour: bool) -> tuple[str, Style | None]:
    if colour:
        return " " * width, Style(bgcolor=COLOURS[level])
    return SHADES[level] * width, None


def _ticks(count: int) -> range:
    return range(0, count, 1 if count <= 8 else 4 if count <= 64 else 8)
