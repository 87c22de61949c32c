"""Draw the figure of the README: the heads of a converted model beside the memory of its KV cache.

    python docs/figures/heads_and_memory.py

Converts the bundled model twice, with a 16-bit and a 4-bit KV cache, reads prompts of several lengths with the original
and both results, and writes `heads-light.svg` and `heads-dark.svg` beside this script. Every byte is counted in a cache
that holds a prompt; lines between the points are the sizes that the emitted config predicts.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.report.colors import DARK, LIGHT
from kvsurgery.templates.kv_layout import KVLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).resolve().parent
TINY = HERE.parents[1] / "examples" / "tiny-recall"
MODEL, PROFILE = TINY / "model", TINY / "profile.safetensors"
OPTIONS = ("--full-heads", "4", "--sink", "4", "--recent", "32")
LENGTHS = (256, 512, 1024, 1536, 2048)
MIB = 1 << 20


@dataclass(frozen=True)
class Curve:
    """Bytes of one model's KV cache after prompts of `LENGTHS` tokens: counted, and predicted by the config."""

    name: str
    color: str
    allocated: list[int]
    predicted: list[int]


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    scores = HeadProfile.load(PROFILE).scores
    with tempfile.TemporaryDirectory() as folder:
        duo, four_bits = Path(folder, "duo"), Path(folder, "kv4")
        convert(duo)
        convert(four_bits, "--kv-bits", "4")
        full = full_heads(duo)
        curves = [
            measure("original", "original", MODEL),
            measure("converted", "converted", duo),
            measure("converted, 4 bits", "series-2", four_bits),
        ]
    for name, colors in (("light", LIGHT), ("dark", DARK)):
        draw(scores.T, full, curves, colors, HERE / f"heads-{name}.svg")


def convert(out: Path, *options: str) -> None:
    """Convert the bundled model into a folder."""
    command = [sys.executable, "-m", "kvsurgery", "convert", MODEL, "--profile", PROFILE, *OPTIONS, *options]
    subprocess.run([*command, "--out", out], check=True, capture_output=True)


def full_heads(folder: Path) -> list[int]:
    """The number of full heads in each layer of a converted checkpoint."""
    return [layer.full for layer in KVLayout.from_config(AutoConfig.from_pretrained(folder)).layers]


@torch.inference_mode()
def measure(name: str, color: str, folder: Path) -> Curve:
    """Read prompts of random tokens and count the bytes of the cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, max(LENGTHS)), generator=generator)
    caches = [model(tokens[:, :length]).past_key_values for length in LENGTHS]
    if folder == MODEL:
        allocated = [sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) for cache in caches]
        return Curve(name, color, allocated, allocated)
    layout = KVLayout.from_config(model.config)
    predicted = [layout.kv_bytes(1, length, itemsize=4) for length in range(LENGTHS[0], LENGTHS[-1] + 1)]
    return Curve(name, color, [cache.allocated_bytes() for cache in caches], predicted)


def draw(scores: np.ndarray, full: list[int], curves: list[Curve], colors: dict[str, str], path: Path) -> None:
    """Write the figure in one set of colors.

    Args:
        scores: [heads, layers].
        full: full heads of each layer; these are the layer's heads with the highest scores.
    """
    figure = Figure(figsize=(9, 3.2), layout="constrained", facecolor=colors["paper"])
    heads, memory = figure.subplots(1, 2, width_ratios=[1, 1.6])
    for axes in (heads, memory):
        axes.set_facecolor(colors["paper"])
        axes.tick_params(colors=colors["muted"], length=0)
        axes.spines[:].set_color(colors["line"])
        axes.spines[["top", "right"]].set_visible(False)
    draw_heads(heads, scores, full, colors)
    draw_memory(memory, curves, colors)
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})


def draw_heads(axes: Axes, scores: np.ndarray, full: list[int], colors: dict[str, str]) -> None:
    """A cell for each KV head, shaded by its score; full heads are framed."""
    heads, layers = scores.shape
    shades = LinearSegmentedColormap.from_list("scores", [colors["panel"], colors["converted"]])
    axes.imshow(scores, cmap=shades, vmin=0, vmax=1, aspect="auto")
    for layer, count in enumerate(full):
        best = sorted(range(heads), key=lambda head, layer=layer: -scores[head, layer])[:count]
        for head in range(heads):
            score = float(scores[head, layer])
            ink = colors["paper"] if score > 0.6 else colors["ink"]
            kind = "full" if head in best else "streaming"
            axes.text(layer, head, f"{kind}\n{score:.2f}", ha="center", va="center", color=ink, fontsize=9)
            if head in best:
                frame = {"fill": False, "edgecolor": colors["converted"], "linewidth": 2}
                axes.add_patch(Rectangle((layer - 0.47, head - 0.46), 0.94, 0.92, **frame))
    axes.set_xticks(range(layers), [f"layer {layer}" for layer in range(layers)])
    axes.set_yticks(range(heads), [f"KV head {head}" for head in range(heads)])
    axes.set_title("head profile: score of each KV head", color=colors["ink"], fontsize=10, loc="left")


def draw_memory(axes: Axes, curves: list[Curve], colors: dict[str, str]) -> None:
    """Bytes of the KV cache by the length of the prompt, with a label at the end of each curve."""
    for curve in curves:
        color = colors[curve.color]
        predicted_at = LENGTHS if len(curve.predicted) == len(LENGTHS) else range(LENGTHS[0], LENGTHS[-1] + 1)
        axes.plot(predicted_at, [size / MIB for size in curve.predicted], color=color, linewidth=1.5)
        axes.plot(LENGTHS, [size / MIB for size in curve.allocated], "o", color=color, markersize=4.5)
        last = curve.allocated[-1]
        label = f"{curve.name}\n{last / MIB:.2f} MiB"
        if curve is not curves[0]:
            label += f", {last / curves[0].allocated[-1]:.0%}"
        axes.annotate(
            label, (LENGTHS[-1], last / MIB), (8, 0), textcoords="offset points", va="center", color=color, fontsize=9
        )
    axes.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
    axes.set_xlim(LENGTHS[0] - 128, LENGTHS[-1] + 64)
    axes.set_ylim(0)
    axes.grid(axis="y", color=colors["line"], linewidth=0.6)
    axes.set_xlabel("tokens of the prompt", color=colors["muted"])
    axes.set_title(
        "KV cache in MiB: measured (dots) and predicted (lines)", color=colors["ink"], fontsize=10, loc="left"
    )


if __name__ == "__main__":
    main()
