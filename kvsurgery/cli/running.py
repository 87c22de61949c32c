"""Options and helpers of the commands that run models: device, dtype, seed, remote code, revision."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click

from kvsurgery.system.repo_id import checkpoint_folder

DTYPES = ("auto", "float32", "bfloat16", "float16")
POSITIVE = click.IntRange(min=1)


class Device(click.ParamType):
    """A device: cpu, cuda, or one of several GPUs such as cuda:1."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", value):
            self.fail(f"{value!r} is not a device; write cpu, cuda or cuda:1", param, ctx)
        return value


device_option = click.option("--device", type=Device(), help="Device to run on.  [default: (cuda if available)]")
dtype_option = click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    help="Dtype of weights and KV cache; auto is the checkpoint's, or float32 on a CPU without instructions for it.",
)
seed_option = click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Random seed.")
trust_remote_code_option = click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run code that the config, the tokenizer or the processor of the checkpoint names; read it first.",
)
revision_option = click.option("--revision", help="Branch, tag or commit on the Hub.")


def check_revision(source: str, revision: str | None) -> None:
    """Refuse --revision with a folder, where it would have no effect.

    Raises:
        UsageError: a revision is given with a folder.
    """
    if revision is not None and checkpoint_folder(source) is not None:
        raise click.UsageError(f"--revision requires a Hub id, but {source} is a folder")


def typed_command(without: str | None = None, more: Sequence[str] = ()) -> str:
    """The command as typed, for results and hints; without one option, and with more words."""
    return shlex.join(["kvsurgery", *(word for word in sys.argv[1:] if word != without), *more])


def with_value(option: str, value: object) -> str:
    """The command as typed, with another value of an option."""
    words, rest = [], iter(sys.argv[1:])
    for word in rest:
        if word == option:
            next(rest, None)
        elif not word.startswith(f"{option}="):
            words.append(word)
    return shlex.join(["kvsurgery", *words, option, str(value)])


def reserve(reservation: AbstractContextManager[None]) -> None:
    """Keep other processes from writing a command's output until the command ends.

    Of the processes that a launcher started, only the first one writes, so only this one takes the lock.

    Raises:
        OutputError: another process writes to it, or it cannot be written.
    """
    if os.environ.get("RANK", "0") == "0":
        click.get_current_context().with_resource(reservation)


def quiet_transformers() -> None:
    """Import transformers, after a message because it takes seconds, without its warnings and progress bars."""
    if "transformers" not in sys.modules and os.environ.get("RANK", "0") == "0":
        click.echo("loading torch and transformers", err=True)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def chosen_dtype(dtype: str, source: str | Path, device: str | None, revision: str | None = None) -> str:
    """The dtype in which to measure a folder or a Hub id.

    "auto" becomes float32, with a message on stderr, if the CPU is slow in the checkpoint's dtype.
    """
    from kvsurgery.checkpoint.dtype import INSTRUCTIONS, slow_on_cpu, stored_dtype
    from kvsurgery.display import console
    from kvsurgery.system.processes import is_first, usable_device

    if dtype != "auto" or usable_device(device) != "cpu" or not any(map(slow_on_cpu, INSTRUCTIONS)):
        return dtype
    file_dtype = stored_dtype(_config_folder(source, revision))
    if not slow_on_cpu(file_dtype):
        return dtype
    if is_first():
        console.stderr.print(
            f"measuring in float32: this CPU has no {file_dtype} instructions; --dtype {file_dtype} measures in the "
            "checkpoint's dtype, slowly"
        )
    return "float32"


def _config_folder(source: str | Path, revision: str | None) -> Path:
    """The folder of a checkpoint's config, which is downloaded for a Hub id. A `Path` is never a Hub id."""
    folder = source if isinstance(source, Path) else checkpoint_folder(source)
    if folder is not None:
        return folder
    from kvsurgery import hub

    return hub.fetch_config(str(source), revision)[0]
