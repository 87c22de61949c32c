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
from typing import Any, Literal, get_args

from kvsurgery.errors import PolicyError, RecipeError
from kvsurgery.heads.kinds import Rest
from kvsurgery.system.files import write_whole
from kvsurgery.system.repo_id import is_address
from kvsurgery.system.typed_toml import check_types, read_table, to_toml
from kvsurgery.templates.kv_layout import TILE, Quantization, Selection

# ways to choose the full heads, of which a recipe has at most one
CHOICES = ("sparsity", "threshold", "full_heads")
# the `bits` of a cache that are chosen for each layer
AUTO = "auto"
# the fields of a cache that were not measured for it, at their defaults
_OF_ONE_WIDTH = {"streaming": False, "rotate": None, "clip": None}
MAX_TOKENS = 1 << 30
# far beyond any context, and sums of positions still fit 32 bits
MAX_WINDOW = 1 << 30
MAX_BATCH = 1 << 20


@dataclass(frozen=True)
class Heads:
    """Which KV heads are full.

    Attributes:
        sparsity: share of the KV heads in full-attention layers that are not full. Default 0.5 with GQA, 0.75 without
            (DuoAttention, Xiao et al. 2024, section 3.1); 1 where the other heads have budgets.
        threshold: instead, heads with this score or more are full; from 0 to the largest score that a method gives.
        full_heads: instead, the number of full heads over the model.
        group_reduce: how the scores of a group's query heads become the score of their KV head.
    """

    sparsity: float | None = None
    threshold: float | None = None
    full_heads: int | None = None
    group_reduce: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        check_types(self, "heads.")
        if len(self.chosen) > 1:
            names = _quoted(f"heads.{name}" for name in self.chosen)
            raise PolicyError(f"{names} exclude each other; give one")

    @property
    def chosen(self) -> dict[str, float]:
        """How the full heads are chosen, by the name of the field; empty where that is left to the profile."""
        return {name: value for name in CHOICES if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Streaming:
    """The heads that are not full stream: `sink` first and `recent` latest tokens are kept."""

    sink: int = 64
    recent: int = 256

    def __post_init__(self) -> None:
        check_types(self, "streaming.")
        sizes = f"got {self.sink} and {self.recent}"
        if self.sink < 0 or self.recent < 1:
            raise PolicyError(f"`streaming.sink` must be >= 0 and `streaming.recent` >= 1, {sizes}")
        if self.sink + self.recent > MAX_WINDOW:
            raise PolicyError(
                f"`streaming.sink` and `streaming.recent` together must be at most {MAX_WINDOW} tokens, {sizes}"
            )


@dataclass(frozen=True)
class Budgeted:
    """The heads that are not full have budgets of prompt tokens.

    Attributes:
        budgets_from: file of the head profile whose scores budgets follow. Default: the one that chooses full heads.
        budget: tokens of the prompt that a budgeted head keeps on average, in addition to the observation window.
            Default, only of a profile of budgets: what it says.
        beta: how budgets follow the scores, as `allocate_budgets` takes it; larger is more even. Default: 1.2, and
            None for shares and budgets, which are kept in their proportions.
        window: observation window, the last tokens of the prompt whose attention selects what is kept.
        kernel_size, pool: how many neighbors this attention is pooled over, and by what.
        hold: recent tokens after which a budgeted head selects again, so that its budget holds for whatever follows the
            prompt. Default: it keeps all that follows.
        select: by what it selects, as `kv_layout.Selection` has it.
    """

    budgets_from: str | None = None
    budget: int | None = None
    beta: float | None = None
    window: int = 8
    kernel_size: int = 7
    pool: Literal["max", "avg"] = "max"
    hold: int | None = None
    select: Literal["attention", "value-norm"] = "attention"

    def __post_init__(self) -> None:
        check_types(self, "budgeted.")
        if not 1 <= self.window <= MAX_WINDOW:
            raise PolicyError(f"`budgeted.window` must lie in [1, {MAX_WINDOW}], got {self.window}")
        if not 1 <= self.kernel_size <= MAX_WINDOW or self.kernel_size % 2 == 0:
            raise PolicyError(f"`budgeted.kernel_size` must be odd and in [1, {MAX_WINDOW}], got {self.kernel_size}")
        if self.hold is not None and not self.window <= self.hold <= MAX_WINDOW:
            raise PolicyError(
                f"`budgeted.hold` must lie in [{self.window}, {MAX_WINDOW}] tokens: the observation window, "
                f"`budgeted.window`, must fit into the block of recent tokens; got {self.hold}"
            )

    @property
    def selection(self) -> Selection:
        """How a head selects."""
        return Selection(self.window, self.kernel_size, self.pool, self.hold, self.select)


@dataclass(frozen=True)
class Cache:
    """How full and budgeted heads are quantized.

    Attributes:
        bits: of what they store, or "k3v2" with 3 bits for keys and 2 for values; "auto" is a width for each layer, by
            measured losses. None only beside `fit`, which chooses them.
        budget: with "auto", bits that a stored value has on average at most; a layer in the model's dtype counts as 16.
        scheme, group_size, residual, streaming, sink, rotate, clip: the fields of `kv_layout.Quantization`.
        measured: file of measured cache losses, which says what to rotate and whether to clip where the recipe does
            not, chooses the bits of each layer, and prices what `fit` chooses from.
    """

    bits: int | str | None = None
    budget: float | None = None
    scheme: Literal["kivi", "per-token"] = "kivi"
    group_size: int | None = None
    residual: int = 128
    streaming: bool = False
    sink: int = 4
    rotate: Literal["none", "values", "both"] | None = None
    clip: bool | None = None
    measured: str | None = None

    def __post_init__(self) -> None:
        check_types(self, "cache.")
        if self.bits != AUTO:
            if self.budget is not None:
                raise PolicyError("`cache.budget` requires `cache.bits` auto")
            if self.bits is not None:
                quantization = Quantization(self.bits)
                try:
                    quantization.check(TILE)  # heads of 128 can have any width
                except ValueError as error:
                    raise PolicyError(f"`cache.bits`: {error}") from error
                object.__setattr__(self, "bits", quantization.bits)
            return
        if self.measured is None:
            raise PolicyError(
                "`cache.bits` auto needs `cache.measured`, a file that `kvsurgery profile compute MODEL --method "
                "kv-bits --text FILE -o losses.safetensors` measures"
            )
        if self.budget is None or not 2 <= self.budget <= 16:
            raise PolicyError(f"`cache.bits` auto needs a `cache.budget` of 2 to 16 bits a value, got {self.budget}")
        if names := _quoted(f"cache.{name}" for name, value in _OF_ONE_WIDTH.items() if getattr(self, name) != value):
            raise PolicyError(f"{names} cannot be combined with `cache.bits` auto; leave it out, or give a width")

    @property
    def quantization(self) -> Quantization | None:
        """How heads store all but their newest tokens; None: as each layer's bits say, or `fit` chooses."""
        return None if self.bits in (None, AUTO) else Quantization(**self._quantized)

    @property
    def _quantized(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(Quantization)}

    def check_quantization(self, head_dim: int) -> None:
        """Check that heads of a size can be stored so. The error names the field that is at fault.

        Raises:
            PolicyError: they cannot.
        """
        values: dict[str, Any] = {}
        for name, value in self._quantized.items():
            values[name] = value
            try:
                Quantization(**values).check(head_dim)
            except ValueError as error:
                raise PolicyError(f"`cache.{name}`: {error}") from error


@dataclass(frozen=True)
class Devices:
    """The devices that heads are laid out for.

    Attributes:
        tp: processes of tensor parallelism, or a multiple of their number.
        tp_uneven: keep exactly the full heads asked for, though some processes then hold more of them.
    """

    tp: int = 1
    tp_uneven: bool = False

    def __post_init__(self) -> None:
        check_types(self, "devices.")


@dataclass(frozen=True)
class Code:
    """The code of the model, and of the checkpoint that is made of it.

    Attributes:
        quantized: emit the code of quantized caches even without `cache.bits`, so that callers can ask for one.
        kernels: emit the Triton kernels; without them everything runs in plain torch.
        ignore_model_code: convert a model with modeling code of its own as the stock model of its `model_type`.
    """

    quantized: bool = False
    kernels: bool = True
    ignore_model_code: bool = False

    def __post_init__(self) -> None:
        check_types(self, "code.")


@dataclass(frozen=True)
class ReformSizes:
    """How long prompts are read, the fields of `kv_reform.Reform` in tokens; None is its default, or what fits."""

    chunk: int | None = None
    encode_budget: int | None = None
    compressor: Literal["h2o", "tova", "streaming"] | None = None
    window: int | None = None
    keep: int | None = None
    pool: int | None = None
    recompute_budget: int | None = None
    query_length: int | None = None

    def __post_init__(self) -> None:
        check_types(self, "reform.")

    @property
    def given(self) -> dict[str, Any]:
        """The sizes that are stated."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Demand:
    """What has to fit into a memory.

    Attributes:
        memory: bytes for weights, KV cache and workspace; of one device, where several share the model.
        context: tokens of a sequence: its prompt, and what is generated.
        batch: sequences.
        new_tokens: how many of the context are generated; budgeted heads keep all of these.
        chunk: tokens of the prompt that go through at a time, the `prefill_chunk_size` of `generate`. Budgeted heads
            hold a whole prompt that comes in chunks, so there it goes through at once where that takes less.

    Raises:
        PolicyError: a number is out of range.
    """

    memory: int
    context: int
    batch: int = 1
    new_tokens: int = 0
    chunk: int = 2048

    def __post_init__(self) -> None:
        check_types(self, "fit.")
        if not 1 <= self.context <= MAX_TOKENS:
            raise PolicyError(f"`fit.context` must lie in [1, {MAX_TOKENS}] tokens, got {self.context}")
        if not 1 <= self.batch <= MAX_BATCH:
            raise PolicyError(f"`fit.batch` must lie in [1, {MAX_BATCH}], got {self.batch}")
        if not 0 <= self.new_tokens < self.context:
            raise PolicyError(
                "`fit.new_tokens` must be less than `fit.context`, to leave a prompt; got "
                f"{self.new_tokens} of {self.context}"
            )
        if self.chunk < 1:
            raise PolicyError(f"`fit.chunk` must be at least 1 token, got {self.chunk}")

    @property
    def prompt(self) -> int:
        """Tokens of a sequence that are given."""
        return self.context - self.new_tokens


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
        if names := _quoted(name for name, value in decided.items() if value is not None):
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
        if self.cache:
            options |= {f"kv_{name}": value for name, value in vars(self.cache).items()}
        for name in ("quantized", "kernels"):
            if getattr(self.code, name) != getattr(Code, name):
                options[name] = getattr(self.code, name)
        return options

    def stated(self, name: str) -> str:
        """The fields of a table that differ from their defaults, as errors name them."""
        table = getattr(self, name)
        names = (
            f"{name}.{field.name}"
            for field in fields(TABLES[name])
            if table and getattr(table, field.name) != field.default
        )
        return _quoted(names)

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
            changes["cache"] = {**_OF_ONE_WIDTH}
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


def _quoted(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)
