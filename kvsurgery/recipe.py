"""`Recipe`: everything that decides a conversion, as one object and as a TOML file.

    profiles = ["duo.safetensors"]
    sparsity = 0.5
    kv_bits = 4

    [reform]
    chunk = 32_768

A key of the file is a field of `Recipe`; the fields of `ReformSizes` and `Demand` stand in the tables `[reform]` and
`[fit]`. Names of fields are those of the options of `kvsurgery convert`. Nothing here needs torch or numpy.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvsurgery.errors import PolicyError, RecipeError
from kvsurgery.heads.kinds import Rest
from kvsurgery.system.files import write_whole
from kvsurgery.system.repo_id import is_address
from kvsurgery.system.typed_toml import check_types, read_table, to_toml
from kvsurgery.templates.kv_layout import Quantization, Selection

# ways to choose the full heads, of which a recipe has at most one
CHOICES = ("sparsity", "threshold", "full_heads")
# by what the remaining heads become: fields that only they use
OF_REST: dict[Rest, tuple[str, ...]] = {
    "streaming": ("sink", "recent"),
    "budgeted": ("budgets_from", "budget", "beta", "window", "kernel_size", "pool", "hold", "select"),
}
# what contradicts streaming heads; the other fields of budgeted ones make no difference beside them
NOT_STREAMING = ("budget", "budgets_from", "hold", "select")
QUANTIZED = ("kv_scheme", "kv_group_size", "kv_residual", "kv_streaming", "kv_sink", "kv_rotate", "kv_clip")
# the `kv_bits` that are chosen for each layer; what is then chosen with them, or was not measured
AUTO = "auto"
NOT_AUTO = ("kv_streaming", "kv_rotate", "kv_clip")
CODE = ("quantized", "kernels")  # what code a checkpoint carries
MAX_TOKENS = 1 << 30
MAX_BATCH = 1 << 20


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
            raise PolicyError(f"`context` must lie in [1, {MAX_TOKENS}] tokens, got {self.context}")
        if not 1 <= self.batch <= MAX_BATCH:
            raise PolicyError(f"`batch` must lie in [1, {MAX_BATCH}], got {self.batch}")
        if not 0 <= self.new_tokens < self.context:
            raise PolicyError(
                f"`new_tokens` must be less than `context`, to leave a prompt; got {self.new_tokens} of {self.context}"
            )
        if self.chunk < 1:
            raise PolicyError(f"`chunk` must be at least 1 token, got {self.chunk}")

    @property
    def prompt(self) -> int:
        """Tokens of a sequence that are given."""
        return self.context - self.new_tokens


@dataclass(frozen=True)
class Recipe:
    """What decides a conversion: with a checkpoint and the profiles, the same recipe gives the same bytes.

    Attributes:
        profiles: files of head profiles, or their addresses on the Hub: one with scores, a reform profile, or both.

        sparsity: share of the KV heads in full-attention layers that are not full. Default 0.5 with GQA, 0.75 without
            (DuoAttention, Xiao et al. 2024, section 3.1); 1 where the other heads have budgets.
        threshold: instead, heads with this score or more are full; from 0 to the largest score that a method gives.
        full_heads: instead, the number of full heads over the model.
        rest: what the other heads are. Default: budgeted for a HeadKV profile, else streaming.
        group_reduce: how the scores of a group's query heads become the score of their KV head.

        sink, recent: first and latest tokens that a streaming head keeps.

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

        kv_bits: bits of what full and budgeted heads store. Default: the model's dtype. "auto" is a width for each
            layer, by measured losses.
        kv_budget: with "auto", bits that a stored value has on average at most; a layer in the model's dtype counts as
            16.
        kv_scheme, kv_group_size, kv_residual, kv_streaming, kv_sink, kv_rotate, kv_clip: how it is quantized, the
            fields of `kv_layout.Quantization`.
        kv_measured: file of measured cache losses, which says what to rotate and whether to clip where the recipe does
            not, chooses the bits of each layer, and prices what `fit` chooses from.

        tp: processes of tensor parallelism that heads are laid out for, or a multiple of their number.
        tp_uneven: keep exactly the full heads asked for, though some processes then hold more of them.

        quantized: emit the code of quantized caches even without `kv_bits`, so that callers can ask for one.
        kernels: emit the Triton kernels; without them everything runs in plain torch.

        ignore_model_code: convert a model with modeling code of its own as the stock model of its `model_type`.

        reform: how long prompts are read; used with a reform profile.
        fit: choose full heads, budget and bits so that this fits.

    Raises:
        PolicyError: a value is of the wrong type, or two fields contradict each other.
    """

    profiles: tuple[str, ...] = ()

    sparsity: float | None = None
    threshold: float | None = None
    full_heads: int | None = None
    rest: Rest | None = None
    group_reduce: Literal["mean", "max"] = "mean"

    sink: int = 64
    recent: int = 256

    budgets_from: str | None = None
    budget: int | None = None
    beta: float | None = None
    window: int = 8
    kernel_size: int = 7
    pool: Literal["max", "avg"] = "max"
    hold: int | None = None
    select: Literal["attention", "value-norm"] = "attention"

    kv_bits: int | Literal["auto"] | None = None
    kv_budget: float | None = None
    kv_scheme: Literal["kivi", "per-token"] = "kivi"
    kv_group_size: int | None = None
    kv_residual: int = 128
    kv_streaming: bool = False
    kv_sink: int = 4
    kv_rotate: Literal["none", "values", "both"] | None = None
    kv_clip: bool | None = None
    kv_measured: str | None = None

    tp: int = 1
    tp_uneven: bool = False

    quantized: bool = False
    kernels: bool = True

    ignore_model_code: bool = False

    reform: ReformSizes = ReformSizes()
    fit: Demand | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if len(self.chosen) > 1:
            raise PolicyError(f"{_quoted_names(self.chosen)} exclude each other; give one")
        for name in NOT_STREAMING:
            if self.rest == "streaming" and getattr(self, name) != _DEFAULTS[name]:
                raise PolicyError(f"`{name}` is for budgeted heads; set `rest` to budgeted, or leave it out")
        detail_fields = [name for name in (*QUANTIZED, "kv_measured") if getattr(self, name) != _DEFAULTS[name]]
        if detail_fields and self.kv_bits is None and self.fit is None:
            raise PolicyError(f"{_quoted_names(detail_fields)} requires `kv_bits`")
        self._check_auto()
        decided_fields = [name for name in (*CHOICES, "budget", "kv_bits") if getattr(self, name) is not None]
        if decided_fields and self.fit is not None:
            raise PolicyError(
                f"fitting a memory budget decides {_quoted_names(decided_fields)}; leave out what it decides"
            )

    def _check_auto(self) -> None:
        """Raise PolicyError where bits of layers cannot be chosen as the recipe says."""
        if self.kv_bits != AUTO:
            if self.kv_budget is not None:
                raise PolicyError("`kv_budget` requires `kv_bits` auto")
            return
        if self.kv_measured is None:
            raise PolicyError(
                "`kv_bits` auto needs `kv_measured`, a file that `kvsurgery profile compute MODEL --method kv-bits "
                "--text FILE -o losses.safetensors` measures"
            )
        if self.kv_budget is None or not 2 <= self.kv_budget <= 16:
            raise PolicyError(f"`kv_bits` auto needs a `kv_budget` of 2 to 16 bits a value, got {self.kv_budget}")
        stated_fields = [name for name in NOT_AUTO if getattr(self, name) != _DEFAULTS[name]]
        if stated_fields:
            raise PolicyError(
                f"{_quoted_names(stated_fields)} cannot be combined with `kv_bits` auto; leave it out, or give a width"
            )

    @property
    def chosen(self) -> dict[str, float]:
        """How the full heads are chosen, by the name of the field; empty where that is left to the profile."""
        return {name: value for name in CHOICES if (value := getattr(self, name)) is not None}

    @property
    def selection(self) -> Selection:
        """How a budgeted head selects."""
        return Selection(self.window, self.kernel_size, self.pool, self.hold, self.select)

    @property
    def quantization(self) -> Quantization | None:
        """How heads store all but their newest tokens; None: in the model's dtype, or as each layer's bits say."""
        if self.kv_bits is None or isinstance(self.kv_bits, str):
            return None
        return Quantization(self.kv_bits, *(getattr(self, name) for name in QUANTIZED))

    def check_quantization(self, head_dim: int) -> None:
        """Check that heads of a size can be stored as the recipe says. The error names the field that is at fault.

        Raises:
            PolicyError: they cannot.
        """
        names = ("kv_bits", *QUANTIZED)
        values = [getattr(self, name) for name in names]
        for count, name in enumerate(names, 1):
            try:
                Quantization(*values[:count]).check(head_dim)
            except ValueError as error:
                raise PolicyError(f"`{name}`: {error}") from error

    @property
    def in_use(self) -> tuple[str, ...]:
        """Fields that make a difference beside the others, apart from profiles, `reform` and `fit`."""
        names = [*self.chosen]
        if self.rest:
            names.append("rest")
        if self.tp > 1:
            names += ["tp", "tp_uneven"]
        if self.rest:
            names += ["group_reduce", *OF_REST[self.rest]]
        if self.kv_bits == AUTO:
            names += ["kv_bits", "kv_budget", *(name for name in QUANTIZED if name not in NOT_AUTO), "kv_measured"]
        elif self.kv_bits is not None:
            names += ["kv_bits", *QUANTIZED]
        names += [name for name in CODE if getattr(self, name) != _DEFAULTS[name]]
        return tuple(names)

    def changed(self, **values: Any) -> Recipe:
        """The recipe with other values. What a new value rules out gives way to it: another way to choose the full
        heads, a budget where heads stream, and how a cache is quantized that is not.

        Raises:
            PolicyError: as the class, of the values that are given.
        """
        choices = [name for name in (*CHOICES, "fit") if values.get(name) is not None]
        reset_fields = [*CHOICES, "fit"] if choices else []
        if values.get("fit") is not None:
            reset_fields += ["budget", "kv_bits"]
        if values.get("kv_bits") == AUTO:
            reset_fields += NOT_AUTO
        elif "kv_bits" in (*values, *reset_fields):
            reset_fields += ["kv_budget"]
        if values.get("rest") == "streaming":
            reset_fields += NOT_STREAMING
        if "kv_bits" in values and values["kv_bits"] is None:
            reset_fields += [*QUANTIZED, "kv_measured"]
        return replace(self, **{name: _DEFAULTS[name] for name in reset_fields} | values)

    def trimmed(self) -> Recipe:
        """The recipe without values that make no difference."""
        files = ["profiles", *(["kv_measured"] if self.kv_bits is not None else [])]
        values = {name: getattr(self, name) for name in (*self.in_use, *files, "reform", "fit")}
        return Recipe(**values)

    def to_toml(self) -> str:
        """The text of a recipe's file: values in use, and those that differ from the default."""
        used_fields = set(self.in_use)
        lines = [
            f"{name} = {to_toml(value)}"
            for name, value in vars(self).items()
            if not is_dataclass(value) and value is not None and (name in used_fields or value != _DEFAULTS[name])
        ]
        for name, table in (("reform", self.reform.given), ("fit", vars(self.fit) if self.fit else {})):
            if table:
                lines += ["", f"[{name}]", *(f"{key} = {to_toml(value)}" for key, value in table.items())]
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        """Read the text of a recipe's file.

        Raises:
            PolicyError: it is not TOML, or has a key or a value that no recipe has.
        """
        try:
            return read_table(cls, tomllib.loads(text))
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

    def _with_files(self, change: Callable[[str], str]) -> Recipe:
        """The recipe with other names of its local files."""
        files = {name: getattr(self, name) for name in ("budgets_from", "kv_measured")}
        changed_files = {
            name: file if file is None or is_address(file) else change(file) for name, file in files.items()
        }
        profiles = tuple(file if is_address(file) else change(file) for file in self.profiles)
        return replace(self, profiles=profiles, **changed_files)


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Recipe)}


def _quoted_names(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)
