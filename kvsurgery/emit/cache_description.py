"""How a checkpoint's cache is quantized, and what its budgeted heads hold, in words: for the card and the commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsurgery.templates.kv_layout import ACCUMULATED, NEAREST, QUERIES, VALUE_NORM, Widths


def describe_bits(quantization: Mapping[str, Any]) -> str:
    """Widths and scheme of a quantized cache, in words, from its entry in a config."""
    groups = [f"groups of {quantization['group_size']}"] if quantization["group_size"] else []
    quantization = {"rounding": NEAREST, **quantization}
    steps = (
        ("rotate", "values", "values rotated"),
        ("rotate", "both", "keys and values rotated"),
        ("clip", True, "ranges clipped"),
        ("rounding", QUERIES, "keys rounded by the queries"),
    )
    transforms = [
        words + at_widths
        for name, value, words in steps
        if (at_widths := _at_widths(quantization, name, value)) is not None
    ]
    return f"{describe_widths(quantization['bits'])} ({', '.join([quantization['scheme'], *groups, *transforms])})"


def describe_widths(bits: int | str | Sequence[int | str | None]) -> str:
    """One width, or how many layers have each: "4 bits in 20 layers, k3v2 in 8, unquantized in 2"."""
    if isinstance(bits, int | str):
        keys, values = Widths.of(bits)
        return f"{keys} bits" if keys == values else f"{keys} bits for keys and {values} for values"
    counts = Counter(bits)
    [(first, layers), *others] = [(width, counts[width]) for width in widest_first(bits)]
    unquantized = [f"unquantized in {counts[None]}"] if None in counts else []
    words = [f"{first} bits in {layers} layer{'s' * (layers > 1)}", *(f"{width} in {count}" for width, count in others)]
    return ", ".join(words + unquantized)


def widest_first(bits: Iterable[int | str | None]) -> list[int | str]:
    """The widths among the bits of layers, each once."""
    return sorted({width for width in bits if width is not None}, key=lambda width: sum(Widths.of(width)), reverse=True)


def _at_widths(quantization: Mapping[str, Any], name: str, value: Any) -> str | None:
    """At which widths a field has a value: empty for all of them, None for none."""
    bits, values = quantization["bits"], quantization[name]
    if isinstance(bits, int | str) or not isinstance(values, Sequence) or isinstance(values, str):
        return "" if values == value else None
    widths = widest_first(width for width, layer_value in zip(bits, values, strict=True) if layer_value == value)
    if widths in ([], widest_first(bits)):
        return "" if widths else None
    return f" at {' and '.join(filter(None, (', '.join(map(str, widths[:-1])), str(widths[-1]))))} bits"


def describe_hold(window: int, hold: int, select: str, scheme: str | None) -> str:
    """Say how much budgeted heads keep whose budgets hold, and by what they select.

    `scheme` is that of a quantized cache, None without one.
    """
    selection_note = {ACCUMULATED: " by accumulated attention", VALUE_NORM: " by attention and value norm"}.get(
        select, ""
    )
    return (
        f"budgeted heads select again every {hold} tokens{selection_note}, and never keep more than their budget and "
        f"{window + hold} tokens{', and are not quantized' if scheme == 'kivi' else ''}"
    )
