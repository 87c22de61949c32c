"""Who is compared: the stock model's cache, transformers' quantized ones, kvpress' presses, and converted models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SINK, RECENT = 4, 32
WINDOW = 8  # tokens by whose attention tokens are chosen: HeadKV's, for all that choose
BUDGETED = "kvsurgery, budgets"


@dataclass(frozen=True)
class Contender:
    """One row of the results.

    Attributes:
        name: what it is called; unique.
        series: what it is a setting of, a line of the picture.
        kind: "stock", "converted", "quantized" (QuantizedCache) or "press" (kvpress).
        options: of `Recipe.of`, of QuantizedCache, or of the press.
        equals: the converted model whose share of the full cache a press is told to keep; empty where it is told heads.
    """

    name: str
    series: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    equals: str = ""


def _converted(name: str, series: str, **options: Any) -> Contender:
    return Contender(name, series, "converted", options)


def _duo(full: int, bits: int | None = None) -> Contender:
    """So many of 12 KV heads full, the others streaming."""
    series = f"kvsurgery, duo, {bits} bit" if bits else "kvsurgery, duo"
    return _converted(f"{series}, {full} full", series, full_heads=full, sink=SINK, recent=RECENT, bits=bits)


STOCK = Contender("stock", "stock", "stock")
DUO = [_duo(full) for full in (4, 2, 1)]
HEADKV = [
    _converted(f"{BUDGETED} of {size}", BUDGETED, rest="budgeted", budget=size - WINDOW) for size in (256, 64, 16)
]
OURS = [
    *DUO,
    _duo(4, bits=4),
    _duo(2, bits=4),
    *HEADKV,
    *(_converted(f"kvsurgery, {bits} bit", "kvsurgery, bits", sparsity=0.0, bits=bits) for bits in (4, 2)),
    _converted("StreamingLLM", "StreamingLLM", sparsity=1.0, sink=SINK, recent=RECENT),
]
# axes that make a backend scale keys per channel or per token, and values per token
AXES = {"quanto": {"token": (0, 0), "channel": (-1, 0)}, "hqq": {"token": (1, 1)}}
QUANTISED = [
    Contender(
        f"{backend}, {bits} bit, keys per {scaled}",
        f"QuantizedCache, {backend}",
        "quantized",
        {"backend": backend, "nbits": bits, "axis_key": keys, "axis_value": values},
    )
    for backend, axes in AXES.items()
    for scaled, (keys, values) in axes.items()
    for bits in (4, 2)
]
PRESSES = [
    Contender(f"DuoAttentionPress, {full} full", "DuoAttentionPress", "press", {"full_heads": full}) for full in (4, 2)
]
PRESSES += [
    Contender(f"{press} = {equal.name.removeprefix('kvsurgery, ')}", press, "press", equals=equal.name)
    for press in ("AdaKVPress", "SnapKVPress", "PyramidKVPress", "StreamingLLMPress")
    for equal in (*DUO[:2], *HEADKV[1:])
]
CONTENDERS = [STOCK, *OURS, *QUANTISED, *PRESSES]
