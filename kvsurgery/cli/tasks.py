"""The options of evaluation tasks, for `eval` and `sweep`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsurgery.cli.help import TASKS, basic, in_group
from kvsurgery.cli.options import LocalPath, Several, Tokens
from kvsurgery.cli.running import (
    POSITIVE,
    chosen_dtype,
    device_option,
    dtype_option,
    seed_option,
    trust_remote_code_option,
)
from kvsurgery.cli.settings import chosen, foreign_options, given_settings, setting_options
from kvsurgery.evaluate.tasks import task_classes
from kvsurgery.setting import CHUNK_HELP

if TYPE_CHECKING:
    from kvsurgery.evaluate.options import Options
    from kvsurgery.evaluate.sample import Task


def task_options(command: Any) -> Any:
    """Add the options of the tasks and of a run; settings are grouped by the tasks that they belong to."""
    names = tuple(task_classes())
    run = (
        basic(
            click.option(
                "--tasks",
                type=Several(click.Choice(names)),
                default="needle,passkey,perplexity",
                show_default=True,
                help=f"Any of {', '.join(names)}.",
            )
        ),
        click.option(
            "--limit",
            type=POSITIVE,
            help="Maximum number of prompts of each task over all lengths, or of each of its subtasks.",
        ),
        click.option("--batch", type=POSITIVE, default=1, show_default=True, help="Number of samples per batch."),
        click.option("--chunk", type=Tokens(1), help=f"{CHUNK_HELP.capitalize()}.  [default: (all)]"),
        seed_option,
        device_option,
        dtype_option,
        trust_remote_code_option,
    )
    return in_group(TASKS, *run)(setting_options(task_classes(), TASKS)(command))


def out_option(default: str) -> Callable[[Any], Any]:
    """The option --out of an evaluation, with a default folder."""
    return basic(
        click.option(
            "--out",
            type=LocalPath(),
            default=default,
            show_default=True,
            help="Output folder; an interrupted run continues there.",
        )
    )


def tasks_of(ctx: click.Context, preset: Mapping[str, Any] = {}) -> dict[str, Task]:
    """The chosen tasks by name, after all checks that need no model.

    Args:
        preset: values by option, for options that were not given.

    Raises:
        UsageError: an option belongs to tasks that were not chosen.
        KVSurgeryError: a setting is out of range, or an input cannot be read.
    """
    task_names = chosen(ctx, "tasks", preset)
    classes = task_classes()
    for option, owners in foreign_options(ctx, classes, task_names):
        raise click.UsageError(
            f"{option} is an option of {owners}, which --tasks does not name: add it, or leave the option out"
        )
    tasks = {name: classes[name](**given_settings(ctx, classes[name], preset)) for name in task_names}
    for task in tasks.values():
        task.check()
    return tasks


def run_options(ctx: click.Context, folder: Path, preset: Mapping[str, Any] = {}) -> Options:
    """The options of a run on a checkpoint; `preset` as in `tasks_of`."""
    from kvsurgery.evaluate.options import Options

    dtype = chosen_dtype(ctx.params["dtype"], folder, ctx.params["device"])
    values = {name: chosen(ctx, name, preset) for name in ("limit", "batch", "chunk", "seed")}
    return Options(**values, dtype=dtype, trust_remote_code=ctx.params["trust_remote_code"])
