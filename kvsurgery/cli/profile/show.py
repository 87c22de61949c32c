"""`kvsurgery profile show`: show a profile as a heat map."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvsurgery.cli.help import HelpPage
from kvsurgery.cli.options import LocalPath

if TYPE_CHECKING:
    from kvsurgery.profile.cache_losses import CacheLosses
    from kvsurgery.profile.embedding_heads import EmbeddingHead
    from kvsurgery.profile.head_profile import HeadProfile

BEST = 5


@click.command(cls=HelpPage)
@click.argument("path", metavar="PROFILE")
@click.option(
    "--model",
    "source",
    metavar="SRC",
    help="Model to read sliding windows from: a folder, a config.json or a Hub id. Profiles of version 0.1 need it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print facts and scores as JSON.")
@click.option("--plot", type=LocalPath(), help="Plot the heat map to a PNG file.")
def show(path: str, source: str | None, as_json: bool, plot: Path | None) -> None:
    """Show a head profile as a heat map.

    The columns beside each layer give the number of KV heads that `convert` would keep full at three sparsities. Layers
    with a sliding window of their own have no full heads. For a reform profile, which has no scores, the output lists
    the embedding heads and the best heads of each task, and --plot draws the ranks of all heads. Measured cache losses
    are shown as a table, and --plot draws the loss of each head when it streams.

    \b
    kvsurgery profile show duo.safetensors --plot heads.png
    """
    import json

    from kvsurgery.display import console
    from kvsurgery.display.figure import check_picture
    from kvsurgery.profile import heatmap, plots, summary
    from kvsurgery.profile.cache_losses import CacheLosses
    from kvsurgery.profile.loading import load

    if plot is not None:
        check_picture(plot)
    file = load(path)
    scored = file.head_profile if isinstance(file, CacheLosses) else file
    profile = scored if source is None else _with_windows(scored, source)
    if plot is not None:
        plots.plot(profile, plot)
        console.stderr.print(f"wrote {plot}")
    if isinstance(file, CacheLosses):
        _show_losses(file, as_json)
        return
    if as_json:
        click.echo(json.dumps({**summary.facts(profile), "hash": file.hash}))
        return
    out = console.stdout
    out.print(summary.describe(profile))
    if profile.scores is not None:
        out.print(heatmap.draw(profile, out.width, console.colored()))
    else:
        _print_embedding_heads(profile)


def _show_losses(losses: CacheLosses, as_json: bool) -> None:
    """Print cache losses as tables or JSON."""
    import json

    from kvsurgery.cli.profile.saving import print_losses

    if as_json:
        click.echo(
            json.dumps({**losses.facts, "heads": {name: values.tolist() for name, values in losses.heads.items()}})
        )
    else:
        print_losses(losses)


def _with_windows(profile: HeadProfile, source: str) -> HeadProfile:
    """The profile with the sliding windows of a model's config."""
    from dataclasses import replace

    from kvsurgery.errors import ProfileError
    from kvsurgery.profile.profiled_model import ProfiledModel

    model = ProfiledModel.read(source)
    if model.dimensions != profile.model:
        raise ProfileError(f"{source} has {model.dimensions}, the profile is of {profile.model}; give its model")
    return replace(profile, windows=model.windows)


def _print_embedding_heads(profile: HeadProfile) -> None:
    """Print the embedding heads and the best heads of each task, with their mean normalized ranks if known."""
    import numpy as np

    from kvsurgery.display import console

    mnr = profile.ranking.mnr if profile.ranking else {}
    columns = ("state", "layer", "head", *mnr)

    def row(kind: str, layer: int, head: int) -> tuple[object, ...]:
        return kind, layer, head, *(f"{ranks[kind][layer, head]:.4f}" for ranks in mnr.values())

    def rows(heads: Iterable[EmbeddingHead]) -> list[tuple[object, ...]]:
        return [row(head.state, head.layer, head.head) for head in heads]

    note = ", with their mean normalized ranks (0 is best)" if mnr else ""
    console.stdout.print(console.table(f"\nembedding heads{note}", columns, rows(profile.embedding_heads)))
    if profile.ranking is None:
        return
    for task, ranks in mnr.items():
        best = rows(profile.ranking.best(task)[:BEST])
        for kind in ("hidden", "attention"):
            best.append(row(kind, *np.unravel_index(ranks[kind].argmin(), ranks[kind].shape)))
        title = f"\nbest for {task}, and to compare the best hidden states and attention"
        console.stdout.print(console.table(title, columns, best))
