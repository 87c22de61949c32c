"""Read TOML tables into typed dataclasses, check their types, and write TOML values."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from kvsurgery.errors import PolicyError


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Table = TypeVar("Table", bound=_Dataclass)


def read_table(kind: type[Table], table: Mapping[str, Any], prefix: str = "") -> Table:
    """Make a dataclass from a TOML table; fields that are dataclasses are tables inside it.

    Raises:
        PolicyError: a key is unknown or missing, or the class refuses a value. Messages put `prefix` before keys.
    """
    types, values = _types(kind), {}
    for key, value in table.items():
        if key not in types:
            matches = difflib.get_close_matches(key, types, 1)
            hint = f"did you mean `{prefix}{matches[0]}`?" if matches else f"known are {', '.join(types)}"
            raise PolicyError(f"unknown key `{prefix}{key}`; {hint}")
        [table_class] = [part for part in types[key] if is_dataclass(part)] or [None]
        if table_class and isinstance(value, dict):
            value = read_table(table_class, value, f"{key}.")
        values[key] = _frozen(value)
    for field in fields(kind):
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise PolicyError(f"`{prefix}{field.name}` is missing")
    return kind(**values)


def _frozen(value: Any) -> Any:
    """A TOML value with tuples in place of lists."""
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@cache
def _types(kind: type) -> dict[str, tuple[Any, ...]]:
    """The types that each field of a dataclass accepts."""
    hints = get_type_hints(kind)
    return {name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,) for name, hint in hints.items()}


def check_types(instance: Any, prefix: str = "") -> None:
    """Raise PolicyError where a field's value is not of its type."""
    for name, kinds in _types(type(instance)).items():
        value = getattr(instance, name)
        if not any(_has_type(value, kind) for kind in kinds):
            expected_types = " or ".join(_description(kind) for kind in kinds if kind is not NoneType)
            hint = _as_number(value) if int in kinds else ""
            raise PolicyError(f"`{prefix}{name}` is {expected_types}, got {value!r}{hint}")


def _as_number(value: Any) -> str:
    """A hint for numbers with a unit such as "2K" or "24GB", which options accept and TOML files do not."""
    match = re.fullmatch(r"(\d{1,9})([km]|[kmgt]i?b)", value, re.IGNORECASE) if isinstance(value, str) else None
    if match is None:
        return ""
    unit = match[2].lower()
    power = (1000 if unit[1:] == "b" else 1024) ** " kmgt".index(unit[0])
    return f"; write {int(match[1]) * power}"


def _has_type(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if get_origin(kind) in (Union, UnionType):
        return any(_has_type(value, part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if get_origin(kind) is Mapping:
        return isinstance(value, dict) and all(_has_type(item, get_args(kind)[1]) for item in value.values())
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def _description(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of strings"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(kind, "a table")


def to_toml(value: Any) -> str:
    """Write one value: a string, a number, a boolean, or a tuple of these."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON escapes like TOML, except for one character that JSON does not escape
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    return float.__repr__(value) if isinstance(value, float) else str(value)
