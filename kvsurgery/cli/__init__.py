"""The command line: one module per command, imported when it is called, so that `--help` stays fast."""

from __future__ import annotations

import importlib
import io
import os
import sys

import click

from kvsurgery.cli.help import HelpGroup
from kvsurgery.errors import Interrupted, KVSurgeryError
from kvsurgery.version import __version__

LONGEST = 1000  # characters of an error
# in the order of work: name -> (module, one line for --help); the module holds a click command of its own name
COMMANDS = {
    "profile": ("profile", "Measure, import, show, compare and merge head profiles."),
    "fit": ("fit", "Find the least harmful policy that fits a memory budget."),
    "convert": ("convert", "Rewrite a checkpoint according to a head profile."),
    "verify": ("verify", "Check a converted checkpoint against its provenance."),
    "inspect": ("inspect", "Describe a checkpoint and its conversion."),
    "eval": ("evaluate", "Compare a converted checkpoint's answers with the original's."),
    "bench": ("bench", "Compare time and memory with the original."),
    "sweep": ("sweep", "Evaluate many policies and plot quality against KV bytes."),
    "report": ("report", "Write a page of results, or compare several checkpoints on one page."),
    "push": ("push", "Verify a converted checkpoint and upload it to the Hub."),
    "revert": ("revert", "Restore the original checkpoint, byte for byte."),
}


class LazyGroup(HelpGroup):
    """A group that imports a command's module only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = COMMANDS[cmd_name][0]
        return getattr(importlib.import_module(f"kvsurgery.cli.{module}"), module)

    def candidates(self, ctx: click.Context) -> dict[str, str]:
        from kvsurgery.cli.profile import profile

        return {name: f"profile {name}" for name in profile.commands} | super().candidates(ctx)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # of a command that has no hint of its own; click would exit with 1
            raise Interrupted("run the same command again") from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvsurgery")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def cli() -> None:
    """Rewrite checkpoints so that each attention head has a KV cache of its own size.

    \b
    kvsurgery profile import duo heads.tsv --model ./llama3 -o duo.safetensors
    kvsurgery convert ./llama3 --profile duo.safetensors --out ./llama3-duo
    kvsurgery verify ./llama3-duo
    """


def main() -> None:
    """Run the command line; an error is one line.

    Exit codes: 1 failure, 2 usage, 3 mismatch, 130 interrupted. When the reader of a pipe closes it early, as `head`
    does, the command ends with 1 and without a message: click, rich and Python itself do the same.
    """
    # `--debug` works anywhere, as people append it to the command that failed
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # file names need not be text that the terminal can show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            cli(arguments, prog_name="kvsurgery")
        finally:
            _flush_stdout()
    except (KVSurgeryError, OSError) as error:
        if len(arguments) < len(sys.argv) - 1 or os.environ.get("KVSURGERY_DEBUG"):
            raise
        click.echo(f"kvsurgery: {_line(error)}", err=True)
        sys.exit(error.exit_code if isinstance(error, KVSurgeryError) else 1)


def _flush_stdout() -> None:
    """Flush stdout. If that fails, drop the buffered text, or the interpreter would fail when it exits.

    Raises:
        OSError: stdout cannot be written, for example because its disk is full.
    """
    if sys.stdout is None:  # it was closed before the start
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _line(error: Exception) -> str:
    """The message of an error in one line, cut if it is long."""
    message = " ".join(str(error).splitlines())
    return message if len(message) <= LONGEST else f"{message[:LONGEST]} ..."
