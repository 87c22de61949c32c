"""The kinds of heads that a layer has, in the order of storage, and how it stores them."""

from typing import Any

from .kv_full import FullHeads
from .kv_kind import Heads
from .kv_layout import ACCUMULATED, LayerLayout
from .kv_storage import Storage
from .kv_streaming import StreamingHeads


def kinds_of(layout: LayerLayout) -> list[type[Heads]]:
    """The kinds that a layer's heads are of.

    Raises:
        ValueError: this checkpoint has no code of some.
    """
    kinds = FullHeads, StreamingHeads, *_budgeted_kinds(layout)
    return [kind for kind in kinds if kind.count(layout)]


def _budgeted_kinds(layout: LayerLayout) -> list[type[Heads]]:
    """The kind of a layer's budgeted heads, whose code only checkpoints with such heads carry.

    It is looked for when it is needed: transformers 4 keeps modules that it has loaded from another folder of the same
    name.
    """
    if layout.selection and layout.selection.select == ACCUMULATED:
        raise ValueError(
            "config.json asks for heads that select by accumulated attention, which this code does not do; convert the "
            "original model again, by attention or value-norm"
        )
    try:
        if layout.holds:
            from . import kv_hold

            return [kv_hold.HeldHeads]
        if layout.budgets:
            from . import kv_budget

            return [kv_budget.BudgetedHeads]
    except ImportError as error:
        heads_suffix, options_suffix = (" with rolling budgets", " and --hold") if layout.holds else ("", "")
        raise ValueError(
            f"config.json asks for budgeted heads{heads_suffix}, and this checkpoint was converted without their code; "
            f"convert the original model with --rest budgeted{options_suffix}"
        ) from error
    return []


def storage_of(layout: LayerLayout) -> Storage:
    """Empty storage for a layer.

    Raises:
        ValueError: it is quantized, and this checkpoint was converted without the code of quantized caches.
    """
    return quantized_code().TiledStorage(layout) if layout.quantization else Storage(layout)


def quantized_code() -> Any:
    """The module of quantized heads, which only checkpoints carry that quantize, or were converted with `--quantized`.

    Raises:
        ValueError: this one does not.
    """
    try:
        from . import kv_tiles
    except ImportError as error:
        raise ValueError(
            "a quantized cache is asked for, and this checkpoint was converted without its code; convert the original "
            "model with --quantized, or leave out what asks for it"
        ) from error
    return kv_tiles
