"""What every command does with the profile that it made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvsurgery.cli.help import basic
from kvsurgery.cli.options import LocalPath

if TYPE_CHECKING:
    from kvsurgery.profile.cache_losses import CacheLosses
    from kvsurgery.profile.head_profile import HeadProfile


out_option = basic(
    click.option("-o", "--out", required=True, type=LocalPath(), help="The profile to write, a new file.")
)


def show_saved(profile: HeadProfile, out: Path) -> None:
    """Describe a profile that was written, and say what to do with it."""
    from kvsurgery.display import console
    from kvsurgery.profile.methods import SCORE_METHODS
    from kvsurgery.profile.summary import describe

    console.stdout.print(f"wrote {out}\n{describe(profile)}")
    method = SCORE_METHODS.get(profile.method)
    needs_budget = method is not None and method.rest == "budgeted" and method.kind != "budget"
    budget = " --budget 120" if needs_budget else ""
    console.stderr.print(f"Next: kvsurgery convert --profile {out}{budget} --out DIR")


def show_saved_losses(losses: CacheLosses, out: Path) -> None:
    """Show losses of caches that were written, and say what to do with them."""
    from kvsurgery.display import console

    console.stdout.print(f"wrote {out}")
    print_losses(losses)
    console.stderr.print(f"Next: kvsurgery convert --profile PROFILE --kv-bits 4 --kv-measured {out} --out DIR")


def print_losses(losses: CacheLosses) -> None:
    """Tables of what each width loses, by how it is rotated and clipped, and of how well losses of heads add up."""
    from kvsurgery.display import console

    rows = []
    for bits, settings in losses.settings.items():
        best = losses.best(bits)
        for setting in settings:
            mark = "best" if setting == best and len(settings) > 1 else ""
            clip = "yes" if setting.clip else "no"
            rows.append((bits, setting.rotate, clip, f"{setting.loss:.2g}", mark))
    title = f"Divergence of the next token with every head quantized, {losses.context:,} tokens of {losses.text}"
    console.stdout.print(console.table(title, ["bits", "rotated", "clipped", "nats", ""], rows, left=2))
    rows = [
        (combination.name, f"{combination.expected:.2g}", f"{combination.measured:.2g}")
        for combination in losses.combinations
    ]
    title = "Several heads at once: the sum of their own divergences, and the measured one"
    console.stdout.print(console.table(title, ["heads", "sum", "measured"], rows, left=1))
