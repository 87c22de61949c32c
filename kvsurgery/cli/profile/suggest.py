"""`kvsurgery profile suggest`: list the published profiles that fit a model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvsurgery.cli.help import HelpPage
from kvsurgery.cli.running import check_revision, revision_option

if TYPE_CHECKING:
    from kvsurgery.measure.cost import Cost
    from kvsurgery.profile.suggestion import Suggestion


@click.command(cls=HelpPage)
@click.argument("source", metavar="MODEL")
@revision_option
@click.option("--all", "everything", is_flag=True, help="Also list the profiles that do not fit, and why.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def suggest(source: str, revision: str | None, everything: bool, as_json: bool) -> None:
    """List the published profiles that fit MODEL, and estimate the cost of measuring one.

    MODEL is a folder, a config.json or a Hub id, of which only the headers are read. A profile fits if family and
    dimensions are the same. The best profiles come first: those measured on MODEL itself, then on a relative (by the
    names of both and `base_model` in the model card), then on another model of the same shape.

    The cost of measuring is an estimate: two operations for each weight and attended state, with the defaults of
    `profile compute`, on an H100 that reaches 40% of its peak.

    \b
    kvsurgery profile suggest Qwen/Qwen3-4B-Thinking-2507
    kvsurgery profile suggest ./llama3-finetuned --all
    """
    from kvsurgery.display import console
    from kvsurgery.profile.suggestion import ModelIdentity, suggestions

    with _folder(source, revision) as folder:
        model = ModelIdentity.read(folder, source)
        costs = _costs(folder)
    ranked_suggestions = suggestions(model)
    if as_json:
        facts = {
            "model": source,
            "family": model.family,
            "made_from": sorted(model.ancestors),
            "profiles": [suggestion.to_json(source, revision) for suggestion in ranked_suggestions],
            "measuring_estimate": [cost.to_json() for cost in costs],
        }
        click.echo(json.dumps(facts, indent=2))
        return
    made_from = f"; made from {', '.join(sorted(model.ancestors))}" if model.ancestors else ""
    console.stdout.print(f"{source}: {model.family}, {model.dimensions}{made_from}")
    _print(ranked_suggestions, source, revision, everything)
    _print_costs(costs, source, revision)


@contextmanager
def _folder(source: str, revision: str | None) -> Generator[Path]:
    """A folder with the config and the headers of a model."""
    from kvsurgery.profile.profiled_model import local_folder

    folder = local_folder(source)
    if folder is not None:
        check_revision(str(folder), revision)
        yield folder
    else:
        from kvsurgery import hub

        with hub.headers(source, revision) as remote:
            yield remote.folder


def _costs(folder: Path) -> list[Cost]:
    """The estimated costs of measuring; empty if the folder has no weights."""
    from kvsurgery.checkpoint.source import INDEX, SINGLE, Checkpoint
    from kvsurgery.measure.cost import costs

    if not any((folder / name).exists() for name in (SINGLE, INDEX)):
        return []
    return costs(Checkpoint.open(folder))


def _print(suggestions: list[Suggestion], source: str, revision: str | None, everything: bool) -> None:
    """Print the profiles that fit with their import commands, then the others with the reason."""
    from kvsurgery.display import console
    from kvsurgery.profile.suggestion import FITS

    say = console.stdout.print
    for fit, title in FITS.items():
        matching = [suggestion for suggestion in suggestions if suggestion.fit == fit]
        if fit == "no" and not everything:
            say(f"\n{len(matching)} published profiles are of other families or dimensions; --all lists them")
        elif matching:
            say(f"\n{title}:")
            for suggestion in matching:
                _print_suggestion(suggestion, source, revision, say)
    if all(suggestion.fit == "no" for suggestion in suggestions):
        say("\nNo published profile fits; measure one.")


def _print_suggestion(suggestion: Suggestion, source: str, revision: str | None, say: Callable[..., None]) -> None:
    """Print a profile, the reason why it fits or not, and the commands that import it."""
    note = f" ({suggestion.published.note})" if suggestion.published.note else ""
    say(f"  {suggestion.published.format}: {suggestion.reason}{note}")
    for command in suggestion.published.commands(source, revision) if suggestion.fit != "no" else ():
        say(f"    {command}")


def _print_costs(costs: list[Cost], source: str, revision: str | None) -> None:
    """Print the estimated costs, with the assumptions behind them."""
    from kvsurgery.display import console
    from kvsurgery.measure.cost import DEVICE, FLOPS
    from kvsurgery.profile.profiled_model import local_folder

    if not costs:
        console.stderr.print("the cost of measuring cannot be estimated without weights")
        return
    rows = [
        (cost.method, f"{cost.prompts:,}", f"{cost.tokens / 1e6:.1f} M", cost.passes, _time(cost.hours))
        for cost in costs
    ]
    console.stdout.print()
    console.stdout.print(
        console.table("Estimated cost of measuring", ["method", "prompts", "tokens", "passes", f"one {DEVICE}"], rows)
    )
    folder = local_folder(source)
    model_words = [source, *(["--revision", revision] if revision else [])] if folder is None else [str(folder)]
    command = [
        "kvsurgery",
        "profile",
        "compute",
        *model_words,
        "--method",
        costs[0].method,
        "-o",
        "profile.safetensors",
    ]
    console.stdout.print(
        f"Estimates: 2 operations per weight and attended state, at {FLOPS / 1e12:.0f} TFLOP/s. Nothing was timed: "
        f"expect more. The weights take {console.size(costs[0].weights)}.\n"
        f"Measure: {shlex.join(command)}"
    )


def _time(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min" if hours >= 1 / 60 else "< 1 min"
