"""Comparisons of the Triton kernels with their torch references, for any device: the interpreter's CPU or a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from templates.kv_append import append, append_reference
from templates.kv_decode import decode, decode_reference
from templates.kv_kernels import EVERY
from templates.kv_prefill import prefill, prefill_reference

FULL = (EVERY, 1, 1)  # sink, ring, recent


class Decode(NamedTuple):
    """One decode step: heads of some kinds (sink, ring, recent), rows of some lengths."""

    kinds: list[tuple[int, int, int]]
    group: int
    head_dim: int
    lengths: list[int]
    programs: int
    softcap: float | None = None

    def __str__(self) -> str:
        heads = "+".join("full" if kind == FULL else f"{kind[0]}.{kind[1]}.{kind[2]}" for kind in self.kinds)
        cap = "" if self.softcap is None else "-capped"
        return f"{heads}-g{self.group}-d{self.head_dim}-n{'.'.join(map(str, self.lengths))}-p{self.programs}{cap}"


DECODE = [
    Decode([FULL], 4, 64, [0, 1, 127], 5),
    Decode([FULL], 1, 128, [128, 129], 3),
    Decode([FULL, (4, 60, 60)], 7, 80, [5000, 129], 24),  # a ring that has wrapped
    Decode([FULL, (4, 300, 300)], 4, 96, [130, 7], 64),  # one that has not; more programs than tiles
    Decode([(0, 64, 64), (2, 65, 64)], 1, 64, [1000, 63], 7),  # a native window; a margin of one
    Decode([(4, 500, 20), FULL], 4, 128, [2000, 503, 40], 16),  # whole tiles of margin, nothing in them visible
    Decode([FULL, (4, 16, 16)], 16, 256, [100, 33], 1),
    Decode([FULL, (1, 90, 70)], 7, 64, [300, 0, 91], 11, softcap=30.0),
    Decode([FULL, (4, 8, 8)], 2, 64, [0, 0], 4),
    Decode([(4, 128, 128)] * 3, 3, 80, [132, 133, 128, 4, 3], 9),
]


class Prefill(NamedTuple):
    """Queries of one kind of head after a past; `recent` None: full heads."""

    past: int
    tokens: int
    group: int
    head_dim: int
    sink: int = 0
    recent: int | None = None
    padding: list[int] | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        kind = "full" if self.recent is None else f"{self.sink}.{self.recent}"
        padding = "" if self.padding is None else f"-pad{'.'.join(map(str, self.padding))}"
        cap = "" if self.softcap is None else "-capped"
        return f"{kind}-g{self.group}-d{self.head_dim}-past{self.past}-t{self.tokens}{padding}{cap}"


PREFILL = [
    Prefill(0, 1, 1, 64),
    Prefill(0, 129, 4, 80),
    Prefill(0, 100, 7, 128, padding=[3, 0, 100]),
    Prefill(62, 30, 4, 64),  # a first query whose position is next to last in its tile
    Prefill(300, 5, 4, 64, padding=[130, 0]),
    Prefill(128, 127, 1, 256, softcap=20.0),
    Prefill(90, 64, 2, 96, padding=[110, 90]),  # a row that begins among the queries
    Prefill(0, 200, 4, 64, sink=4, recent=64),
    Prefill(0, 150, 7, 80, sink=4, recent=50, padding=[0, 70, 147, 150]),
    Prefill(0, 257, 1, 128, sink=0, recent=33),  # a native window
    Prefill(0, 150, 4, 64, sink=70, recent=1),  # sinks of more than a tile
    Prefill(500, 1, 4, 128, sink=4, recent=128),
    Prefill(500, 130, 1, 64, sink=4, recent=65, softcap=20.0),
    Prefill(500, 60, 7, 64, sink=16, recent=256, padding=[0, 490, 250]),
    Prefill(3, 40, 4, 64, sink=8, recent=16, padding=[1, 20]),  # sinks that come with the queries
]


def check_decode(case: Decode, dtype: torch.dtype, device: str) -> None:
    """`decode` is as near to exact attention as torch in the same precision, whatever unused memory holds."""
    torch.manual_seed(0)
    batch, heads = len(case.lengths), len(case.kinds)
    sinks, rings, recents = (torch.tensor(of, dtype=torch.int32) for of in zip(*case.kinds, strict=True))
    longest = max(case.lengths)
    slots = [min(longest + 3, sink + ring) for sink, ring, _ in case.kinds]
    offsets = torch.tensor(slots).cumsum(0) - torch.tensor(slots)
    keys, values = (torch.full((batch, sum(slots) + 5, case.head_dim), torch.nan)[:, : sum(slots)] for _ in range(2))
    for row, length in enumerate(case.lengths):
        for offset, (sink, ring, _) in zip(offsets.tolist(), case.kinds, strict=True):
            used = min(length, sink + ring)
            for states in (keys, values):
                states[row, offset : offset + used] = torch.randn(used, case.head_dim)
    query = torch.randn(batch, case.head_dim, heads * case.group).transpose(1, 2).contiguous()
    lengths = torch.tensor(case.lengths)[:, None].expand(-1, heads)
    states = [states.to(device, dtype) for states in (query, keys, values)]
    layout = [part.to(device) for part in (offsets, lengths, sinks, rings, recents)]
    out = decode(*states, *layout, softcap=case.softcap, programs=case.programs)
    check(out, decode_reference, states, *layout, softcap=case.softcap)
    assert not out[torch.tensor(case.lengths) == 0].any()


def check_append(device: str) -> None:
    """Tokens that come one by one, some rows later than others, are found again: with full and streaming heads."""
    torch.manual_seed(0)
    batch, heads, head_dim, tokens = 3, 3, 80, 40
    sinks, rings, recents = torch.tensor([[EVERY, 2, 0], [1, 9, 6], [0, 5, 5]], dtype=torch.int32, device=device)
    padding = torch.tensor([[0, 0, 0], [17, 17, 17], [tokens, 3, tokens]], device=device)  # tokens a head did not get
    offsets = torch.tensor([0, tokens, tokens + 11], device=device)
    keys, values, same_keys, same_values = torch.full((4, batch, tokens + 17, head_dim), torch.nan, device=device)
    came = torch.randn(2, batch, tokens, heads, head_dim, device=device)
    for column in range(tokens):
        new_keys, new_values = came[:, :, column, :, None]
        token = new_keys.contiguous(), new_values
        append(keys, values, *token, offsets, column - padding, sinks, rings)
        append_reference(same_keys, same_values, *token, offsets, column - padding, sinks, rings)
    torch.testing.assert_close(keys, same_keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, same_values, rtol=0, atol=0, equal_nan=True)

    query = torch.randn(batch, heads * 2, head_dim, device=device)
    lengths = tokens - padding
    out = decode(query, keys, values, offsets, lengths, sinks, rings, recents, programs=4)
    age = tokens - 1 - torch.arange(tokens, device=device)
    for row, of_heads in enumerate(padding.tolist()):
        for head, pad in enumerate(of_heads):
            if pad == tokens:
                continue
            position = torch.arange(tokens, device=device) - pad
            seen = (position >= 0) & ((position < sinks[head]) | (age < recents[head]))
            own_keys, own_values = came[:, row, seen, head].double()
            scores = query[row, head * 2 : head * 2 + 2].double() @ own_keys.T * head_dim**-0.5
            torch.testing.assert_close(
                out[row, head * 2 : head * 2 + 2].double(), scores.softmax(-1) @ own_values, rtol=0, atol=1e-5
            )


def check_prefill(case: Prefill, dtype: torch.dtype, device: str) -> None:
    """`prefill` with what a cache holds of the past is as near to exact attention over everything as torch is."""
    torch.manual_seed(0)
    batch, heads, columns = len(case.padding or [0]), 2, case.past + case.tokens
    query = torch.randn(batch, case.tokens, heads * case.group, case.head_dim).transpose(1, 2)
    keys = torch.randn(batch, heads, columns, case.head_dim)
    values = torch.randn(batch, columns, heads, case.head_dim).transpose(1, 2)
    states = [part.to(device, dtype) for part in (query, keys, values)]
    padding = None if case.padding is None else torch.tensor(case.padding, device=device)
    kind = {"past": case.past, "padding": padding, "sink": case.sink, "recent": case.recent, "softcap": case.softcap}

    pads = case.padding or [0]
    given, held = [part.clone() for part in states[1:]], {}
    for row, pad in enumerate(pads):
        for part in given:
            part[row, :, :pad] = torch.nan
    if case.past and case.recent is not None:
        held = {"sinks": tuple(_by_position(part, pads, case.sink) for part in given)}
        held["first"] = max(case.past - case.recent + 1, 0)
        given = [part[:, :, held["first"] :] for part in given]
    elif case.past and case.padding:
        given, held = [_by_position(part, pads, columns + 2) for part in given], {"first": None}
    out = prefill(states[0], *given, **kind, **held)
    check(out, prefill_reference, states, **kind)


def _by_position(states: torch.Tensor, padding: list[int], slots: int) -> torch.Tensor:
    """Columns of each row, [batch, heads, columns, head_dim], moved to their position; what holds none is NaN."""
    stored = torch.full_like(states[:, :, :1], torch.nan).repeat(1, 1, slots, 1)
    for row, pad in enumerate(padding):
        own = states[row, :, pad : pad + slots]
        stored[row, :, : own.shape[1]] = own
    return stored


def check(out: torch.Tensor, reference, states: list, *args, **options) -> None:
    """At most twice the error of torch in the same precision, plus 1e-5, against the reference in a higher one."""
    high = torch.float64 if out.dtype == torch.float32 else torch.float32
    exact = reference(*(part.to(high) for part in states), *args, **options)
    error, torch_error = (
        (result.to(high) - exact).abs().max() for result in (out, reference(*states, *args, **options))
    )
    assert error <= 2 * torch_error + 1e-5, f"error {error:.1e}, torch's is {torch_error:.1e}"
