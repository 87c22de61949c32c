"""Options that say what models are asked and how, for all commands that evaluate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from kvsurgery.cli.options import Several, Tokens, flag
from kvsurgery.cli.running import CHUNK, POSITIVE, chosen_dtype, device_option, dtype_option, seed_option
from kvsurgery.evaluate.setting import TaskSetting, settings_of
from kvsurgery.evaluate.tasks import task_classes

if TYPE_CHECKING:
    from kvsurgery.evaluate.options import Options
    from kvsurgery.evaluate.sample import Task

_RUN = (
    click.option("--limit", type=POSITIVE, help="Maximum number of samples of each task, or of each of its subtasks."),
    click.option("--batch", type=POSITIVE, default=1, show_default=True, help="Number of samples per batch."),
    click.option("--chunk", type=Tokens(), help=f"{CHUNK.capitalize()}  [default: (all)]"),
    seed_option,
    device_option,
    dtype_option,
)


def task_options(command: Any) -> Any:
    """Add the options that say what is asked, and how."""
    for option in (_tasks_option(), *_setting_options(), *_RUN)[::-1]:
        command = option(command)
    return command


def tasks_of(ctx: click.Context) -> dict[str, Task]:
    """The tasks that a command with these options asks for, by name, checked as far as that needs no model.

    Raises:
        UsageError: an option belongs to tasks that are not asked for.
        KVSurgeryError: a setting is out of range, or an input cannot be read.
    """
    chosen, classes = ctx.params["tasks"], task_classes()
    given = {name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    for option, entries in _settings().items():
        if option in given and not {task for task, _, _ in entries} & {*chosen}:
            names = ", ".join(task for task, _, _ in entries)
            raise click.UsageError(
                f"{flag(option)} is an option of {names}, which --tasks does not name: add it, or leave the option out"
            )
    tasks = {}
    for name in chosen:
        settings = settings_of(classes[name]).items()
        values = {field: ctx.params[entry.option] for field, entry in settings if entry.option in given}
        tasks[name] = classes[name](**values)
    for task in tasks.values():
        task.check()
    return tasks


def run_options(ctx: click.Context, folder: Path) -> Options:
    """How a command with these options evaluates a checkpoint."""
    from kvsurgery.evaluate.options import Options

    dtype = chosen_dtype(ctx.params["dtype"], folder, ctx.params["device"])
    return Options(**{name: ctx.params[name] for name in ("limit", "batch", "chunk", "seed")}, dtype=dtype)


def _tasks_option() -> Callable[[Any], Any]:
    names = tuple(task_classes())
    return click.option(
        "--tasks",
        type=Several(click.Choice(names)),
        default="needle,passkey,perplexity",
        show_default=True,
        help=f"Any of {', '.join(names)}.",
    )


def _setting_options() -> Iterator[Callable[[Any], Any]]:
    for option, entries in _settings().items():
        task, field, setting = entries[0]
        kind = _type(get_type_hints(task_classes()[task])[field], setting)
        text = f"{', '.join(task for task, _, _ in entries)}: {setting.help}.{_default(entries)}"
        yield click.option(
            flag(option), option, type=kind, is_flag=kind is click.BOOL, default=_typed(entries), help=text
        )


def _settings() -> dict[str, list[tuple[str, str, TaskSetting]]]:
    """By option, whose it is: the tasks, their fields and the settings."""
    result: dict[str, list[tuple[str, str, TaskSetting]]] = {}
    for task, kind in task_classes().items():
        for field, setting in settings_of(kind).items():
            result.setdefault(setting.option, []).append((task, field, setting))
    return result


def _type(hint: Any, setting: TaskSetting) -> click.ParamType:
    """The type of an option whose values a field of this type takes."""
    [kind] = [part for part in get_args(hint) if part is not NoneType] if NoneType in get_args(hint) else [hint]
    numbers = Tokens() if setting.tokens else POSITIVE
    types = {int: numbers, float: click.FLOAT, str: click.STRING, bool: click.BOOL}
    return Several(types[get_args(kind)[0]]) if get_origin(kind) is tuple else types[kind]


def _default(entries: list[tuple[str, str, TaskSetting]]) -> str:
    """How --help shows the default: as it can be typed, or in parentheses."""
    shown: dict[str, list[str]] = {}
    for task, field, setting in entries:
        shown.setdefault(_shown(task, field, setting), []).append(task)
    if len(shown) == 1:
        [text] = shown
        return text and f"  [default: {text}]"
    each = (f"{', '.join(tasks)}: {text.strip('()')}" for text, tasks in shown.items())
    return f"  [default: ({'; '.join(each)})]"


def _typed(entries: list[tuple[str, str, TaskSetting]]) -> str | None:
    """The default of an option, where a task's field has one that can be typed and no other task has the option."""
    value = _value(*entries[0][:2])
    return str(value) if len(entries) == 1 and isinstance(value, str | int) and not isinstance(value, bool) else None


def _shown(task: str, field: str, setting: TaskSetting) -> str:
    if setting.default is not None:
        return f"({setting.default})"
    value = _value(task, field)
    if value is None or isinstance(value, bool):
        return ""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _value(task: str, field: str) -> Any:
    """The default of a task's field."""
    return next(entry.default for entry in fields(task_classes()[task]) if entry.name == field)
