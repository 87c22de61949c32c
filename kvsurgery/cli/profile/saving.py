"""Output of the commands that write a profile: the option, the summary and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvsurgery.cli.help import basic
from kvsurgery.cli.options import LocalPath

if TYPE_CHECKING:
    from kvsurgery.profile.cache_losses import CacheLosses
    from kvsurgery.profile.head_profile import HeadProfile
    from kvsurgery.profile.origin import ModelOrigin


out_option = basic(
    click.option("-o", "--out", required=True, type=LocalPath(), help="Output file; it must not exist yet.")
)


def remember(scores: HeadProfile | CacheLosses, source: str) -> None:
    """Record on this machine the folder of the measured model, so that `convert` needs no SRC."""
    from kvsurgery.checkpoint.provenance import PROVENANCE
    from kvsurgery.profile.profiled_model import local_folder

    folder = local_folder(source)
    # the original of a converted checkpoint is elsewhere
    if folder is not None and not (folder / PROVENANCE).exists():
        scores.origin.remember(folder)


def show_saved(profile: HeadProfile, out: Path, source: str | None = None, revision: str | None = None) -> None:
    """Describe a written profile, and print the command that converts with it.

    Args:
        source, revision: the model as typed; if None, `convert` uses the model that the profile names.
    """
    from kvsurgery.display import console
    from kvsurgery.profile.methods import SCORE_METHODS
    from kvsurgery.profile.summary import describe

    console.stdout.print(f"wrote {out}\n{describe(profile)}")
    method = SCORE_METHODS.get(profile.method)
    needs_budget = method is not None and method.rest == "budgeted" and method.kind != "budget"
    words = ["--profile", str(out), *(["--budget", "120"] if needs_budget else [])]
    console.stderr.print(_next_command(profile.origin, words, profile.method, source, revision))


def show_saved_losses(losses: CacheLosses, out: Path, source: str, revision: str | None = None) -> None:
    """Show written cache losses, and print the command that converts with them.

    Args:
        source, revision: the model as typed.
    """
    from kvsurgery.display import console

    console.stdout.print(f"wrote {out}")
    print_losses(losses)
    words = ["--kv-bits", "4", "--kv-measured", str(out)]
    console.stderr.print(_next_command(losses.origin, words, "kv4", source, revision))


def _next_command(
    origin: ModelOrigin, words: Sequence[str], suffix: str, source: str | None, revision: str | None
) -> str:
    from kvsurgery.checkpoint.provenance import PROVENANCE
    from kvsurgery.profile.profiled_model import local_folder

    folder = None if source is None else local_folder(source)
    if folder is not None:
        # a converted checkpoint cannot be converted again; `convert` finds its original by the profile
        source_words = [] if (folder / PROVENANCE).exists() else [str(folder)]
    else:
        source_words = [*([source] if source else []), *(["--revision", revision] if revision else [])]
    out = f"{Path(origin.name).name}-{suffix}"
    return f"Next: {shlex.join(['kvsurgery', 'convert', *source_words, *words, '--out', out])}"


def print_losses(losses: CacheLosses) -> None:
    """Print a table of the losses by width and setting, and one of how well losses of heads add up."""
    from kvsurgery.display import console

    rows = []
    for bits, settings in losses.settings.items():
        best = losses.best(bits)
        for setting in settings:
            mark = "best" if setting == best and len(settings) > 1 else ""
            clip = "yes" if setting.clip else "no"
            rows.append((bits, setting.rotate, clip, setting.rounding, f"{setting.loss:.2g}", mark))
    title = f"Divergence of the next token with every head quantized, {losses.context:,} tokens of {losses.text}"
    console.stdout.print(console.table(title, ["bits", "rotated", "clipped", "rounded by", "nats", ""], rows, left=2))
    rows = [
        (combination.name, f"{combination.expected:.2g}", f"{combination.measured:.2g}")
        for combination in losses.combinations
    ]
    title = "Several heads at once: the sum of their divergences, and the measured divergence"
    console.stdout.print(console.table(title, ["heads", "sum", "measured"], rows, left=1))
