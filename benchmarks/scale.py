"""KV bytes a rank, balance and context of models that need several devices: arithmetic from published shapes.

    python benchmarks/scale.py --plot scale.png --json scale.json
    python benchmarks/scale.py --models llama-3-8b --profile llama-3-8b=Llama-3-8B-Instruct-Gradient-1048k

No weights are read and nothing runs: layouts are those of `kvsurgery convert --tp`, a block of heads [full | streaming]
a rank, and bytes those of the emitted code. `strict` gives every block of a layer as many full heads, which rounds a
layer's number to a multiple of the ranks, and keeps the best heads that this allows. `uneven` (`--tp-uneven`) keeps the
heads that were asked for, so that some ranks read longer than others in a layer.

With more ranks than KV heads, several store the same head, as vLLM does it; transformers' plan has no such thing.
Matrices are cut by the ranks, the embedding and norms are whole on each. Activations come on top. Scores are those of a
profile where one is given (`kvsurgery profile`, or DuoAttention's folder), otherwise random, which is harder on
`strict`: good heads then are as likely in one layer as in another.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvsurgery.checkpoint.model import Model
from kvsurgery.display import console, figure
from kvsurgery.emit.config import converted_config
from kvsurgery.errors import KVSurgeryError
from kvsurgery.heads.dimensions import ModelDimensions, ModelLayers
from kvsurgery.heads.kinds import full_heads
from kvsurgery.policy.evidence import Evidence
from kvsurgery.policy.policy import Policy
from kvsurgery.profile.full_heads import kv_scores
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.duo import import_duo
from kvsurgery.profile.profiled_model import ProfiledModel
from kvsurgery.recipe import Recipe
from kvsurgery.templates.kv_layout import KVLayout, Quantization

SINK, RECENT = 64, 256
SPARSITIES, BITS, RANKS = (0.25, 0.5, 0.75), (16, 8, 4), (1, 2, 4, 8, 16)
GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """A Llama as its config.json has it."""

    attention: ModelDimensions
    hidden: int
    intermediate: int
    vocabulary: int

    def weights(self, ranks: int, itemsize: float) -> float:
        """Bytes of weights on each of so many ranks."""
        model, kv_ranks = self.attention, min(ranks, self.attention.kv_heads)
        width = self.hidden * model.head_dim
        split_weights = 2 * width * model.query_heads + 3 * self.hidden * self.intermediate
        layer = split_weights / ranks + 2 * width * model.kv_heads / kv_ranks + 2 * self.hidden
        return itemsize * (model.layers * layer + self.hidden * (self.vocabulary * (1 + 1 / ranks) + 1))


SHAPES = {
    "llama-2-7b": Shape(ModelDimensions(32, 32, 32, 128), 4096, 11008, 32000),
    "llama-3-8b": Shape(ModelDimensions(32, 32, 8, 128), 4096, 14336, 128256),
    "llama-3-70b": Shape(ModelDimensions(80, 64, 8, 128), 8192, 28672, 128256),
    "llama-3.1-405b": Shape(ModelDimensions(126, 128, 8, 128), 16384, 53248, 128256),
}


def load_profile(name: str, path: str | None, seed: int) -> HeadProfile:
    """The profile at a path, or random scores."""
    model = SHAPES[name].attention
    if path is None:
        scores = np.random.default_rng(seed).random((model.layers, model.kv_heads), dtype=np.float32)
        return HeadProfile(scores, "duo", "kv", f"random scores, seed {seed}", model)
    if path.endswith(".safetensors"):
        profile = HeadProfile.load(path)
    else:
        profile = import_duo(path, ProfiledModel(Path(path).name, model))
    if profile.model != model:
        raise KVSurgeryError(f"{path} is of {profile.model}, but {name} has {model}")
    return profile


def layout_of(policy: Policy, model: ModelDimensions) -> Any:
    """The layout that a checkpoint converted by this policy has."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.query_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
    }
    return KVLayout.from_config(converted_config(Model.of(config), policy))


def balance(parts: list[Any], tokens: int) -> dict[str, float]:
    """How much more the fullest rank stores than the mean, and how much longer the fullest of each layer reads.

    Ranks wait for each other in every layer, so that the second is what unequal heads cost a decode step.
    """
    layers = np.array([[layer.kv_bytes(tokens, 0, 0, part.head_dim, 2) for layer in part.layers] for part in parts])
    rank_bytes = layers.sum(1)
    return {
        "bytes": float(rank_bytes.max() / rank_bytes.mean()),
        "by_layer": float(layers.max(0).sum() / layers.mean(0).sum()),
    }


def context(layout: Any, room: float) -> int:
    """Tokens of one sequence whose keys and values fit this many bytes."""
    if room < layout.kv_bytes(1, 1):
        return 0
    fitting, too_many = 1, 2
    while layout.kv_bytes(1, too_many) <= room:
        fitting, too_many = too_many, 2 * too_many
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if layout.kv_bytes(1, middle) <= room else (fitting, middle)
    return fitting


def score(scores: np.ndarray, policy: Policy) -> float:
    """The sum of the full heads' scores."""
    return sum(float(row[list(full_heads(layer))].sum()) for row, layer in zip(scores, policy.layers, strict=True))


def simulate(name: str, profile: HeadProfile, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for every sparsity and number of ranks of a model."""
    shape, tokens = SHAPES[name], arguments.context
    model, scores = shape.attention, kv_scores(profile, "mean")
    layers = ModelLayers(model, [None] * model.layers)
    rows = []
    for sparsity in (0.0, *SPARSITIES):
        recipe = Recipe.of(sparsity=sparsity, sink=SINK, recent=RECENT)
        for ranks in RANKS:
            blocks = min(ranks, model.kv_heads)
            uneven_policy, even_policy = (
                Policy.of(recipe.changed(tp=blocks, tp_uneven=uneven), Evidence(profile), layers)
                for uneven in (True, False)
            )
            uneven_score, even_score = (score(scores, policy) for policy in (uneven_policy, even_policy))
            uneven, equal = (layout_of(policy, model).parts(blocks) for policy in (uneven_policy, even_policy))
            weights = shape.weights(ranks, arguments.weight_bits / 8)
            layouts = {bits: equal[0] if bits == 16 else equal[0].quantized(Quantization(bits)) for bits in BITS}
            rows.append(
                {
                    "model": name,
                    "sparsity": sparsity,
                    "ranks": ranks,
                    "full_heads": uneven_policy.full,
                    "strict_full_heads": even_policy.full,
                    "strict_score_kept": even_score / uneven_score,
                    "weights": round(weights),
                    "kv_bytes": {bits: layout.kv_bytes(1, tokens) for bits, layout in layouts.items()},
                    "context": {
                        bits: context(layout, arguments.memory * 1e9 - weights) for bits, layout in layouts.items()
                    },
                    "balance": {"strict": balance(equal, tokens), "uneven": balance(uneven, tokens)},
                }
            )
    return rows


def print_tables(name: str, rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Bytes and contexts, then balance."""
    cells = [
        (
            f"{row['sparsity']:.0%}",
            row["ranks"],
            f"{row['weights'] / GIB:.1f}",
            *(f"{row['kv_bytes'][bits] / GIB:.2f}" for bits in BITS),
            *(f"{row['context'][bits] // 1000:,}k" if row["context"][bits] else "-" for bits in BITS),
        )
        for row in rows
    ]
    title = (
        f"{name}, a rank, in 16, 8 and 4 bits: GiB of weights and of {arguments.context:,} tokens,\n"
        f"and tokens that fit {arguments.memory:g} GB with the weights"
    )
    columns = ["stream", "TP", "weights", *(f"KV {bits}" for bits in BITS), *(f"fit {bits}" for bits in BITS)]
    console.stdout.print(console.table(title, columns, cells, left=0))
    cells = [
        (
            f"{row['sparsity']:.0%}",
            row["ranks"],
            row["full_heads"],
            row["strict_full_heads"],
            f"{row['strict_score_kept']:.1%}",
            *(f"{row['balance']['uneven'][measure]:.2f}" for measure in ("bytes", "by_layer")),
        )
        for row in rows
        if row["sparsity"] and row["ranks"] > 1
    ]
    title = (
        f"{name}: full heads asked for, those of strict blocks and their score;\n"
        "the fullest rank over the mean, in bytes and layer by layer, of uneven blocks"
    )
    columns = ["stream", "TP", "full", "strict", "score", "uneven", "layers"]
    console.stdout.print(console.table(title, columns, cells, left=0))


def plot(rows: list[dict[str, Any]], names: list[str], arguments: argparse.Namespace) -> None:
    """KV bytes a rank, and tokens that fit, over the ranks; a column for each model."""
    picture = figure.new_figure(5 * len(names), 7.5)
    axes = picture.subplots(2, len(names), sharex=True, sharey="row", squeeze=False)
    lines = [(sparsity, bits) for sparsity in (0.0, *SPARSITIES[1:]) for bits in (16, 4)]
    for column, name in enumerate(names):
        for sparsity, bits in lines:
            line_rows = [row for row in rows if (row["model"], row["sparsity"]) == (name, sparsity)]
            style = {
                "color": {0.0: "black", 0.5: "tab:blue", 0.75: "tab:orange"}[sparsity],
                "linestyle": {16: "-", 4: "--"}[bits],
                "marker": "o",
                "markersize": 3,
                "label": f"{sparsity:.0%} streaming, {bits} bit",
            }
            for row_index, values in enumerate(
                (
                    [row["kv_bytes"][bits] / GIB for row in line_rows],
                    [row["context"][bits] or np.nan for row in line_rows],
                )
            ):
                axes[row_index, column].plot([row["ranks"] for row in line_rows], values, **style)
        top, bottom = axes[:, column]
        top.set(title=name, yscale="log", xscale="log")
        bottom.set(yscale="log", xlabel="ranks (TP)", xticks=RANKS, xticklabels=RANKS)
        top.yaxis.set_major_formatter("{x:g}")
        bottom.yaxis.set_major_formatter(lambda count, _: f"{count / 1e6:g} M")
        for axis in (top, bottom):
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(f"KV cache of {arguments.context:,} tokens, GiB a rank")
    axes[1, 0].set_ylabel(f"tokens that fit {arguments.memory:g} GB a rank")
    axes[0, 0].legend(fontsize=8)
    figure.save_figure(picture, arguments.plot)
    console.stderr.print(f"wrote {arguments.plot}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["llama-3-70b", "llama-3.1-405b"])
    parser.add_argument("--profile", action="append", default=[], metavar="MODEL=PATH", help="a profile's scores")
    parser.add_argument("--context", type=int, default=131072, help="tokens of one sequence")
    parser.add_argument("--memory", type=float, default=80, help="GB of a device")
    parser.add_argument("--weight-bits", type=int, choices=(16, 8, 4), default=16)
    parser.add_argument("--seed", type=int, default=0, help="of random scores")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--plot", type=Path, help="draw them")
    arguments = parser.parse_args()
    profile_paths = dict(entry.split("=", 1) for entry in arguments.profile if "=" in entry)
    if len(profile_paths) < len(arguments.profile) or profile_paths.keys() - set(arguments.models):
        parser.error("--profile is MODEL=PATH, of a model of --models")
    profiles = {name: load_profile(name, profile_paths.get(name), arguments.seed) for name in arguments.models}
    results = []
    for name, profile in profiles.items():
        console.stdout.print(f"{name}: {profile.model}; {profile.base_model}")
        rows = simulate(name, profile, arguments)
        print_tables(name, rows, arguments)
        results += rows
    if arguments.json:
        facts = {name: getattr(arguments, name) for name in ("context", "memory", "weight_bits", "seed")}
        scores = {name: profile.base_model for name, profile in profiles.items()}
        shapes = {name: asdict(SHAPES[name]) for name in profiles}
        content = {**facts, "sink": SINK, "recent": RECENT, "shapes": shapes, "scores": scores, "rows": results}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    if arguments.plot:
        plot(results, arguments.models, arguments)


if __name__ == "__main__":
    main()
