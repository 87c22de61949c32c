"""`Recipe`: everything that decides a conversion, as one object and as a TOML file.

    profiles = ["duo.safetensors"]

    [heads]
    sparsity = 0.5

    [cache]
    bits = 4

A table of the file is a dataclass of its own. `FLAT` has a name for each field of the tables before `[reform]`: that of
the option of `kvsurgery convert`, of provenance, and of files without tables. Nothing here needs torch or numpy.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

from kvsurgery.errors import PolicyError, RecipeError
from kvsurgery.heads.kinds import Rest
from kvsurgery.recipe_tables import (
    AUTO,
    CHOICES,
    OF_ONE_WIDTH,
    SOURCE,
    Budgeted,
    Cache,
    Code,
    Demand,
    Devices,
    Heads,
    ReformSizes,
    Streaming,
    quoted,
)
from kvsurgery.system.files import write_whole
from kvsurgery.system.repo_id import is_address
from kvsurgery.system.typed_toml import check_types, read_table, to_toml


@dataclass(frozen=True)
class Recipe:
    """What decides a conversion: with a checkpoint and the profiles, the same recipe gives the same bytes.

    `Recipe.of(sparsity=0.5, kv_bits=4)` makes one of flat names.

    Attributes:
        profiles: files of head profiles, or their addresses on the Hub: one with scores, a reform profile, or both.
        heads: which heads are full.
        streaming, budgeted: what the other heads are. Default: budgeted for a HeadKV profile, else streaming.
        cache: how full and budgeted heads are quantized. Default: they are not.
        devices: which devices heads are laid out for.
        code: what happens to the code of the model, and which code the checkpoint carries.
        reform: how long prompts are read; used with a reform profile.
        fit: choose full heads, budget and bits so that this fits.

    Raises:
        PolicyError: a value is of the wrong type, or two tables contradict each other.
    """

    profiles: tuple[str, ...] = ()
    heads: Heads = Heads()
    streaming: Streaming | None = None
    budgeted: Budgeted | None = None
    cache: Cache | None = None
    devices: Devices = Devices()
    code: Code = Code()
    reform: ReformSizes = ReformSizes()
    fit: Demand | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.streaming and self.budgeted:
            first, second = (self.stated(kind) or f"`rest` {kind}" for kind in get_args(Rest))
            raise PolicyError(
                f"{first} and {second} exclude each other, as heads that are not full either stream or have budgets; "
                "leave one out"
            )
        if self.fit is None:
            if self.cache and self.cache.bits is None:
                raise PolicyError(f"{self.stated('cache') or '`cache`'} requires `cache.bits`")
            return
        decided: dict[str, Any] = {f"heads.{name}": value for name, value in self.heads.chosen.items()}
        decided["budgeted.budget"] = self.budgeted.budget if self.budgeted else None
        decided["cache.bits"] = self.cache.bits if self.cache else None
        if names := quoted(name for name, value in decided.items() if value is not None):
            raise PolicyError(f"fitting a memory budget decides {names}; leave out what it decides")

    @classmethod
    def of(cls, profiles: Iterable[str] = (), **values: Any) -> Recipe:
        """A recipe of values by flat name, or of tables: `Recipe.of(sparsity=0.5, rest="streaming", kv_bits=4)`.

        Raises:
            PolicyError: as the class, or a name is unknown.
        """
        return cls(tuple(profiles)).changed(**values)

    @property
    def rest(self) -> Rest | None:
        """What the heads are that are not full, if the recipe says so."""
        if self.streaming:
            return "streaming"
        return "budgeted" if self.budgeted else None

    @property
    def options(self) -> dict[str, Any]:
        """The values that decide a policy, by flat name, in the order of provenance."""
        options: dict[str, Any] = {**self.heads.chosen}
        others = self.streaming or self.budgeted
        if others:
            options["rest"] = self.rest
        if self.devices.tp > 1:
            options |= vars(self.devices)
        if others:
            options |= {"group_reduce": self.heads.group_reduce, **vars(others)}
        if self.heads.head_unit > 1:
            options["head_unit"] = self.heads.head_unit
        if self.cache:
            options |= {f"kv_{name}": value for name, value in vars(self.cache).items()}
        for name in ("quantized", "kernels"):
            if getattr(self.code, name) != getattr(Code, name):
                options[name] = getattr(self.code, name)
        return options

    @property
    def run(self) -> int:
        """Full heads come in multiples of it in every layer."""
        return self.heads.head_unit * (1 if self.devices.tp_uneven else self.devices.tp)

    def stated(self, name: str) -> str:
        """The fields of a table that differ from their defaults, as errors name them."""
        table = getattr(self, name)
        names = (
            f"{name}.{field.name}"
            for field in fields(TABLES[name])
            if table and getattr(table, field.name) != field.default
        )
        return quoted(names)

    def changed(self, **values: Any) -> Recipe:
        """The recipe with other values, by flat name, or other tables.

        What a new value rules out gives way to it: another way to choose the full heads, another kind of the other
        heads, and how a cache is quantized that is not.

        Raises:
            PolicyError: as the class, of the values that are given, or a name is unknown.
        """
        tables: dict[str, Any] = dict(vars(self))
        changes: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
        if rest := values.get("rest"):
            _check_rest(rest)
            tables |= {kind: tables[kind] or TABLES[kind]() if kind == rest else None for kind in get_args(Rest)}
        if values.get("fit") is not None or any(values.get(name) is not None for name in CHOICES):
            tables["fit"] = None
            changes["heads"] = dict.fromkeys(CHOICES)
        if values.get("fit") is not None:
            changes |= {"budgeted": {"budget": None}, "cache": {"bits": None, "budget": None}}
        if values.get("kv_bits") == AUTO:
            changes["cache"] = {**OF_ONE_WIDTH}
        elif values.get("kv_bits") == SOURCE:
            changes["cache"] = {"budget": None, "measured": None, "rounding": None}
        elif values.get("kv_bits") is not None:
            changes["cache"] = {"budget": None}
        elif "kv_bits" in values:
            tables["cache"] = None
        for name, value in values.items():
            if name in tables:
                tables[name] = value
            elif name != "rest":
                table, field = _place(name).split(".")
                changes[table][field] = value
        for table, fields_ in changes.items():
            if tables[table] is not None or any(value is not None for value in fields_.values()):
                tables[table] = replace(tables[table] or TABLES[table](), **fields_)
        if tables["cache"] == Cache():
            tables["cache"] = None
        return Recipe(**tables)

    def to_toml(self) -> str:
        """The text of a recipe's file: profiles, and the tables that say anything."""
        lines = [f"profiles = {to_toml(self.profiles)}"] if self.profiles else []
        for field in fields(self):
            table = getattr(self, field.name)
            if is_dataclass(table) and table != field.default:
                values = {name: value for name, value in vars(table).items() if value is not None}
                lines += ["", f"[{field.name}]", *(f"{name} = {to_toml(value)}" for name, value in values.items())]
        return "".join(f"{line}\n" for line in lines).lstrip()

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        """Read the text of a recipe's file, which may also have the flat names of fields, without their tables.

        Raises:
            PolicyError: it is not TOML, or has a key or a value that no recipe has.
        """
        try:
            return read_table(cls, _in_tables(tomllib.loads(text)))
        except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError, as is a number of 5,000 digits
            raise PolicyError(f"not TOML: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a recipe's file. Files are named relative to its folder.

        Raises:
            RecipeError: the file cannot be read, or is not a recipe.
        """
        try:
            recipe = cls.from_toml(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise RecipeError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RecipeError(f"{path}: not TOML: {error}") from error
        except PolicyError as error:
            raise RecipeError(f"{path}: {error}") from error
        folder = os.path.dirname(path)
        return recipe._with_files(lambda name: os.path.normpath(os.path.join(folder, name)))

    def save(self, path: str | Path) -> None:
        """Write a recipe's file. Relative names of files become relative to its folder.

        Raises:
            OutputError: it cannot be written.
        """
        folder = os.path.dirname(path) or "."
        recipe = self._with_files(lambda name: name if os.path.isabs(name) else os.path.relpath(name, folder))
        write_whole(Path(path), recipe.to_toml())

    @property
    def budgets_from(self) -> str | None:
        """The file of the head profile whose scores budgets follow, if it is another."""
        return self.budgeted.budgets_from if self.budgeted else None

    @property
    def measured(self) -> str | None:
        """The file of measured cache losses, if there is one."""
        return self.cache.measured if self.cache else None

    def _with_files(self, change: Callable[[str], str]) -> Recipe:
        """The recipe with other names of its local files."""

        def changed(file: str | None) -> str | None:
            return file if file is None or is_address(file) else change(file)

        profiles = tuple(file if is_address(file) else change(file) for file in self.profiles)
        return self.changed(
            profiles=profiles, budgets_from=changed(self.budgets_from), kv_measured=changed(self.measured)
        )


TABLES: dict[str, Any] = {
    "heads": Heads,
    "streaming": Streaming,
    "budgeted": Budgeted,
    "cache": Cache,
    "devices": Devices,
    "code": Code,
}
# flat name -> table and field
FLAT = {
    f"kv_{field.name}" if table == "cache" else field.name: f"{table}.{field.name}"
    for table, kind in TABLES.items()
    for field in fields(kind)
}


def default(name: str) -> Any:
    """The default of the field of a flat name."""
    table, field = FLAT[name].split(".")
    return getattr(TABLES[table], field)


def _in_tables(data: dict[str, Any]) -> dict[str, Any]:
    """The content of a file with all values in tables.

    Raises:
        PolicyError: a name is unknown, or `rest` is no kind of heads.
    """
    names = {field.name for field in fields(Recipe)}
    tables = {name: value for name, value in data.items() if name in names}
    if "rest" in data:
        _check_rest(data["rest"])
        tables.setdefault(data["rest"], {})
    for name in data.keys() - names - {"rest"}:
        table, field = _place(name).split(".")
        if isinstance(tables.setdefault(table, {}), dict):
            tables[table] = {**tables[table], field: data[name]}
    return tables


def _place(name: str) -> str:
    """The table and field of a flat name.

    Raises:
        PolicyError: there is none.
    """
    if name not in FLAT:
        candidates = {**FLAT, "rest": "rest"} | {field.name: field.name for field in fields(Recipe)}
        matches = difflib.get_close_matches(name, candidates, 1)
        hint = f"did you mean `{candidates[matches[0]]}`?" if matches else f"known are {', '.join(candidates.values())}"
        raise PolicyError(f"unknown key `{name}`; {hint}")
    return FLAT[name]


def _check_rest(rest: object) -> None:
    if rest not in get_args(Rest):
        raise PolicyError(f"`rest` is {' or '.join(get_args(Rest))}, got {rest!r}")
