"""Options that are the settings of dataclasses: of evaluation tasks, and of methods of measurement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from kvsurgery.cli.help import basic, in_group, sets
from kvsurgery.cli.options import LocalPath, Several, Tokens, flag
from kvsurgery.setting import Setting, settings_of

Kinds = Mapping[str, type[Any]]  # dataclasses by the names of their owners


@dataclass(frozen=True)
class _Entry:
    """A setting of one of several dataclasses: its owner, and the name, the type and the default of its field."""

    owner: str
    field: str
    hint: Any
    value: Any
    setting: Setting

    @property
    def type(self) -> click.ParamType:
        """The type of the option's values."""
        hint = self.hint
        if NoneType in get_args(hint):
            [hint] = [part for part in get_args(hint) if part is not NoneType]
        if get_origin(hint) is Literal:
            return click.Choice(get_args(hint))
        numbers = Tokens(self.setting.least) if self.setting.tokens else click.IntRange(min=self.setting.least)
        types = {int: numbers, float: click.FLOAT, str: click.STRING, bool: click.BOOL, Path: LocalPath()}
        return Several(types[get_args(hint)[0]]) if get_origin(hint) is tuple else types[hint]

    @property
    def default(self) -> str:
        """How --help shows the default: as it can be typed, or in parentheses."""
        if isinstance(self.setting.default, str):
            return f"({self.setting.default})"
        value = self.value if self.setting.default is None else self.setting.default
        if value is None or isinstance(value, bool):
            return ""
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def setting_options(kinds: Kinds, group: str) -> Callable[[Any], Any]:
    """A decorator that adds an option for every setting, grouped by owner.

    Args:
        group: the group of settings that all owners have.
    """

    def decorate(command: Any) -> Any:
        for option, entries in reversed(_entries(kinds).items()):
            owners = ", ".join(entry.owner for entry in entries)
            command = in_group(group if len(entries) == len(kinds) else owners, _option(option, entries))(command)
        return command

    return decorate


def given_settings(ctx: click.Context, kind: type[Any], preset: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The fields of a dataclass that were typed, or else that a preset has a value for, by option."""
    settings = {field: setting.option for field, setting in settings_of(kind).items()}
    return {
        field: chosen(ctx, option, preset)
        for field, option in settings.items()
        if _is_typed(ctx, option) or option in preset
    }


def chosen(ctx: click.Context, option: str, preset: Mapping[str, Any]) -> Any:
    """The value of an option: as it was typed, or else a preset's, or else its default."""
    return ctx.params[option] if _is_typed(ctx, option) else preset.get(option, ctx.params[option])


def foreign_options(ctx: click.Context, kinds: Kinds, chosen_owners: Collection[str]) -> Iterator[tuple[str, str]]:
    """Options that were typed but belong to none of the chosen owners, each with its owners."""
    for option, entries in _entries(kinds).items():
        owners = [entry.owner for entry in entries]
        if _is_typed(ctx, option) and not {*owners} & {*chosen_owners}:
            yield flag(option), ", ".join(owners)


def _is_typed(ctx: click.Context, option: str) -> bool:
    return ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE


def _entries(kinds: Kinds) -> dict[str, list[_Entry]]:
    """The settings that an option sets, by option."""
    result: dict[str, list[_Entry]] = {}
    for owner, kind in kinds.items():
        hints = get_type_hints(kind)
        values = {field.name: field.default for field in fields(kind)}
        for name, setting in settings_of(kind).items():
            result.setdefault(setting.option, []).append(_Entry(owner, name, hints[name], values[name], setting))
    return result


def _option(name: str, entries: list[_Entry]) -> Callable[[Any], Any]:
    """The option. Where help or defaults differ by owner, each begins with its owners."""
    texts = _owners((entry.setting.help, entry) for entry in entries)
    [text, *others] = texts
    text = _with_owners(texts) if others else f"{text[0].upper()}{text[1:]}"
    defaults = _owners((entry.default, entry) for entry in entries)
    [default_text, *others] = defaults
    if others:
        default_text = f"({_with_owners({default.strip('()'): owners for default, owners in defaults.items()})})"
    kind, [value, *more] = entries[0].type, {entry.value for entry in entries}
    has_plain_default = not more and isinstance(value, str | int) and not isinstance(value, bool)
    option = sets(
        {entry.field for entry in entries},
        click.option(
            flag(name),
            name,
            type=kind,
            is_flag=kind is click.BOOL,
            default=str(value) if has_plain_default else None,
            help=f"{text}.{default_text and f'  [default: {default_text}]'}",
        ),
    )
    return basic(option) if any(entry.setting.basic for entry in entries) else option


def _owners(pairs: Iterable[tuple[str, _Entry]]) -> dict[str, list[str]]:
    """The owners of each text."""
    result: dict[str, list[str]] = {}
    for text, entry in pairs:
        result.setdefault(text, []).append(entry.owner)
    return result


def _with_owners(texts: Mapping[str, list[str]]) -> str:
    """All texts, each after its owners."""
    return "; ".join(f"{', '.join(owners)}: {text}" for text, owners in texts.items())
