"""`kvsurgery sweep`: many conversions of one checkpoint, evaluated, and quality plotted against KV bytes."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsurgery.cli.options import Several, Tokens, decided, kind_options
from kvsurgery.cli.running import revision_option
from kvsurgery.cli.tasks import run_options, task_options, tasks_of

if TYPE_CHECKING:
    from kvsurgery.evaluate.sweep_results import Sweep

# axis -> what its values are, and what it says, as `convert` takes one of them
AXES: dict[str, tuple[click.ParamType, str]] = {
    "sparsity": (click.FLOAT, "Shares of heads that are not full."),
    "full_heads": (click.INT, "Instead: how many KV heads over the whole model stay full."),
    "sink": (Tokens(), "First tokens that a streaming head keeps.  [default: 64]"),
    "recent": (Tokens(), "Latest tokens that a streaming head keeps.  [default: 256]"),
    "budget": (
        Tokens(),
        "Tokens that a budgeted head keeps of a prompt, on average; the observation window comes on top, so a "
        'published "KV = 128" is 120 with --window 8.',
    ),
    "beta": (click.FLOAT, "How budgets follow the scores: the larger, the more even.  [default: 1.2]"),
    "kv_bits": (
        click.Choice(["16", "8", "4", "2"]),
        "Bits that full and budgeted heads are stored in, but for their newest tokens; 16 leaves them as they are.",
    ),
}
MOST_COMPARED = 3  # tasks and metrics up to which the table has differences too


def axis_options(command: Any) -> Any:
    """Add an option with several values for each axis."""
    for name, (kind, text) in reversed(AXES.items()):
        command = click.option(f"--{name.replace('_', '-')}", type=Several(kind), help=text)(command)
    return command


@click.command()
@click.argument("source", metavar="[SRC]", required=False)
@click.option("--profile", "profile_path", required=True, type=click.Path(path_type=Path), help="The head profile.")
@revision_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="sweep",
    show_default=True,
    help="Where everything is written; what was interrupted goes on there.",
)
@axis_options
@kind_options
@task_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def sweep(
    ctx: click.Context,
    source: str | None,
    profile_path: Path,
    revision: str | None,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert SRC in many ways, and ask all of them what the original is asked.

    SRC is a folder or a Hub id; without it, the model that the profile was measured on. Each option that takes several
    values is an axis, and every combination is a setting: it is converted into OUT, answers through its KV cache, and
    is removed, so that there is one at a time. The original answers once. A setting that gives no policy is left out,
    with the reason; settings that give the same policy are evaluated once.

    OUT then holds sweep.json, sweep.csv and sweep.png: quality against the bytes of the KV cache, the original's score
    as a line. Rings are around what nothing smaller scores as well as; bars are 95% intervals of the difference to the
    original. The same command goes on where it was interrupted, and with other values on the axes it computes only what
    is not there.

    \b
    kvsurgery sweep ./llama3 --profile duo.safetensors --sparsity 0.25,0.5,0.75 --kv-bits 16,4 --tasks needle
    kvsurgery sweep ./llama3 --profile duo.safetensors --sink 4,64 --recent 256,1K --tasks perplexity --text book.txt
    kvsurgery sweep ./llama3 --profile r2.safetensors --budget 64,128,256,512,1024 --beta 1.05,1.2,2 --tasks ruler
    """
    from transformers.utils import logging

    from kvsurgery import console
    from kvsurgery.cli.source import fetched
    from kvsurgery.evaluate.sweep import settings_of, sweep
    from kvsurgery.figure import can_draw
    from kvsurgery.processes import is_first
    from kvsurgery.report.sweep_charts import quality
    from kvsurgery.score.profile import HeadProfile

    axes = {name: values for name in AXES if (values := options[name]) is not None}
    if not axes:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in AXES)
        raise click.UsageError(f"there is nothing to vary: give values of any of {flags}, such as --sparsity 0.25,0.5")
    if "kv_bits" in axes:
        axes["kv_bits"] = tuple(int(bits) for bits in axes["kv_bits"])
    conversion = _conversion(axes, options)
    tasks, profile = tasks_of(ctx), HeadProfile.load(profile_path)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, known = fetched(source, revision, profile, lambda headers: settings_of(headers, profile, axes, conversion))
    run = run_options(ctx, folder)
    with console.step_progress("sweeping") as advance:
        found = sweep(
            folder,
            profile,
            axes,
            tasks,
            out,
            run,
            conversion={**conversion, **known},
            device=options["device"],
            command=shlex.join(["kvsurgery", *sys.argv[1:]]),
            progress=advance,
        )
    if not is_first():
        return
    if can_draw():
        quality(found).save(out)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        _show(found)
    for line in _notes(found):
        console.stderr.print(line, markup=False)
    if can_draw():
        console.stderr.print(f"wrote {out / 'sweep.png'}, sweep.json and sweep.csv", markup=False)
    else:
        console.stderr.print(
            f"wrote {out / 'sweep.json'} and sweep.csv; a picture needs pip install 'kvsurgery[plot]'", markup=False
        )


def _conversion(axes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What all settings share, as `Operation.prepare` takes it."""
    from kvsurgery.evaluate.sweep import PLAIN

    if options["method"] == "reform":
        raise click.UsageError("--method reform keeps every head full, so there is nothing to vary; leave it out")
    names = ("method", "rest", "window", "kernel_size", "pool", "group_reduce")
    names += ("kv_scheme", "kv_group_size", "kv_residual", "kv_streaming")
    # each setting has its own bits; what else there is to say about them goes with any
    bits = next((bits for bits in axes.get("kv_bits", ()) if bits != PLAIN), None)
    return decided(bits=bits, **{name: options[name] for name in names})


def _show(found: Sweep) -> None:
    """A row for each setting, the original's first."""
    from kvsurgery import console
    from kvsurgery.cli.evaluate import cells
    from kvsurgery.evaluate.results import CONVERTED, ORIGINAL
    from kvsurgery.evaluate.sweep_results import named, varied
    from kvsurgery.report.findings import titles

    compared, telling = len(found.original) <= MOST_COMPARED, varied(found.axes)
    columns = [*(name.replace("_", " ") for name in telling), "KV bytes", "of original"]
    whole = [ORIGINAL, *[""] * (len(telling) - 1), console.size(found.dense_bytes), "100.0%"]
    for title, result in zip(titles(found.original).values(), found.original, strict=True):
        columns += [title, *["difference [95%]"] * compared]
        whole += [*cells(result, [ORIGINAL]), *[""] * compared]
    rows = [whole]
    for point in found.points:
        row = [point.options[name] for name in telling]
        if point.skipped:
            rows.append([*row, *["-"] * (len(columns) - len(row))])
            continue
        row += [console.size(point.kv_bytes), f"{point.kv_bytes / found.dense_bytes:.1%}"]
        for result in point.tasks:
            _, score, difference = cells(result, [ORIGINAL, CONVERTED])
            row += [score, *[difference] * compared]
        rows.append(row)
    shared = named({name: values[0] for name, values in found.axes.items() if name not in telling})
    title = f"Quality against the KV cache of one sequence of {found.tokens:,} tokens{shared and ', with '}{shared}"
    console.stdout.print(console.table(title, columns, rows, left=0))


def _notes(found: Sweep) -> Iterator[str]:
    """What was left out, and what was evaluated once for several settings."""
    from kvsurgery.evaluate.sweep_results import named

    reasons = Counter(point.skipped for point in found.points if point.skipped)
    for reason, count in reasons.items():
        [some, *_] = (point for point in found.points if point.skipped == reason)
        yield f"left out: {named(some.options)}{f', and {count - 1} more' if count > 1 else ''}: {reason}"
    policies = [point.policy for point in found.points if point.policy]
    if same := len(policies) - len(set(policies)):
        yield f"{same} of {len(policies)} settings give the policy of another, and were not evaluated again"
    # what every model skips, which the original's results tell, and what only some do
    left = {(result.task, reason) for point in found.points for result in point.tasks for reason in result.skipped}
    for task, reason in sorted(left):
        yield f"{task}: samples left out, {reason}"
