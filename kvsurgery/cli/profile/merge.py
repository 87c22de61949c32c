"""`kvsurgery profile merge`: merge several profiles into one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from kvsurgery.cli.help import HelpPage
from kvsurgery.cli.options import group_reduce_option
from kvsurgery.cli.profile.saving import out_option


@click.command(cls=HelpPage)
@click.argument("paths", metavar="PROFILE...", nargs=-1, required=True)
@click.option(
    "--how",
    type=click.Choice(["mean", "max", "rank-product"]),
    default="mean",
    show_default=True,
    help="The mean or the maximum of a head's scores, for profiles of one method; or the geometric mean of its ranks "
    "from 0 to 1, for any methods.",
)
@group_reduce_option(
    "How the scores of a group's query heads become the score of their KV head, if another profile scores KV heads."
)
@click.option("--base-model", help="Model name to record.  [default: (the name in all profiles)]")
@out_option
def merge(
    paths: tuple[str, ...],
    how: Literal["mean", "max", "rank-product"],
    group_reduce: Literal["mean", "max"],
    base_model: str | None,
    out: Path,
) -> None:
    """Merge several profiles of one model.

    For runs of one method with different seeds or data, use --how mean, or max to keep every head that matters in any
    run. For different methods, use --how rank-product: it ranks those heads high that rank high in every profile. With
    such a profile the remaining heads stream by default; `convert --rest budgeted` gives them budgets.

    The order of the profiles does not matter.

    \b
    kvsurgery profile merge seed0.safetensors seed1.safetensors seed2.safetensors -o mean.safetensors
    kvsurgery profile merge duo.safetensors r2.safetensors --how rank-product -o both.safetensors
    """
    from kvsurgery.cli.profile.saving import show_saved
    from kvsurgery.profile import merging
    from kvsurgery.profile.loading import load_scores
    from kvsurgery.system.files import check_new_file

    if any(Path(path).resolve() == out.resolve() for path in paths):
        raise click.UsageError(f"{out} is one of the profiles to merge; give another output file")
    check_new_file(out)
    profiles = [load_scores(path) for path in paths]
    profile = merging.merge(profiles, how, base_model=base_model, group_reduce=group_reduce)
    profile.save(out)
    show_saved(profile, out)
