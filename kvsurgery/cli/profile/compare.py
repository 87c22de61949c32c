"""`kvsurgery profile compare`: two profiles side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from kvsurgery.cli.help import HelpPage
from kvsurgery.cli.options import LocalPath, group_reduce_option


@click.command(cls=HelpPage)
@click.argument("a", metavar="PROFILE")
@click.argument("b", metavar="PROFILE")
@group_reduce_option("How the scores of a group's query heads become the score of their KV head.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the difference of every head.")
@click.option("--plot", type=LocalPath(), help="Plot A, B and B - A to a PNG file.")
def compare(a: str, b: str, group_reduce: Literal["mean", "max"], as_json: bool, plot: Path | None) -> None:
    """Compare two profiles of one model.

    The rank correlation shows how similarly both profiles order the heads. The overlap is the share of KV heads that
    `convert` would keep full with either profile at a given sparsity. Profiles of one method are compared by scores.
    Profiles of different methods are compared by ranks from 0 to 1, because their scores have no common scale.

    \b
    kvsurgery profile compare duo.safetensors r2.safetensors --plot difference.png
    """
    import json

    from kvsurgery.display import console
    from kvsurgery.display.figure import check_picture
    from kvsurgery.profile import comparison, heatmap, plots, summary
    from kvsurgery.profile.loading import load_scores

    if plot is not None:
        check_picture(plot)
    profiles = load_scores(a), load_scores(b)
    result = comparison.compare(*profiles, group_reduce)
    origins = [profile.origin for profile in profiles]
    if origins[0].name != origins[1].name:
        names = " and ".join(origin.name for origin in origins)
        console.stderr.print(f"the profiles name different models of equal dimensions, {names}")
    elif None not in (weights := {origin.fingerprint for origin in origins}) and len(weights) > 1:
        console.stderr.print(
            f"the profiles were measured on different weights, which are both called {origins[0].name}"
        )
    if plot is not None:
        plots.plot_comparison(result, plot)
        console.stderr.print(f"wrote {plot}")
    if as_json:
        click.echo(json.dumps(result.to_json()))
        return
    out = console.stdout
    for label, name, profile in zip("AB", (a, b), profiles, strict=True):
        out.print(f"{label}: {name}, of {summary.describe(profile)}")
    out.print(heatmap.draw_comparison(result, out.width, console.colored()))
    out.print(f"\n{summary.describe_comparison(result)}")
    reduction = f", query heads reduced by {group_reduce}" if result.group_reduce else ""
    rows = [
        (
            overlap.sparsity,
            f"{overlap.full} of {overlap.heads}",
            overlap.shared,
            f"{overlap.share:.1%}",
            f"{overlap.chance:.1%}",
            f"{overlap.jaccard:.3f}",
        )
        for overlap in result.overlaps
    ]
    columns = ("sparsity", "full in each", "full in both", "overlap", "by chance", "Jaccard")
    out.print(console.table(f"\nKV heads that stay full{reduction}", columns, rows))
