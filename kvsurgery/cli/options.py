"""Options as people write them: numbers with units, lists, and groups of options in --help."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from kvsurgery.errors import PolicyError, RecipeError


def flag(name: str) -> str:
    """The option of a parameter: `--full-heads` of `full_heads`."""
    return f"--{name.replace('_', '-')}"


class LocalPath(click.Path):
    """The path of a file or a folder. An empty one is refused, since `Path` takes it for the working directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


class Size(click.ParamType):
    """Bytes: 24GB is 24 x 10^9, 24GiB is 24 x 2^30."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?(?:([kmgt])(i?))?b", str(value), re.IGNORECASE)
        if not match:
            self.fail(f"{value!r} is not a size; write 24GB, which is 24 x 10^9 bytes, or 24GiB, 24 x 2^30", param, ctx)
        power = " kmgt".index((match[2] or " ").lower())
        return int(Fraction(match[1]) * (1024 if match[3] else 1000) ** power)


class Tokens(click.ParamType):
    """Tokens: 128K is 128 x 1024 and 1M is 1024 x 1024, as models' names have it; 128000 is as written.

    Args:
        least: the smallest number.
    """

    name = "tokens"

    def __init__(self, least: int = 0):
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d{1,12})([km]?)", str(value), re.IGNORECASE)
        if not match:
            self.fail(f"{value!r} is not a number of tokens; write 131072, or 128K, which is the same", param, ctx)
        tokens = int(match[1]) * 1024 ** " km".index(match[2].lower() or " ")
        if tokens < self.least:
            self.fail(f"{value} tokens are too few; give {self.least} or more", param, ctx)
        return tokens


class Several(click.ParamType):
    """Numbers with commas between them."""

    name = "list"

    def __init__(self, item: click.ParamType):
        self.item = item

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self.item.convert(part.strip(), param, ctx) for part in str(value).split(","))


class Bits(click.Choice):
    """Bits of a quantized cache, 16 where one that is not quantized can be chosen, and auto where layers can differ."""

    def __init__(self, *bits: int | str):
        super().__init__([str(count) for count in bits])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        choice = super().convert(str(value), param, ctx)
        return int(choice) if choice.isdigit() else choice


class SuggestingGroup(click.Group):
    """A group that knows which of its commands a mistyped name may mean."""

    def candidates(self, ctx: click.Context) -> dict[str, str]:
        """What can be meant, by the names that are typed."""
        return {name: name for name in self.list_commands(ctx)}

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that was typed.

        Raises:
            UsageError: there is none; it names the most similar one.
        """
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            candidates = self.candidates(ctx)
            similar_names = get_close_matches(name, candidates, n=1)
            hint = f" Did you mean `{ctx.command_path} {candidates[similar_names[0]]}`?" if similar_names else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)


class Grouped(click.Command):
    """A command whose --help shows its options in the groups that `in_group` puts them in."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; the error of a policy names the recipe's file, which may have the setting that is at fault.

        Raises:
            PolicyError: as the command raises it.
        """
        try:
            return super().invoke(ctx)
        except PolicyError as error:
            path = ctx.params.get("recipe_path")
            if path is None or isinstance(error, RecipeError):
                raise
            raise PolicyError(f"{error} (with the recipe {path})") from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(param, "group", RUNNING), []).append(record)
        groups[RUNNING] = groups.pop(RUNNING)  # the last one
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


HEADS, CACHE, PROMPTS, DEVICES = "Heads", "Cache", "Long prompts", "Several devices"
MEASUREMENT, TASKS, RUNNING = "Measurement", "Evaluation", "Running"
# in this order, whatever that of the options is; others come before the last
GROUPS = (HEADS, CACHE, PROMPTS, DEVICES, MEASUREMENT, TASKS, RUNNING)


def in_group(name: str, *decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator like all of these together, whose options stand in one group of --help."""

    def decorate(command: Any) -> Any:
        start = len(getattr(command, "__click_params__", ()))
        for decorator in reversed(decorators):
            command = decorator(command)
        for param in command.__click_params__[start:]:
            param.group = name
        return command

    return decorate


def group_reduce_option(text: str) -> Callable[[Any], Any]:
    """The option `--group-reduce` of a command on profiles, with its help."""
    reductions = click.Choice(["mean", "max"])
    return click.option("--group-reduce", type=reductions, default="mean", show_default=True, help=text)
