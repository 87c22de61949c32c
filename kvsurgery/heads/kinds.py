"""The kinds of KV heads: their names, their words, and their numbers in a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvsurgery.templates.kv_layout import ACCUMULATED, ATTENTION, VALUE_NORM, KVLayout, LayerLayout

# the kinds of the remaining heads in layers with full attention
Rest = Literal["streaming", "budgeted"]
# by what budgeted heads choose tokens, before "the last 8 tokens"
CHOSEN_BY = {
    ATTENTION: "the attention of",
    ACCUMULATED: "the attention, summed over all selections so far, of",
    VALUE_NORM: "the norm of their values times the attention of",
}


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """A kind of KV head.

    Attributes:
        name: in recipes and facts.
        keeps: what such heads keep, as text that follows their number.
        count: returns the number of heads of this kind in a layer.
        quantized: whether these heads are quantized in a layer with a quantized cache.
        label: name in tables and legends.
        own: whether the kind comes from the model and not from a policy.
    """

    name: str
    keeps: str
    count: Callable[[LayerLayout], int]
    quantized: Callable[[LayerLayout], bool]
    label: str
    own: bool = False

    @property
    def heads(self) -> str:
        """The plural of this kind, as text."""
        return f"heads with the model's {self.label}" if self.own else f"{self.name} heads"


@dataclass(frozen=True, kw_only=True)
class OtherKind(HeadKind):
    """A kind that a policy gives to heads that are not full.

    Attributes:
        verb: what such heads do, as a word or two that follow their number.
        sizes: returns what the heads of some layers keep, in tokens, as text that follows `heads`.
    """

    verb: str
    sizes: Callable[[Sequence[LayerLayout]], str]


def _streaming_sizes(layers: Sequence[LayerLayout]) -> str:
    return f"keep {layers[0].sink} sink tokens and the {layers[0].recent} most recent ones"


def _budgeted_sizes(layers: Sequence[LayerLayout]) -> str:
    selection = layers[0].selection
    assert selection is not None  # as there are budgets
    budgets = [budget for layer in layers for budget in layer.budgets]
    mean_text, rule = f"{sum(budgets) / len(budgets):.0f} tokens", f"chosen by {CHOSEN_BY[selection.select]}"
    if selection.hold is not None:
        return (
            f"keep {mean_text} on average, {rule} the last {selection.window} tokens, these, and at most "
            f"{selection.hold} tokens since, after which they choose again"
        )
    return (
        f"keep {mean_text} of the prompt on average, {rule} its last {selection.window} tokens, and everything from "
        "those on"
    )


FULL = HeadKind(
    name="full",
    keeps="keep every token",
    count=lambda layer: layer.full,
    quantized=lambda layer: True,
    label="full",
)
STREAMING = OtherKind(
    name="streaming",
    keeps="keep the first and the most recent tokens (streaming)",
    count=lambda layer: 0 if layer.native else layer.streaming,
    quantized=lambda layer: layer.quantized_window,
    label="streaming",
    verb="stream",
    sizes=_streaming_sizes,
)
BUDGETED = OtherKind(
    name="budgeted",
    keeps="keep a budget of tokens",
    count=lambda layer: len(layer.budgets),
    quantized=lambda layer: layer.quantized_budgets,
    label="budgeted",
    verb="have budgets",
    sizes=_budgeted_sizes,
)
WINDOW = HeadKind(
    name="window",
    keeps="keep the model's own sliding window",
    count=lambda layer: layer.streaming if layer.native else 0,
    quantized=lambda layer: layer.quantized_window,
    label="own window",
    own=True,
)
KINDS = (FULL, STREAMING, WINDOW, BUDGETED)
NAMED = {kind.name: kind for kind in KINDS}
OTHERS = (STREAMING, BUDGETED)  # those of `Rest`


def kind_of(head: str | int) -> HeadKind:
    """The kind of a head from its entry in `head_list`, which is a name or a budget."""
    return BUDGETED if isinstance(head, int) else NAMED[head]


def kinds_of(heads: Iterable[Sequence[str | int]]) -> Counter[HeadKind]:
    """The number of KV heads of each kind in all layers, from the `head_list` of each layer."""
    return Counter(kind_of(head) for layer in heads for head in layer)


def decided_kinds(heads: Iterable[Sequence[str | int]], full_heads: Iterable[int | None]) -> Counter[HeadKind]:
    """The number of KV heads of each kind in the layers that a policy decides, which have a count in `full_heads`."""
    return kinds_of(layer for layer, full_count in zip(heads, full_heads, strict=True) if full_count is not None)


def head_list(layer: LayerLayout) -> tuple[str | int, ...]:
    """The heads of a layer in order: the name of each head's kind, or its budget in tokens."""
    other_kind = next((kind for kind in KINDS if kind is not FULL and kind.count(layer)), FULL)
    budgets = iter(layer.budgets)
    return tuple(
        head
        for full_count, other_count in layer.blocks
        for head in (*[FULL.name] * full_count, *(next(budgets, other_kind.name) for _ in range(other_count)))
    )


def full_heads(layer: LayerLayout) -> tuple[int, ...]:
    """The indices of the original's KV heads that keep every token, in order."""
    return tuple(head for head, kind in zip(layer.order, head_list(layer), strict=True) if kind == FULL.name)


def counts(layout: KVLayout) -> dict[HeadKind, int]:
    """The number of KV heads of each kind."""
    return {kind: sum(map(kind.count, layout.layers)) for kind in KINDS}


def unquantized(layout: KVLayout) -> list[HeadKind]:
    """The kinds of heads that keep the model's dtype in layers with a quantized cache."""
    layers = [layer for layer in layout.layers if layer.quantization]
    return [kind for kind in KINDS if any(kind.count(layer) and not kind.quantized(layer) for layer in layers)]
