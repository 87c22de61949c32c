"""`kvsurgery sweep`: many conversions of one checkpoint, evaluated, and quality plotted against KV bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsurgery.cli.help import HEADS, in_group, in_options
from kvsurgery.cli.options import Grouped, flag
from kvsurgery.cli.recipe_options import AXES, profile_option, recipe_of, sweep_options
from kvsurgery.cli.running import quiet_transformers, reserve, revision_option, typed_command
from kvsurgery.cli.tasks import out_option, run_options, task_options, tasks_of
from kvsurgery.errors import OutputError
from kvsurgery.recipe import Recipe

if TYPE_CHECKING:
    from kvsurgery.display.table import WideTable
    from kvsurgery.evaluate.sweep_results import Sweep


@click.command(cls=Grouped)
@click.argument("source", metavar="[SRC]", required=False)
@in_group(HEADS, profile_option)
@revision_option
@out_option("sweep")
@sweep_options
@task_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def sweep(
    ctx: click.Context,
    source: str | None,
    revision: str | None,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert SRC with many recipes, and evaluate each of them beside the original.

    SRC is a folder or a Hub id. The default is the model that the profile was measured on. Every option that takes a
    list is an axis, and every combination of values is a setting. Each setting is converted into OUT, evaluated through
    its KV cache and removed, one at a time. The original is evaluated once. Settings without a valid policy are left
    out with the reason, and settings with equal policies are evaluated once.

    OUT holds a report page, sweep.json, sweep.csv and sweep.png: quality against the bytes of the KV cache, with the
    original's score as a line. Rings mark settings that no smaller setting matches. Bars are 95% intervals of the
    difference to the original. To resume an interrupted run, rerun the same command; with more values on an
    axis, only new settings are computed.

    \b
    kvsurgery sweep ./llama3 --profile P.safetensors --sparsity 0.25,0.5,0.75
    kvsurgery sweep ./llama3 --kv-bits 8,4,3,2 --tasks perplexity --text book.txt
    kvsurgery sweep ./llama3 --profile duo.safetensors --sparsity 0.25,0.5,0.75 --kv-bits 16,4 --tasks needle
    kvsurgery sweep ./llama3 --profile duo.safetensors --sink 4,64 --recent 256,1K --tasks perplexity --text book.txt
    kvsurgery sweep ./llama3 --profile r2.safetensors --budget 64,128,256,512,1024 --beta 1.05,1.2,2 --tasks ruler
    """
    from kvsurgery.cli.source import request_of
    from kvsurgery.report.folder import check_new, check_output, has_page
    from kvsurgery.system.locks import reserved_folder

    axes = {name: values for name in AXES if (values := options[name]) is not None}
    if not axes:
        flags = ", ".join(map(flag, AXES))
        raise click.UsageError(f"there is nothing to vary: give values of any of {flags}, such as --sparsity 0.25,0.5")
    check_output(out)
    check_new(out)
    if has_page(out):
        raise OutputError(f"{out} holds other results than a sweep's; give the sweep a folder of its own with --out")
    reserve(reserved_folder(out))
    request = request_of(source, revision, _recipe(axes, options))
    if request.evidence.embedding is not None:
        raise click.UsageError("a sweep varies the heads of a profile with scores; leave the reform profile out")
    tasks = tasks_of(ctx)
    quiet_transformers()

    from kvsurgery.cli.evaluate import check_measured
    from kvsurgery.display import console
    from kvsurgery.evaluate.sweep import Grid, sweep
    from kvsurgery.report import write_sweep
    from kvsurgery.system.processes import is_first

    grid = Grid(Path(request.place), request.recipe, request.evidence, axes)
    folder, identity = request.fetched(lambda headers: replace(grid, source=headers).settings())
    run = run_options(ctx, folder)
    with console.step_progress("sweeping") as advance:
        raw_results = sweep(
            replace(grid, source=folder, **identity),
            tasks,
            out,
            run,
            device=options["device"],
            command=typed_command(),
            progress=advance,
            note=console.stderr.print,
        )
    if not is_first():
        return
    results = _with_options(raw_results)
    with console.drawing_progress() as advance:
        page = write_sweep(out, advance)
    if as_json:
        click.echo(json.dumps(results.to_json(), indent=2))
    else:
        _show(results)
    for line in _notes(results):
        console.stderr.print(line)
    console.stderr.print(f"wrote {page}, sweep.png, sweep.json and sweep.csv")
    check_measured([task for point in results.points for task in point.tasks])


def _recipe(axes: dict[str, Any], options: dict[str, Any]) -> Recipe:
    """What all settings share."""
    from kvsurgery.policy.layer_bits import UNQUANTIZED

    if options["method"] == "reform":
        raise click.UsageError("--method reform keeps every head full, so there is nothing to vary; leave it out")
    shared_options = {name: value for name, value in options.items() if name not in AXES}
    # each setting has its own bits; how a cache is quantized goes with any of them
    bits = [count for count in axes.get("kv_bits", ()) if count != UNQUANTIZED]
    return recipe_of(shared_options, **({"kv_bits": bits[0]} if bits else {}))


def _with_options(results: Sweep) -> Sweep:
    """The sweep with options in place of fields, where it says why settings are left out."""
    points = (replace(point, skipped=in_options(point.skipped)) if point.skipped else point for point in results.points)
    return replace(results, points=tuple(points))


def _show(results: Sweep) -> None:
    """The scores of each setting, with differences from the original where there is room for them."""
    from kvsurgery.display import console

    table = _table(results, has_differences=True)
    console.stdout.print(table if console.fits(table) else _table(results, has_differences=False))


def _table(results: Sweep, *, has_differences: bool) -> WideTable:
    """A row for each setting, the original's first."""
    from kvsurgery.cli.evaluate import scores, signed_difference
    from kvsurgery.display import console
    from kvsurgery.evaluate.results import CONVERTED, ORIGINAL
    from kvsurgery.evaluate.sweep_results import named, varied
    from kvsurgery.report.findings import titles

    varying = varied(results.axes)
    columns = [*(name.replace("_", " ") for name in varying), "KV bytes", "of original"]
    original_row = [ORIGINAL, *[""] * (len(varying) - 1), console.size(results.dense_bytes), "100.0%"]
    for title, result in zip(titles(results.original).values(), results.original, strict=True):
        columns += [title, *["difference [95%]"] * has_differences]
        original_row += [*scores(result, [ORIGINAL]), *[""] * has_differences]
    rows = [original_row]
    for point in results.points:
        row = [point.options[name] for name in varying]
        if point.kv_bytes is None:  # it is skipped
            rows.append([*row, *["-"] * (len(columns) - len(row))])
            continue
        row += [console.size(point.kv_bytes), f"{point.kv_bytes / results.dense_bytes:.1%}"]
        for result in point.tasks:
            row += [*scores(result, [CONVERTED]), *[signed_difference(result)] * has_differences]
        rows.append(row)
    constants = named({name: values[0] for name, values in results.axes.items() if name not in varying})
    title = (
        f"Quality against the KV cache of one sequence of {results.tokens:,} tokens{constants and ', with '}{constants}"
    )
    return console.table(title, columns, rows, left=0, keys=len(varying))


def _notes(results: Sweep) -> Iterator[str]:
    """What was left out, and what was evaluated once for several settings."""
    from kvsurgery.evaluate.sweep_results import named

    reasons = Counter(point.skipped for point in results.points if point.skipped)
    for reason, count in reasons.items():
        [example, *_] = (point for point in results.points if point.skipped == reason)
        yield f"left out: {named(example.options)}{f', and {count - 1} more' if count > 1 else ''}: {reason}"
    policies = [point.policy for point in results.points if point.policy]
    if duplicates := len(policies) - len(set(policies)):
        yield f"{duplicates} of {len(policies)} settings give the policy of another, and were not evaluated again"
    # what every model skips, which the original's results tell, and what only some do
    left_out = {
        (result.task, reason) for point in results.points for result in point.tasks for reason in result.skipped
    }
    for task, reason in sorted(left_out):
        yield f"{task}: samples left out, {reason}"
