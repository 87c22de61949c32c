"""The kinds of heads that this checkpoint has, in the order of storage, and how it stores them."""

from .kv_budget import BudgetedHeads  # needs budgets
from .kv_full import FullHeads
from .kv_hold import HeldHeads  # needs holds
from .kv_kind import Heads
from .kv_layout import LayerLayout
from .kv_storage import Storage
from .kv_streaming import StreamingHeads
from .kv_tiles import TiledStorage

KINDS: tuple[type[Heads], ...] = (
    FullHeads,
    StreamingHeads,
    BudgetedHeads,  # needs budgets
    HeldHeads,  # needs holds
)
STORAGE: dict[bool, type[Storage]] = {  # by whether a layer is quantized
    False: Storage,
    True: TiledStorage,
}


def kinds_of(layout: LayerLayout) -> list[type[Heads]]:
    """The kinds that a layer's heads are of.

    Raises:
        ValueError: this checkpoint was converted without the code of some.
    """
    kinds = [kind for kind in KINDS if kind.count(layout)]
    if sum(kind.count(layout) for kind in kinds) != layout.heads:
        heads_suffix, options_suffix = (" with rolling budgets", " and --hold") if layout.holds else ("", "")
        raise ValueError(
            f"config.json asks for budgeted heads{heads_suffix}, and this checkpoint was converted without their code; "
            f"convert the original model with --rest budgeted{options_suffix}"
        )
    return kinds


def storage_of(layout: LayerLayout) -> Storage:
    """Empty storage for a layer."""
    return STORAGE[layout.quantization is not None](layout)
