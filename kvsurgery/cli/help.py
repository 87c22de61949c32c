"""Help in two lengths: `--help` shows the most important options, `--help-all` shows all of them by group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any

import click

from kvsurgery.errors import KVSurgeryError, RecipeError, renamed

EXAMPLES = 2  # in the shorter help
_ALL = "kvsurgery.help_all"  # in a context's `meta`: whether every option is shown

HEADS, CACHE, PROMPTS, DEVICES, ADAPTERS = "Heads", "Cache", "Long prompts", "Several devices", "Adapters"
MEASUREMENT, TASKS, RUNNING = "Measurement", "Evaluation", "Running"
# in the order of --help-all; any other group comes before the last one
GROUPS = (HEADS, CACHE, PROMPTS, DEVICES, ADAPTERS, MEASUREMENT, TASKS, RUNNING)


def in_group(name: str, *decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Combine decorators, and put their options into one group of --help-all."""
    return _marked(decorators, "group", name)


def basic(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Combine decorators, and show their options in --help too."""
    return _marked(decorators, "basic", True)


def sets(names: Collection[str], *decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Combine decorators, and record which settings of the library their options set."""
    return _marked(decorators, "settings", names)


def in_options(message: str) -> str:
    """Replace the settings named in a message of the library by options of the running command."""
    return renamed(message, _options_by_setting(click.get_current_context().command))


def _options_by_setting(command: click.Command) -> dict[str, str]:
    """A command's options as typed, by the settings that they set and by their own names, which take precedence."""
    flags = {param: max(param.opts, key=len) for param in command.params if isinstance(param, click.Option)}
    by_setting = {name: text for param, text in flags.items() for name in getattr(param, "settings", ())}
    return by_setting | {param.name: text for param, text in flags.items() if param.name}


def _marked(decorators: tuple[Callable[[Any], Any], ...], attribute: str, value: Any) -> Callable[[Any], Any]:
    """Combine decorators, and set an attribute of their options."""

    def decorate(command: Any) -> Any:
        start = len(getattr(command, "__click_params__", ()))
        for decorator in reversed(decorators):
            command = decorator(command)
        for param in command.__click_params__[start:]:
            setattr(param, attribute, value)
        return command

    return decorate


class HelpPage(click.Command):
    """A command with `--help-all`.

    If the command has `basic` options, `--help` is short: the description's first paragraph, the first examples, and
    the `basic` options with the first sentence of their help, required ones first.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; errors of the library then name its options."""
        try:
            return super().invoke(ctx)
        except RecipeError:  # names keys of a file
            raise
        except KVSurgeryError as error:
            error.args = (renamed(str(error), _options_by_setting(self)),)
            raise

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        help_all = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help="Show every option and exit.",
        )
        return [*super().get_params(ctx), help_all]

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        text = inspect.cleandoc(self.help or "")
        if self._is_short(ctx):
            first, *others = text.split("\n\n")
            examples = "\n".join(others[-1].splitlines()[: 1 + EXAMPLES]) if others else ""
            text = f"{first}\n\n{examples}".rstrip()
        if not text:
            return
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        if self._is_short(ctx):
            shown = sorted(filter(_is_basic, options), key=lambda option: not option.required)
            sections = {"Options": [(names, _first_sentence(text)) for names, text in _records(shown, ctx)]}
        else:
            sections = _by_group(options, ctx)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)
        if self._is_short(ctx):
            formatter.write_paragraph()
            formatter.write_text(f"{len(options) - len(shown)} more options: {ctx.command_path} --help-all")

    def _is_short(self, ctx: click.Context) -> bool:
        return _ALL not in ctx.meta and any(map(_is_basic, self.params))


class HelpGroup(HelpPage, click.Group):
    """A group of commands, each with `--help-all`, that suggests the command closest to a mistyped name."""

    command_class = HelpPage

    def candidates(self, ctx: click.Context) -> dict[str, str]:
        """The commands that can be suggested, by the name that is compared with the typed one."""
        return {name: name for name in self.list_commands(ctx)}

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that was typed.

        Raises:
            UsageError: no such command; the message names the most similar one.
        """
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            candidates = self.candidates(ctx)
            similar_names = get_close_matches(name, candidates, n=1)
            hint = f" Did you mean `{ctx.command_path} {candidates[similar_names[0]]}`?" if similar_names else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        click.Group.format_options(self, ctx, formatter)


def _show_all(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Print the long help if it was asked for."""
    if is_asked and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _is_basic(param: click.Parameter) -> bool:
    return getattr(param, "basic", False)


def _records(options: list[click.Option], ctx: click.Context) -> list[tuple[str, str]]:
    """Names and text of each option that is not hidden."""
    flags = _options_by_setting(ctx.command)
    records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
    return [(names, renamed(text, flags)) for names, text in records]


def _by_group(options: list[click.Option], ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Names and text of each option, by group."""
    groups: dict[str, list[click.Option]] = {name: [] for name in GROUPS}
    for option in options:
        groups.setdefault(getattr(option, "group", RUNNING), []).append(option)
    groups[RUNNING] = groups.pop(RUNNING)  # the last one
    return {name: _records(members, ctx) for name, members in groups.items() if members}


def _first_sentence(text: str) -> str:
    """The first sentence of an option's help, and the brackets at its end."""
    sentence, gap, bracket = text.partition("  [")
    return sentence.partition(". ")[0].removesuffix(".") + "." + gap + bracket
