"""The tables of a recipe, each a dataclass that checks its own fields. Nothing here needs torch or numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from kvsurgery.errors import PolicyError
from kvsurgery.system.typed_toml import check_types
from kvsurgery.templates.kv_layout import QUERIES, TILE, Quantization, Selection

# ways to choose the full heads, of which a recipe has at most one
CHOICES = ("sparsity", "threshold", "full_heads")
# the `bits` of a cache whose width is chosen for each layer: by measured losses, or as the source's config.json has it
AUTO = "auto"
SOURCE = "source"
BY_LAYER = (AUTO, SOURCE)
MEASURING = "`kvsurgery profile compute MODEL --method kv-bits --text FILE -o losses.safetensors`"
# the fields of a cache that were not measured for it, at their defaults
OF_ONE_WIDTH = {"streaming": False, "rotate": None, "clip": None, "rounding": None}
MAX_TOKENS = 1 << 30
# far beyond any context, and sums of positions still fit 32 bits
MAX_WINDOW = 1 << 30
MAX_BATCH = 1 << 20


def quoted(names: Iterable[str]) -> str:
    """Names as errors say them."""
    return " and ".join(f"`{name}`" for name in names)


@dataclass(frozen=True)
class Heads:
    """Which KV heads are full.

    Attributes:
        sparsity: share of the KV heads in full-attention layers that are not full. Default 0.5 with GQA, 0.75 without
            (DuoAttention, Xiao et al. 2024, section 3.1); 1 where the other heads have budgets.
        threshold: instead, heads with this score or more are full; from 0 to the largest score that a method gives.
        full_heads: instead, the number of full heads over the model.
        group_reduce: how the scores of a group's query heads become the score of their KV head.
        head_unit: KV heads of a layer that stay side by side and are full together, by their mean score: 2 where two
            heads share a block of quantized weights.
    """

    sparsity: float | None = None
    threshold: float | None = None
    full_heads: int | None = None
    group_reduce: Literal["mean", "max"] = "mean"
    head_unit: int = 1

    def __post_init__(self) -> None:
        check_types(self, "heads.")
        if self.head_unit < 1:
            raise PolicyError(f"`heads.head_unit` must be 1 or more, got {self.head_unit}")
        if len(self.chosen) > 1:
            names = quoted(f"heads.{name}" for name in self.chosen)
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
            measured losses, and "source" the width that the source's config.json has for it. None only beside `fit`,
            which chooses them.
        budget: with "auto", bits that a stored value has on average at most; a layer in the model's dtype counts as 16.
        scheme, group_size, residual, streaming, sink, rotate, clip, rounding: the fields of `kv_layout.Quantization`.
        measured: file of measured cache losses, which says what to rotate, whether to clip and how to round where the
            recipe does not, has the factors of rounding, chooses the bits of each layer, and prices what `fit` chooses
            from.
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
    rounding: Literal["nearest", "queries"] | None = None
    measured: str | None = None

    def __post_init__(self) -> None:
        check_types(self, "cache.")
        if self.rounding == QUERIES and self.measured is None:
            raise PolicyError(f"`cache.rounding` queries needs `cache.measured`, a file that {MEASURING} measures")
        if self.bits != AUTO:
            if self.budget is not None:
                raise PolicyError("`cache.budget` requires `cache.bits` auto")
            if self.bits == SOURCE and self.measured is not None:
                raise PolicyError("`cache.measured` cannot be combined with `cache.bits` source; leave it out")
            if self.bits not in (None, SOURCE):
                quantization = Quantization(self.bits)
                try:
                    quantization.check(TILE)  # heads of 128 can have any width
                except ValueError as error:
                    raise PolicyError(f"`cache.bits`: {error}") from error
                object.__setattr__(self, "bits", quantization.bits)
            return
        if self.measured is None:
            raise PolicyError(f"`cache.bits` auto needs `cache.measured`, a file that {MEASURING} measures")
        if self.budget is None or not 2 <= self.budget <= 16:
            raise PolicyError(f"`cache.bits` auto needs a `cache.budget` of 2 to 16 bits a value, got {self.budget}")
        if names := quoted(f"cache.{name}" for name, value in OF_ONE_WIDTH.items() if getattr(self, name) != value):
            raise PolicyError(f"{names} cannot be combined with `cache.bits` auto; leave it out, or give a width")

    @property
    def quantization(self) -> Quantization | None:
        """How heads store all but their newest tokens; None: as each layer's bits say, or `fit` chooses."""
        return None if self.bits in (None, *BY_LAYER) else Quantization(**self._quantized)

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
        kernels: emit the Triton kernels, and for quantized caches the loop in C; without them everything runs in plain
            torch.
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
