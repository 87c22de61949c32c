"""Options that say what models are asked and how, for all commands that evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvsurgery.cli.options import NEEDLES, Several, Tokens
from kvsurgery.cli.running import (
    CHUNK,
    DEPTHS,
    PASSKEY_TOKENS,
    PASSKEYS,
    POSITIVE,
    TEXT,
    chosen_dtype,
    device_option,
    dtype_option,
    seed_option,
)

if TYPE_CHECKING:
    from kvsurgery.evaluate.runner import Options
    from kvsurgery.evaluate.sample import Task

# option -> its type, its default and what it says; `_FIELDS` says whose it is
_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "lengths": (Several(Tokens()), None, "tokens of prompts.  [default: (five up to 32000; ruler: 4K)]"),
    "text": (str, None, TEXT),
    "samples": (POSITIVE, None, "prompts of each length.  [default: (5, 10, and 20 of each of RULER's tasks)]"),
    "depths": (Several(click.FLOAT), None, DEPTHS),
    "needles": (str, "auto", NEEDLES),
    "passkeys": (POSITIVE, 10, PASSKEYS),
    "passkey_tokens": (click.IntRange(min=2), 32, PASSKEY_TOKENS),
    "passkey_hidden": (str, None, "what stands in the text, with {key} and maybe {ordinal}."),
    "passkey_asked": (str, None, "the question; one that ends in {cue} says the passkey's first token."),
    "continuation": (Tokens(), 256, "last tokens of a prompt, read one by one, that are measured."),
    "ruler_tasks": (Several(click.STRING), None, "such as niah_single_1,vt.  [default: (all that can be made)]"),
    "squad": (str, None, "a file of SQuAD, for qa_1."),
    "hotpot": (str, None, "a file of HotpotQA, for qa_2."),
    "babilong": (str, "RMT-team/babilong", "a file, a folder or the Hub id of a dataset."),
    "babilong_tasks": (Several(click.STRING), None, "such as qa1,qa2.  [default: (those that are there)]"),
    "babilong_lengths": (Several(click.STRING), None, "such as 0k,4k.  [default: (those that are there)]"),
    "longbench": (str, "THUDM/LongBench", "a file, a folder or the Hub id of a dataset."),
    "longbench_datasets": (Several(click.STRING), None, "such as hotpotqa.  [default: (those that are there)]"),
    "longbench_extended": (click.BOOL, None, "LongBench-E, whose scores are shown by length too."),
    "longbench_prompts": (str, None, "a file such as LongBench's dataset2prompt.json.  [default: (shipped)]"),
}
# task -> option -> the field of the task that it sets
_FIELDS: dict[str, dict[str, str]] = {
    "needle": {"lengths": "lengths", "text": "text", "depths": "depths", "needles": "needles"},
    "passkey": {
        **{"lengths": "lengths", "text": "text", "samples": "prompts", "passkeys": "count", "passkey_tokens": "size"},
        **{"passkey_hidden": "hidden", "passkey_asked": "asked"},
    },
    "perplexity": {"lengths": "lengths", "text": "text", "samples": "pieces", "continuation": "continuation"},
    "ruler": {
        **{"lengths": "lengths", "text": "text", "samples": "count", "ruler_tasks": "tasks"},
        **{"squad": "squad", "hotpot": "hotpot"},
    },
    "babilong": {"babilong": "source", "babilong_tasks": "tasks", "babilong_lengths": "lengths"},
    "longbench": {
        **{"longbench": "source", "longbench_datasets": "datasets"},
        **{"longbench_extended": "extended", "longbench_prompts": "prompts"},
    },
}
TASKS = tuple(_FIELDS)
_RUN = (
    click.option("--limit", type=POSITIVE, help="Samples of a task at most, the first ones."),
    click.option("--batch", type=POSITIVE, default=1, show_default=True, help="Samples that are read at once."),
    click.option("--chunk", type=Tokens(), help=f"{CHUNK.capitalize()}  [default: (all)]"),
    seed_option,
    device_option,
    dtype_option,
)


def task_options(command: Any) -> Any:
    """Add the options that say what is asked, and how."""
    for option in reversed(_RUN):
        command = option(command)
    for name, (kind, default, text) in reversed(_OPTIONS.items()):
        flag, text = f"--{name.replace('_', '-')}", f"{', '.join(_tasks_with(name))}: {text}"
        shown, is_flag = default is not None, kind is click.BOOL
        option = click.option(flag, type=kind, is_flag=is_flag, default=default, show_default=shown, help=text)
        command = option(command)
    return click.option(
        "--tasks",
        type=Several(click.Choice(TASKS)),
        default="needle,passkey,perplexity",
        show_default=True,
        help=f"Any of {', '.join(TASKS)}.",
    )(command)


def tasks_of(ctx: click.Context) -> dict[str, Task]:
    """The tasks that a command with these options asks for, by name.

    Raises:
        UsageError: an option is of a task that is not asked for.
    """
    from kvsurgery.evaluate.babilong import BabilongTask
    from kvsurgery.evaluate.longbench import LongBenchTask
    from kvsurgery.evaluate.needle import NeedleTask
    from kvsurgery.evaluate.passkey import PasskeyTask
    from kvsurgery.evaluate.perplexity import PerplexityTask
    from kvsurgery.evaluate.ruler import RulerTask

    made: dict[str, Any] = {
        "needle": NeedleTask,
        "passkey": PasskeyTask,
        "perplexity": PerplexityTask,
        "ruler": RulerTask,
        "babilong": BabilongTask,
        "longbench": LongBenchTask,
    }
    chosen = ctx.params["tasks"]
    for name in _OPTIONS:
        given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and not set(tasks := _tasks_with(name)) & set(chosen):
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} is of {', '.join(tasks)}: add that to --tasks, or leave the option out")
    # what is not given is as the task has it
    tasks = {
        task: made[task](
            **{field: value for name, field in _FIELDS[task].items() if (value := ctx.params[name]) is not None}
        )
        for task in chosen
    }
    _check_inputs(ctx, tasks)
    return tasks


def _check_inputs(ctx: click.Context, tasks: dict[str, Any]) -> None:
    """Refuse what cannot be read, before the tasks that come first have made their samples."""
    from kvsurgery.evaluate.rows import check_source
    from kvsurgery.files import check_readable
    from kvsurgery.text.haystack import check_text
    from kvsurgery.text.needle_sets import AUTO, read_set

    check_text(ctx.params["text"])
    if "needle" in tasks and tasks["needle"].needles != AUTO:
        read_set(tasks["needle"].needles)
    for name in ("squad", "hotpot"):
        if (path := ctx.params[name]) is not None:
            check_readable(path)
    if "babilong" in tasks:
        check_source(tasks["babilong"].source)
    if "longbench" in tasks:
        tasks["longbench"].check()


def run_options(ctx: click.Context, folder: Path) -> Options:
    """How a command with these options evaluates a checkpoint."""
    from kvsurgery.evaluate.runner import Options

    dtype = chosen_dtype(ctx.params["dtype"], folder, ctx.params["device"])
    return Options(**{name: ctx.params[name] for name in ("limit", "batch", "chunk", "seed")}, dtype=dtype)


def _tasks_with(option: str) -> tuple[str, ...]:
    return tuple(task for task, fields in _FIELDS.items() if option in fields)
