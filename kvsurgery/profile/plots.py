"""Plots of head profiles, with layers on the x-axis and heads on the y-axis, and of the training of gates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvsurgery.display.figure import new_figure, save_figure
from kvsurgery.errors import ProfileError
from kvsurgery.profile.comparison import Comparison
from kvsurgery.profile.embedding_heads import STATES, columns_of
from kvsurgery.profile.full_heads import full_heads
from kvsurgery.profile.head_profile import Granularity, HeadProfile
from kvsurgery.profile.ranking import SPARSITIES, ceiling
from kvsurgery.profile.summary import kind_of_head

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

BLUES = ("#c6dbef", "#6baed6", "#08519c")
GRAY = "#e5e5e5"  # layers that cannot have full heads
# inches: the largest side of a cell, the largest width of a row of cells, and the height of bars
CELL, ACROSS, BARS = 0.2, 12.0, 1.1
LONGEST_NAME = 60
FRAME = "#d62728"
LEAST_RANK = 1e-4  # less looks alike: colors are on a logarithmic scale


def plot(profile: HeadProfile, path: str | Path) -> None:
    """Plot a profile's heat map, and above it the number of full KV heads of each layer at a few sparsities.

    For a reform profile, plot a map of ranks for each task, with frames around the embedding heads.

    Raises:
        ProfileError: the profile has neither scores nor ranks.
        OutputError: the file cannot be written, or its suffix is not a picture format.
    """
    if profile.scores is None:
        _plot_ranks(profile, path)
        return
    layers, heads = profile.scores.shape
    figure, (bars, axes) = _figure(layers, heads, maps=1)
    # the heads that stay full at a sparsity are among those of a lower one
    for sparsity, blue in zip(SPARSITIES, BLUES, strict=True):
        full_counts = full_heads(profile, sparsity).sum(axis=1)
        bars.bar(range(layers), full_counts, width=1, color=blue, label=f"{sparsity:.0%}")
    kind = "no cache" if 0 in (profile.windows or ()) else "sliding"
    for layer in np.flatnonzero(~profile.eligible):
        is_first = layer == profile.eligible.argmin()
        bars.axvspan(layer - 0.5, layer + 0.5, color=GRAY, lw=0, label=kind if is_first else None)
    bars.set_ylabel("full KV heads")
    bars.set_yticks([0, profile.model.kv_heads])
    # above the color bar, whose room it does not need to add to
    legend = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "frameon": False, "handlelength": 1}
    bars.legend(title="sparsity", fontsize="small", title_fontsize="small", **legend).set_in_layout(False)
    bars.set_title(f"{_name(profile)}\n{profile.method} scores", fontsize="medium", parse_math=False)
    scale_end = ceiling(profile.method, profile.scores)
    image = _map(axes, profile.scores, profile.granularity, profile.model.group, "viridis", (0, scale_end))
    figure.colorbar(image, ax=axes, label="score", pad=0.02)
    save_figure(figure, path)


def _plot_ranks(profile: HeadProfile, path: str | Path) -> None:
    """Plot the ranks of each head's queries, keys and values: bright heads rank the tokens of answers first."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    if profile.ranking is None:
        raise ProfileError(f"this {profile.method} profile has embedding heads and no ranks to plot")
    mnr = profile.ranking.mnr
    columns = {state: columns_of(state, profile.model) for state in STATES}
    starts = dict(zip(STATES, np.cumsum([0, *columns.values()]).tolist(), strict=False))
    count, layers = sum(columns.values()), profile.model.layers
    figure = new_figure(max(min(CELL * layers, ACROSS), 6) + 1.6, len(mnr) * (max(min(CELL * count, 6), 2) + 0.5) + 0.6)
    rows = figure.subplots(len(mnr), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (task, ranks) in zip(rows, mnr.items(), strict=True):
        values = np.concatenate([ranks[state] for state in STATES], axis=1).clip(LEAST_RANK)
        norm = LogNorm(values.min(), 1)
        image = axes.imshow(values.T, aspect="auto", interpolation="nearest", cmap="viridis_r", norm=norm)
        axes.hlines([start - 0.5 for start in starts.values() if start], -0.5, layers - 0.5, "white", lw=1.5)
        axes.set_yticks([start + (columns[state] - 1) / 2 for state, start in starts.items()], STATES)
        axes.set_title(task, fontsize="medium")
        for head in profile.embedding_heads:
            corner = head.layer - 0.5, starts[head.state] + head.head - 0.5
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=FRAME, lw=1.8, zorder=3))
        figure.colorbar(image, ax=axes, label="mean rank (0 is best)", pad=0.02)
    rows[-1].set_xlabel("layer")
    rows[-1].set_xticks(_ticks(layers))
    title = f"{_name(profile)}\n{profile.method} ranks, embedding heads framed"
    figure.suptitle(title, fontsize="medium").set_parse_math(False)
    save_figure(figure, path)


def plot_comparison(comparison: Comparison, path: str | Path) -> None:
    """Plot the heat maps of A, B and their difference, and above them each layer's mean absolute difference.

    Raises:
        OutputError: the file cannot be written, or its suffix is not a picture format.
    """
    layers, heads = comparison.difference.shape
    figure, (bars, *map_axes, difference_axes) = _figure(layers, heads, maps=3)
    bars.bar(range(layers), comparison.layer_differences, width=1, color=BLUES[1])
    bars.set_ylabel("mean |B − A|")
    bars.set_ylim(bottom=0)
    rho = "undefined" if comparison.spearman is None else f"{comparison.spearman:.3f}"
    bars.set_title(f"Spearman rank correlation {rho}", fontsize="medium")
    head_layout = comparison.granularity, comparison.profiles[0].model.group
    for axes, label, profile, values in zip(map_axes, "AB", comparison.profiles, comparison.values, strict=True):
        image = _map(axes, values, *head_layout, "viridis", (0, comparison.ceiling))
        axes.set_title(f"{label}: {_name(profile)}, {profile.method}", fontsize="medium", parse_math=False)
    figure.colorbar(image, ax=map_axes, label=comparison.unit, pad=0.02)
    max_difference = float(np.abs(comparison.difference).max()) or 1.0
    image = _map(difference_axes, comparison.difference, *head_layout, "RdBu_r", (-max_difference, max_difference))
    difference_axes.set_title("B − A", fontsize="medium")
    figure.colorbar(image, ax=difference_axes, label=comparison.unit, pad=0.02)
    save_figure(figure, path)


def plot_training(history: np.ndarray, path: str | Path) -> None:
    """Plot the losses of a training of gates over the steps, and below them the gates.

    Args:
        history: [steps, 4], as `train_gates` returns it.

    Raises:
        OutputError: the file cannot be written, or its suffix is not a picture format.
    """
    loss, data_loss, mean_gate, sparsity = history.T
    steps = np.arange(1, len(history) + 1)
    figure = new_figure(9, 5)
    loss_axes, gate_axes = figure.subplots(2, 1, sharex=True)
    loss_axes.plot(steps, loss, color=BLUES[2], lw=1, label="loss")
    loss_axes.plot(steps, data_loss, color=BLUES[1], lw=1, label="without the mean gate")
    gate_axes.plot(steps, mean_gate, color=BLUES[2], lw=1, label="mean gate")
    gate_axes.plot(steps, sparsity, color=BLUES[1], lw=1, label="gates under 0.5")
    loss_axes.set_ylim(bottom=0)
    gate_axes.set_ylim(-0.02, 1.02)
    gate_axes.set_xlabel("step")
    for axes in (loss_axes, gate_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    save_figure(figure, path)


def _figure(layers: int, heads: int, maps: int) -> tuple[Figure, list[Axes]]:
    """A figure with a row for bars and rows for maps below it, which share the layers as the x-axis."""
    width = max(min(CELL * layers, ACROSS), 6)
    height = max(min(CELL * heads, 10 if maps == 1 else 4.5), 1.6)
    figure = new_figure(width + 1.6, BARS + maps * (height + 0.3) + 1)
    axes = list(figure.subplots(1 + maps, 1, sharex=True, height_ratios=[BARS, *[height] * maps]))
    axes[0].spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("layer")
    axes[-1].set_xticks(_ticks(layers))
    return figure, axes


def _map(
    axes: Axes, values: np.ndarray, granularity: Granularity | None, group: int, cmap: str, limits: tuple[float, float]
) -> AxesImage:
    """Draw values [layers, heads] as colored cells, with the color scale between two limits."""
    layers, heads = values.shape
    low, high = limits
    image = axes.imshow(values.T, aspect="auto", interpolation="nearest", cmap=cmap, vmin=low, vmax=high)
    axes.set_yticks(_ticks(heads))
    axes.set_ylabel(kind_of_head(granularity))
    if granularity == "query" and group > 1:
        axes.hlines(np.arange(group, heads, group) - 0.5, -0.5, layers - 0.5, "white", lw=0.5)
    return image


def _name(profile: HeadProfile) -> str:
    """The model's name; only the end of a long path."""
    name = profile.base_model
    return name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]


def _ticks(count: int) -> range:
    return range(0, count, 1 if count <= 8 else 4 if count <= 64 else 8)
