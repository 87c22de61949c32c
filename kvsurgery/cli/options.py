"""Parameter types of the command line: numbers with units, lists, and paths."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from kvsurgery.cli.help import HelpPage
from kvsurgery.errors import PolicyError, RecipeError
from kvsurgery.templates.kv_layout import TILE, Quantization


def flag(name: str) -> str:
    """The option of a parameter: `--full-heads` of `full_heads`."""
    return f"--{name.replace('_', '-')}"


class LocalPath(click.Path):
    """The path of a file or a folder; an empty one is refused, because `Path` would be the working directory."""

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
    """Number of tokens: 128K is 128 x 1024 and 1M is 1024 x 1024, as in model names; 128000 is exact.

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
    """A comma-separated list of values."""

    name = "list"

    def __init__(self, item: click.ParamType):
        self.item = item

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self.item.convert(part.strip(), param, ctx) for part in str(value).split(","))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the last item of the list."""
        *earlier, last = incomplete.split(",")
        items = self.item.shell_complete(ctx, param, last)
        return [CompletionItem(",".join([*earlier, item.value]), type=item.type) for item in items]


class Bits(click.Choice):
    """Bits of a cache, or of its keys and values, such as k3v2.

    Some options also take 16, for an unquantized cache, or auto and source, for a width for each layer.
    """

    def __init__(self, *bits: int | str):
        super().__init__([str(count) for count in bits])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value)
        if text in self.choices:
            return int(text) if text.isdigit() else text
        quantization = Quantization(text)
        try:
            quantization.check(TILE)  # heads of 128 can have any width
        except ValueError:
            accepted = ", ".join(self.choices)
            self.fail(f"{text!r} is not one of {accepted}, or two widths for keys and values, such as k3v2", param, ctx)
        return quantization.bits


class Grouped(HelpPage):
    """A command whose policy errors also name the recipe file, because the wrong setting may be in it."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

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


def group_reduce_option(text: str) -> Callable[[Any], Any]:
    """The option `--group-reduce` of a command on profiles, with a help text."""
    reductions = click.Choice(["mean", "max"])
    return click.option("--group-reduce", type=reductions, default="mean", show_default=True, help=text)
