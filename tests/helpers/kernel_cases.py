"""Comparisons of the Triton kernels with their torch references, for any device: the interpreter's CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kvsurgery.templates.kv_cache import KVLayerCache
from kvsurgery.templates.kv_codes import empty_tiles, quantize, rotated, rotation
from kvsurgery.templates.kv_columns import Columns
from kvsurgery.templates.kv_decode import decode
from kvsurgery.templates.kv_heads import HeadGroup
from kvsurgery.templates.kv_layout import EVERY, TILE, VALUE_NORM, LayerLayout, Quantization, Selection
from kvsurgery.templates.kv_pack import flush
from kvsurgery.templates.kv_prefill import prefill, prefill_with_lse
from kvsurgery.templates.kv_softmax import Scoring, Span, Window
from kvsurgery.templates.kv_storage import HeadTable
from kvsurgery.templates.kv_store import append
from kvsurgery.templates.kv_tiles import QuantizedGroup
from kvsurgery.templates.kv_token_codes import encoded_tokens, token_states
from tests.helpers.kernel_reference import append_reference, decode_reference, flush_reference, prefill_reference

FULL = (EVERY, 1, 1)  # sink, ring, recent
COLUMNS = 6000  # of all decode steps
MANY = 32  # rows: with more, a program counts units in shared memory


def _suffix(case: Decode | Packed | Prefill) -> str:
    """How a case scores, in a test's name."""
    return ("" if case.softcap is None else "-capped") + ("-sunk" if case.learned else "")


def _scoring(case: Decode | Packed | Prefill, heads: int, device: str, dtype: torch.dtype) -> Scoring:
    """How a case with this many KV heads scores."""
    sinks = torch.randn(heads * case.group).mul(3).to(device, dtype) if case.learned else None
    return Scoring(case.head_dim**-0.5, case.softcap, sinks=sinks)


class Decode(NamedTuple):
    """One decode step: heads of some kinds (sink, ring, recent), rows of some lengths."""

    kinds: list[tuple[int, int, int]]
    group: int
    head_dim: int
    lengths: list[int]
    programs: int
    softcap: float | None = None
    learned: bool = False  # sinks that are logits

    def __str__(self) -> str:
        heads = "+".join("full" if kind == FULL else f"{kind[0]}.{kind[1]}.{kind[2]}" for kind in self.kinds)
        lengths = ".".join(map(str, self.lengths))
        return f"{heads}-g{self.group}-d{self.head_dim}-n{lengths}-p{self.programs}{_suffix(self)}"


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
    Decode([FULL, (4, 60, 60)], 8, 64, [300, 0, 5], 11, learned=True),
    Decode([FULL, (4, 16, 16), (2, 8, 8)], 2, 16, [3, 90, 0, 20] * 12, 13),
]


def _named(how: Quantization) -> str:
    """A quantization in a test's name."""
    return f"{how.scheme}{how.bits}{'' if how.group_size is None else f'.{how.group_size}'}s{how.sink}r{how.residual}"


class Packed(NamedTuple):
    """A decode step over heads with packed tiles, a third shorter from one to the next, and 16-bit ones (`others`).

    With a `window`, sink and recent, the first head with tiles streams.
    """

    quantization: Quantization
    heads: int
    others: list[tuple[int, int, int]]
    group: int
    head_dim: int
    lengths: list[int]
    programs: int
    softcap: float | None = None
    window: tuple[int, int] | None = None
    learned: bool = False

    def __str__(self) -> str:
        kinds = f"{self.heads}{_named(self.quantization)}+{len(self.others)}"
        lengths = ".".join(map(str, self.lengths))
        window = "" if self.window is None else f"-w{self.window[0]}.{self.window[1]}"
        return f"{kinds}-g{self.group}-d{self.head_dim}-n{lengths}-p{self.programs}{_suffix(self)}{window}"


def row_cases(rows: int) -> tuple[Decode, Packed]:
    """Decode steps of this many rows of one head, slots alone and with tiles; all but the last 130 are empty."""
    lengths, how = ([0] * rows + [0, 90, 140, 3, 0] * 26)[-rows:], Quantization(4, residual=0, sink=0)
    return Decode([FULL], 1, 16, lengths, 13), Packed(how, 1, [], 1, 16, lengths, 13)


PACKED = [
    Packed(Quantization(4), 2, [], 4, 128, [0, 1, 127, 700], 5),
    Packed(Quantization(8), 1, [], 1, 128, [300, 257], 7),
    Packed(Quantization(2), 1, [FULL], 4, 128, [300, 600], 3),
    Packed(Quantization(4), 1, [], 7, 64, [5000, 129], 24),
    Packed(Quantization(4, group_size=32), 2, [(4, 60, 60)], 4, 80, [900], 11),
    Packed(Quantization(8, group_size=16, residual=0), 1, [FULL, (4, 60, 60)], 1, 80, [300, 129], 64),
    Packed(Quantization(2, group_size=64), 1, [], 16, 64, [520], 1),
    Packed(Quantization(4, "per-token"), 2, [(0, 64, 64)], 4, 96, [650, 0], 6),
    Packed(Quantization(8, "per-token", 32), 1, [], 4, 128, [400], 4),
    Packed(Quantization(2, "per-token", 20, 30), 1, [FULL], 7, 80, [300], 5, softcap=20.0),
    Packed(Quantization(4, residual=64), 1, [], 2, 256, [450], 9, softcap=30.0),
    Packed(Quantization(8), 1, [], 4, 16, [450], 4),
    Packed(Quantization(2), 3, [], 2, 16, [450, 200], 8),
    Packed(Quantization(4, sink=0), 2, [FULL], 2, 32, [450, 200], 8),
    Packed(Quantization(3), 2, [FULL], 4, 128, [700, 300], 5),
    Packed(Quantization(3, group_size=32, residual=0), 1, [], 7, 80, [600], 7, window=(3, 300)),
    Packed(Quantization(3, "per-token"), 1, [FULL], 2, 64, [450], 4, softcap=20.0),
    Packed(Quantization(3, "per-token", 16), 1, [], 1, 48, [450], 4),
    Packed(Quantization(4), 2, [FULL], 4, 64, [1500, 700, 3], 7, window=(5, 520)),
    Packed(Quantization(8, "per-token", residual=10), 1, [(4, 60, 60)], 1, 80, [900, 290], 3, window=(0, 300)),
    Packed(Quantization(2, group_size=16, residual=0), 1, [], 4, 16, [1000, 383], 5, softcap=20.0, window=(130, 257)),
    Packed(Quantization(4), 2, [FULL], 8, 64, [450, 3], 7, learned=True),
    Packed(Quantization(8, group_size=32), 1, [FULL], 8, 128, [450], 4),  # four parts of words
    Packed(Quantization(4, group_size=32), 2, [FULL], 7, 128, [700, 300], 5),  # two parts of words
    Packed(Quantization(2, "per-token", 32), 1, [], 8, 128, [450], 4),
    Packed(Quantization(2, group_size=16, residual=0), 1, [], 5, 128, [450], 4, softcap=20.0),  # 16 columns
    Packed(Quantization(3, group_size=32), 1, [FULL], 4, 256, [450], 3, window=(3, 300)),
    Packed(Quantization(4, "per-token", 16), 1, [], 3, 128, [450, 0], 4),
    Packed(Quantization(4), 2, [(4, 16, 16)], 1, 16, [0, 400, 130, 300, 5] * 9, 13),
    Packed(Quantization("k3v2"), 2, [FULL], 4, 128, [700, 300], 5),
    Packed(Quantization("k8v3", residual=0), 1, [(4, 60, 60)], 7, 80, [600, 129], 7, window=(3, 300)),
    Packed(Quantization("k2v8", group_size=16, residual=0), 1, [], 4, 64, [450], 4, softcap=20.0),
    Packed(Quantization("k4v3", group_size=32), 1, [FULL], 7, 128, [600], 7, window=(3, 300)),  # four sets of planes
    Packed(Quantization("k2v4", "per-token", 16), 1, [], 3, 128, [450, 0], 4),
    Packed(Quantization("k3v8", "per-token"), 1, [FULL], 2, 48, [450], 4),
    Packed(Quantization("k8v2", "per-token", 32), 1, [], 8, 128, [450], 4),
    Packed(Quantization(4), 1, [], 20, 128, [450], 4),  # more queries than read tiles at once
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
    learned: bool = False

    def __str__(self) -> str:
        kind = "full" if self.recent is None else f"{self.sink}.{self.recent}"
        padding = "" if self.padding is None else f"-pad{'.'.join(map(str, self.padding))}"
        return f"{kind}-g{self.group}-d{self.head_dim}-past{self.past}-t{self.tokens}{padding}{_suffix(self)}"


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
    Prefill(0, 100, 8, 64, padding=[3, 0, 100], learned=True),
    Prefill(500, 60, 8, 64, sink=4, recent=128, softcap=20.0, learned=True),
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
    table = HeadTable(keys.to(dtype), values.to(dtype), offsets, sinks, rings, recents, skipped(lengths))
    query, table, scoring = query.to(device, dtype), moved(table, device), _scoring(case, heads, device, dtype)
    check_decoded(decode(query, table, columns(device), scoring, case.programs), query, table, columns(device), scoring)


def check_packed(case: Packed, dtype: torch.dtype, device: str) -> None:
    """`decode` over tiles is as near to exact attention over what they stand for as torch in the same precision.

    Slots of packed tokens and tiles that nothing has packed hold NaN.
    """
    torch.manual_seed(0)
    quantization, head_dim = case.quantization, case.head_dim
    ring = quantization.slots(EVERY, 0, margin=3)
    kinds = [(quantization.sink, ring, EVERY)] * case.heads + case.others
    counts = torch.full((len(kinds),), quantization.tiles(max(case.lengths)) + 1, dtype=torch.int32)
    if case.window:
        kinds[0] = case.window[0], ring, case.window[1]
        counts[0] = quantization.window_tiles(case.window[1])
    lengths = torch.tensor([[length * 3 // (3 + head) for head in range(len(kinds))] for length in case.lengths])
    slots = [min(max(case.lengths), sink + ring) for sink, ring, _ in kinds]
    offsets = torch.tensor(slots).cumsum(0) - torch.tensor(slots)
    keys, values = torch.full((2, len(lengths), sum(slots), head_dim), torch.nan, dtype=dtype)
    ends = 1 + counts[: case.heads].cumsum(0)
    tiles = empty_tiles(keys, int(ends[-1]), quantization)
    for part in tiles:
        part.fill_(torch.nan if part.is_floating_point() else 255)
    packed = torch.zeros(len(lengths), len(kinds), dtype=torch.int32)
    first_tiles = torch.full((len(kinds),), -1, dtype=torch.int32)
    first_tiles[: case.heads] = ends - counts[: case.heads]
    for row, of_heads in enumerate(lengths.tolist()):
        for head, ((sink, ring, _), length) in enumerate(zip(kinds, of_heads, strict=True)):
            states = torch.randn(2, length, head_dim).to(dtype)
            if head < case.heads:
                packed[row, head] = TILE * quantization.tiles(length - sink)
                whole = states[:, sink : sink + packed[row, head]].reshape(2, -1, TILE, head_dim)
                for part, own in zip(tiles, quantize(*whole, quantization), strict=True):
                    for number, tile in enumerate(own):
                        part[row, first_tiles[head] + number % counts[head]] = tile
            position = torch.arange(length)
            position = position[(position < sink) | (position >= sink + packed[row, head])]
            slot = offsets[head] + torch.where(position < sink, position, sink + (position - sink) % ring)
            keys[row, slot], values[row, slot] = states[:, position]
    query = torch.randn(len(lengths), len(kinds) * case.group, head_dim).to(dtype)
    sinks, rings, recents = (torch.tensor(of, dtype=torch.int32) for of in zip(*kinds, strict=True))
    turned = case.heads if quantization.rotate != "none" else 0
    matrix = rotation(head_dim, torch.float32, keys.device) if turned else None
    stored = tiles, first_tiles, packed, counts if case.window else None, quantization, 0, turned, matrix
    table = moved(HeadTable(keys, values, offsets, sinks, rings, recents, skipped(lengths), *stored), device)
    query, scoring = query.to(device), _scoring(case, len(kinds), device, dtype)
    check_decoded(decode(query, table, columns(device), scoring, case.programs), query, table, columns(device), scoring)


def columns(device: str) -> torch.Tensor:
    """How many columns there are."""
    return torch.full((1, 1), COLUMNS, dtype=torch.int32, device=device)


def skipped(lengths: torch.Tensor) -> torch.Tensor:
    """Columns that heads skip which have this many tokens, int32 [batch, heads]."""
    return (COLUMNS - lengths).int()


def moved(table: HeadTable, device: str) -> HeadTable:
    """A copy of a table on a device."""
    parts = {name: part.to(device, copy=True) for name, part in table._asdict().items() if torch.is_tensor(part)}
    tiles = table.tiles and table.tiles.map(lambda part: part.to(device, copy=True))
    return table._replace(tiles=tiles, **parts)


def check_decoded(
    out: torch.Tensor, query: torch.Tensor, table: HeadTable, columns: torch.Tensor, scoring: Scoring
) -> None:
    """`check` of what `decode` returned; rows of no tokens are zero.

    Errors are those of rotated outputs: a rounded weight changes all channels of a raw code alike, which a rotation
    back gathers in one of them.
    """
    group = query.shape[1] // len(table.offsets)

    def turned(error):
        return rotated(error[:, :, None], table.rotated_values * group)

    def reference(query, keys, values):
        return decode_reference(query, table._replace(keys=keys, values=values), columns, scoring)

    check(out, reference, [query, table.keys, table.values], of_error=turned)
    assert not out.unflatten(1, (table.skipped.shape[1], -1))[table.skipped == columns].any()


FLUSH = [
    (Quantization(4), 128),
    (Quantization(8, group_size=16, residual=10), 80),
    (Quantization(2, group_size=32, residual=0), 64),
    (Quantization(4, "per-token", residual=10), 96),
    (Quantization(2, "per-token", 20, 30), 80),
    (Quantization(8, "per-token"), 16),
    (Quantization(3), 80),
    (Quantization(3, "per-token", 32, residual=3), 64),
    (Quantization("k3v2"), 80),
    (Quantization("k2v8", "per-token", 16, residual=3), 48),
]


def check_flush(quantization: Quantization, head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Heads that grow by other steps end with the tiles that `kv_tiles` makes, to the bit; 16-bit heads with none.

    The first one's tiles go round a ring of one, after sinks.
    """
    torch.manual_seed(0)
    batch, heads, steps, ring, sink = 2, 3, 3, quantization.slots(EVERY, 0, margin=5), 7
    rings, sinks = torch.full((heads,), ring, dtype=torch.int32), torch.tensor([sink, 0, 0], dtype=torch.int32)
    counts = torch.tensor([1, 1, steps], dtype=torch.int32)
    offsets, first_tiles = torch.arange(heads) * ring, torch.tensor([3, -1, 0], dtype=torch.int32)
    offsets[1:] += sink
    keys, values = torch.randn(2, batch, heads * ring + sink, head_dim).to(dtype)
    tiles = empty_tiles(keys, 3 + steps, quantization)
    packed, confirmed = torch.zeros(batch, heads, dtype=torch.int32), torch.zeros(batch, heads, dtype=torch.int64)
    stored = tiles, first_tiles, packed, counts, quantization
    expected = HeadTable(keys, values, offsets, sinks, rings, rings, packed, *stored)
    found, least = moved(expected, device), quantization.residual + TILE
    for grown in [[least, least - 1], [TILE + 3, 1], [0, TILE]]:
        confirmed += torch.tensor(grown)[:, None]
        for table in (expected, found):
            table.keys[:, :: steps + 1] += 0.5
        flush(found, (confirmed + sinks).to(device))
        flush_reference(expected, confirmed + sinks)
        for part, other in zip((*found.tiles, found.packed), (*tiles, packed), strict=True):
            torch.testing.assert_close(part.cpu(), other, rtol=0, atol=0)
    assert packed.tolist() == [[2 * TILE, 0, 2 * TILE]] * batch


class Compact(NamedTuple):
    """Budgeted heads after a full one, at the end of a prompt of padded rows, in a cache for `new` more tokens."""

    budgets: tuple[int, ...]
    prompt: int
    head_dim: int
    pads: list[int]
    quantization: Quantization | None = None
    new: int = 9

    def __str__(self) -> str:
        kind = "" if self.quantization is None else f"-{_named(self.quantization)}"
        budgets, pads = ".".join(map(str, self.budgets)), ".".join(map(str, self.pads))
        return f"b{budgets}-n{self.prompt}-d{self.head_dim}-pad{pads}{kind}"


COMPACT = [
    Compact((0, 1, 127, 128, 129, 5000), 301, 64, [0]),
    Compact((129, 0, 5000), 1031, 80, [0, 3, 900, 1025, 1031]),  # the last rows begin in the window, or not yet
    Compact((0,), 40, 128, [0, 39]),
    Compact((16, 4), 8, 256, [0, 3]),  # nothing before the window
    Compact((5,), 1, 16, [0]),
    Compact((0, 1, 127, 128, 129, 5000), 700, 128, [0, 433], Quantization(4)),
    Compact((400, 120, 5000), 523, 80, [0, 0, 300], Quantization(8, group_size=16, residual=0)),
    Compact((300, 0), 417, 96, [100, 100], Quantization(2, "per-token", 32, 30), new=900),
    Compact((260,), 261, 16, [0], Quantization(8, "per-token"), new=0),
    Compact((400, 2), 500, 64, [0, 260], Quantization(4, residual=0, sink=0)),
    Compact((300,), 400, 48, [0], Quantization(3, residual=0)),
    Compact((300, 2), 400, 80, [0, 260], Quantization("k3v2", residual=0)),
]


def check_compact(case: Compact, dtype: torch.dtype, device: str) -> None:
    """The kernel writes what the torch path does, to the bit, and nothing else."""
    torch.manual_seed(0)
    batch, heads, group = len(case.pads), 1 + len(case.budgets), 2
    keys = torch.randn(batch, case.prompt, heads, case.head_dim).to(device, dtype).transpose(1, 2)
    values = torch.randn(batch, heads, case.prompt, case.head_dim).to(device, dtype)
    query = torch.randn(batch, heads * group, case.prompt, case.head_dim).to(device, dtype)
    mask = torch.arange(case.prompt) >= torch.tensor(case.pads)[:, None]
    layout = LayerLayout(
        ((1, len(case.budgets)),), 0, 1, False, case.budgets, Selection(8, 7, "max"), case.quantization
    )
    layers = []
    for kernels in (False, True):
        columns = Columns(case.prompt + case.new)
        columns.begin(mask, batch, case.prompt, 0)
        layer = KVLayerCache(layout, columns)
        layer.update(keys, values)
        layer.make_room(case.prompt)
        for part in (layer.keys, layer.values, *(layer.storage.tiles or ())):
            part.fill_(torch.nan if part.is_floating_point() else 255)
        own = keys[:, 1:], values[:, 1:]
        layer.heads[-1].observe(0, query[:, group:])
        kept = layer.heads[-1].select(*own, columns.pads, Scoring(case.head_dim**-0.5))
        layer.heads[-1].compact(*own, kept, kernels)
        layers.append(layer)
    expected, found = ([*table, *(table.tiles or ())] for table in (layer.storage.table() for layer in layers))
    for part, other in zip(found, expected, strict=True):
        if torch.is_tensor(part):
            torch.testing.assert_close(part, other, rtol=0, atol=0, equal_nan=True)


class Renew(NamedTuple):
    """Heads with rolling budgets, after a full one, as they select before a column; the cache has room for more."""

    budgets: tuple[int, ...]
    column: int
    group: int
    head_dim: int
    pads: list[int]
    selection: Selection
    softcap: float | None = None
    learned: bool = False
    quantization: Quantization | None = None

    def __str__(self) -> str:
        budgets, pads = ".".join(map(str, self.budgets)), ".".join(map(str, self.pads))
        how = f"{self.selection.select}{self.selection.window}.{self.selection.kernel_size}{self.selection.pool}"
        how += "" if self.quantization is None else f"-{_named(self.quantization)}"
        return f"b{budgets}-n{self.column}-g{self.group}-d{self.head_dim}-pad{pads}-{how}{_suffix(self)}"


RENEW = [
    Renew((0, 1, 63, 64, 200), 256, 4, 64, [0], Selection(8, 7, "max", 32)),
    Renew((5, 31), 70, 1, 80, [0, 3, 30, 62, 69, 90], Selection(8, 3, "avg", 8)),  # the last rows have no candidates
    Renew((300,), 345, 7, 128, [0, 17], Selection(13, 1, "max", 32, VALUE_NORM)),
    Renew((40, 8), 129, 2, 256, [0], Selection(20, 5, "avg", 20, VALUE_NORM), softcap=20.0),
    Renew((60,), 150, 8, 16, [0, 100], Selection(32, 7, "max", 32), learned=True),
    Renew((0, 7, 90, 300), 256, 4, 64, [0, 9, 250], Selection(8, 7, "max", 32)),
    Renew((70,), 129, 2, 80, [0, 60], Selection(20, 3, "avg", 40), learned=True),
    Renew(
        *((400, 120), 500, 4, 128, [0, 300], Selection(8, 7, "max", 64)),
        quantization=Quantization(4, "per-token", 32, residual=10),
    ),
    Renew(
        *((200, 290), 500, 2, 80, [30], Selection(8, 1, "avg", 130, VALUE_NORM)),
        quantization=Quantization(2, "per-token", 16, residual=0, sink=0),
    ),
    Renew(
        *((300, 5), 430, 7, 48, [0, 400], Selection(16, 3, "max", 40)),
        quantization=Quantization(3, "per-token", residual=3, sink=2),
    ),
    Renew(
        *((260,), 420, 1, 16, [7, 288], Selection(8, 7, "max", 130)),  # the last row drops nothing: it fills a tile
        quantization=Quantization(8, "per-token", residual=0),
    ),
    Renew(
        *((300, 5), 430, 4, 80, [0, 400], Selection(16, 3, "max", 40, VALUE_NORM)),
        quantization=Quantization("k3v2", "per-token", 16, residual=3),
    ),
    Renew(
        *((300,), 430, 1, 48, [0], Selection(16, 3, "max", 40)),
        quantization=Quantization("k2v8", "per-token", residual=3),
    ),
]


def check_renew(case: Renew, dtype: torch.dtype, device: str) -> None:
    """The same tokens stay as in torch, in order; in 16 bit but for one near the threshold in each head.

    They are what they were, but those that go from slots into tiles: `encoded_tokens` says what these are then.
    """
    torch.manual_seed(0)
    batch, heads, selection, how = len(case.pads), 1 + len(case.budgets), case.selection, case.quantization
    columns = Columns(case.column + 40)
    layout = LayerLayout(((1, len(case.budgets)),), 0, 1, False, case.budgets, selection, how)
    mask = torch.arange(case.column) >= torch.tensor(case.pads)[:, None]
    prompt = case.column - selection.hold
    columns.begin(mask[:, :prompt], batch, prompt, 0)
    states = torch.randn(2, batch, heads, case.column, case.head_dim).to(device, dtype)
    query = torch.randn(batch, heads * case.group, case.column, case.head_dim).mul(2).to(device, dtype)
    scoring, layers = _scoring(case, heads - 1, device, dtype), []
    for kernels in (False, True):
        layer = KVLayerCache(layout, columns)
        layer.update(*states)
        layer.make_room(prompt)
        asked, held = query[:, case.group :], layer.heads[-1]
        held.observe(0, asked[:, :, :prompt])
        own = [part[:, 1:, :prompt] for part in states]
        held.compact(*own, held.select(*own, columns.pads, scoring))
        for number, group in enumerate(held.groups, 1):
            group.settled = case.column - 1
            group.store(prompt, *(part[:, number, None, prompt:] for part in states))
        layer.seen = case.column
        held.watch(prompt, asked[:, :, prompt:])
        before = [(_held(group, case.column), [*group.packed]) for group in held.groups]
        layer.storage.table()
        columns.expected = case.column + 1  # nothing before this step is taken back
        held.renew(case.column, kernels)
        columns.expected = prompt
        layers.append(layer)
    expected, found = (layer.heads[-1].groups for layer in layers)
    tables = [layer.storage.table() for layer in layers]
    assert tables[1].skipped.equal(tables[0].skipped)
    if how:
        assert tables[1].packed.equal(tables[0].packed)
        assert tables[1].packed[:, 1:].T.tolist() == [group.packed for group in found]
        assert tables[1].packed[:, 1:].any()
    for one, other, (old, packed) in zip(found, expected, before, strict=True):
        assert one.skips == other.skips
        for row, skip in enumerate(one.skips):
            tokens = max(case.column - skip, 0)
            same, ours = (_sources(group, row, tokens, old[row], packed[row]) for group in (one, other))
            assert same == sorted(set(same))
            assert len({*same} ^ {*ours}) <= 2 * (dtype != torch.float32), (same, ours)


def _held(group: HeadGroup, column: int) -> list[torch.Tensor]:
    """Keys and values of the tokens of each row before a column: [tokens, 2 * head_dim]."""
    lengths = [max(column - skip, 0) for skip in group.skips]
    every = torch.cat(group.at(torch.arange(max(lengths), device=group.keys.device).expand(len(lengths), -1)), 3)
    return [of_row[0, :length] for of_row, length in zip(every, lengths, strict=True)]


def _sources(group: HeadGroup, row: int, tokens: int, before: torch.Tensor, packed: int) -> list[int]:
    """Which of the tokens before became the first ones of a row: as they were, but where tiles took them from slots."""
    now = _held(group, tokens + group.skips[row])[row]
    equal = (now[:, None] == before).all(-1)
    if isinstance(group, QuantizedGroup):
        how = group.quantization
        parts = zip(before.chunk(2, 1), how.widths, strict=True)
        encoded = [token_states(*encoded_tokens(part, bits, how), bits) for part, bits in parts]
        after, source = (torch.arange(len(part), device=now.device) - group.sink for part in (now, before))
        taken = ((after >= 0) & (after < group.packed[row]))[:, None] & (source >= packed)
        equal = ((now[:, None] == torch.cat(encoded, 1)).all(-1)).where(taken, equal)
    assert equal.any(1).all()
    return equal.int().argmax(1).tolist()


ROTATED = [(0, 0), (0, 2), (2, 3)]  # heads with rotated keys and values


def check_append(keys_of: int, values_of: int, dtype: torch.dtype, device: str) -> None:
    """Tokens that come one by one, some rows later than others, are found again: with full and streaming heads.

    Of some heads keys and values are rotated on the way, which changes nothing of what attention finds; what is rotated
    may be rounded to a neighbor, and so may what is computed of it.
    """
    torch.manual_seed(0)
    batch, heads, head_dim, tokens = 3, 3, 80, 24
    sinks, rings, recents = torch.tensor([[EVERY, 2, 0], [1, 9, 6], [0, 5, 5]], dtype=torch.int32, device=device)
    # tokens a head did not get
    padding = torch.tensor([[0, 0, 0], [17, 17, 17], [tokens, 3, tokens]], dtype=torch.int32, device=device)
    seen = torch.zeros(1, 1, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, tokens, tokens + 11], device=device)
    keys, values, same_keys, same_values = torch.full(
        (4, batch, tokens + 17, head_dim), torch.nan, dtype=dtype, device=device
    )
    table = HeadTable(keys, values, offsets, sinks, rings, recents, padding)
    matrix = rotation(head_dim, torch.float32, table.keys.device) if values_of else None
    table = table._replace(rotated_keys=keys_of, rotated_values=values_of, matrix=matrix, launches={})
    same = table._replace(keys=same_keys, values=same_values)
    came = torch.randn(2, batch, tokens, heads, head_dim).to(device, dtype)
    query = torch.randn(batch, heads * 2, head_dim).to(device, dtype)
    asked, rounded = query, 1e-5 if dtype == torch.float32 else 2e-2
    near = {"rtol": 0, "atol": rounded * bool(values_of), "equal_nan": True}
    for column in range(tokens):
        new_keys, new_values = came[:, :, column, :, None]
        token = new_keys if column % 2 else new_keys.contiguous(), new_values
        seen += 1
        asked = append(table, seen, query, *token)
        torch.testing.assert_close(asked, append_reference(same, seen, query, *token), **near)
    torch.testing.assert_close(keys, same_keys, **near)
    torch.testing.assert_close(values, same_values, **near)

    out = decode(asked, table, seen, Scoring(head_dim**-0.5), programs=4)
    age = tokens - 1 - torch.arange(tokens, device=device)
    for row, of_heads in enumerate(padding.tolist()):
        for head, pad in enumerate(of_heads):
            if pad == tokens:
                continue
            position = torch.arange(tokens, device=device) - pad
            visible = (position >= 0) & ((position < sinks[head]) | (age < recents[head]))
            own_keys, own_values = came[:, row, visible, head].double()
            scores = query[row, head * 2 : head * 2 + 2].double() @ own_keys.T * head_dim**-0.5
            torch.testing.assert_close(
                out[row, head * 2 : head * 2 + 2].double(), scores.softmax(-1) @ own_values, rtol=0, atol=rounded
            )


def check_prefill(case: Prefill, dtype: torch.dtype, device: str) -> None:
    """`prefill` with what a cache holds of the past is as near to exact attention over everything as torch is."""
    torch.manual_seed(0)
    batch, heads, columns = len(case.padding or [0]), 2, case.past + case.tokens
    query = torch.randn(batch, case.tokens, heads * case.group, case.head_dim).transpose(1, 2)
    keys = torch.randn(batch, heads, columns, case.head_dim)
    values = torch.randn(batch, columns, heads, case.head_dim).transpose(1, 2)
    states = [part.to(device, dtype) for part in (query, keys, values)]
    padding = 0 if case.padding is None else torch.tensor(case.padding, device=device)
    span, scoring = Span(case.past, padding), _scoring(case, heads, device, dtype)
    window = None if case.recent is None else Window(case.sink, case.recent)

    pads = case.padding or [0]
    given, of_given, seen = [part.clone() for part in states[1:]], span, window
    for row, pad in enumerate(pads):
        for part in given:
            part[row, :, :pad] = torch.nan
    if case.past and case.recent is not None:
        seen = window._replace(sinks=tuple(_by_position(part, pads, case.sink) for part in given))
        of_given = span._replace(first=max(case.past - case.recent + 1, 0))
        given = [part[:, :, of_given.first :] for part in given]
    elif case.past and case.padding:
        given, of_given = [_by_position(part, pads, columns + 2) for part in given], span._replace(first=None)
    out = prefill(states[0], *given, of_given, scoring, seen)
    check(out, prefill_reference, states, span, scoring, window)


def check_prefill_blocks(padding: list[int] | None, dtype: torch.dtype, device: str) -> None:
    """Attention to a block of the past and to what follows it, merged by their log-sum-exp, is that to everything."""
    torch.manual_seed(0)
    batch, heads, group, head_dim, past, tokens, limit = len(padding or [0]), 2, 4, 80, 150, 40, 128
    query = torch.randn(batch, heads * group, tokens, head_dim)
    keys, values = torch.randn(2, batch, heads, past + tokens, head_dim)
    states = [part.to(device, dtype) for part in (query, keys, values)]
    pads = padding or [0]
    by_position = [_by_position(part, pads, past + tokens + 2) for part in states[1:]]
    span = Span(past, 0 if padding is None else torch.tensor(padding, device=device))
    scoring = Scoring(head_dim**-0.5)
    blockwise = scoring._replace(sinks=torch.zeros(heads * group, device=device))  # sinks come once, after both
    block, after = span._replace(first=None, limit=limit), span._replace(past=past - limit, first=None)
    old, old_lse = prefill_with_lse(states[0], *(part[:, :, :limit] for part in by_position), block, blockwise)
    out, lse = prefill_with_lse(states[0], *(part[:, :, limit:] for part in by_position), after, blockwise)
    whole = torch.logaddexp(old_lse, lse)
    merged = old.float() * (old_lse - whole).exp()[..., None] + out.float() * (lse - whole).exp()[..., None]
    merged = merged.where(whole[..., None] > -torch.inf, 0)
    check(merged.to(dtype), prefill_reference, states, span, scoring)

    scores = states[0].double() @ states[1].double().repeat_interleave(group, 1).transpose(2, 3) * head_dim**-0.5
    column = torch.arange(past + tokens, device=device)
    seen = (column <= column[past:, None]) & (column >= torch.tensor(pads, device=device)[:, None, None, None])
    exact = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(whole.double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-2)


def _by_position(states: torch.Tensor, padding: list[int], slots: int) -> torch.Tensor:
    """Columns of each row, [batch, heads, columns, head_dim], moved to their position; what holds none is NaN."""
    stored = torch.full_like(states[:, :, :1], torch.nan).repeat(1, 1, slots, 1)
    for row, pad in enumerate(padding):
        own = states[row, :, pad : pad + slots]
        stored[row, :, : own.shape[1]] = own
    return stored


def check(out: torch.Tensor, reference, states: list, *args, of_error=torch.Tensor.abs) -> None:
    """At most twice the error of torch in the same precision, plus 1e-5, against the reference in a higher one."""
    high = torch.float64 if out.dtype == torch.float32 else torch.float32
    exact = reference(*(part.to(high) for part in states), *args)
    error, torch_error = (of_error(result.to(high) - exact).abs().max() for result in (out, reference(*states, *args)))
    assert error <= 2 * torch_error + 1e-5, f"error {error:.1e}, torch's is {torch_error:.1e}"


def _later(check: Callable, case: tuple) -> bool:
    """Whether a case goes last, so that those before it keep their turns."""
    return getattr(case[0], "learned", False) or len(getattr(case[0], "lengths", ())) > MANY


# of all kernels what is compared, and its arguments but for a dtype and device, in the order in which tests take turns
COMPARISONS: list[tuple[Callable, tuple]] = [
    *((check_decode, (case,)) for case in DECODE),
    *((check_packed, (case,)) for case in PACKED),
    *((check_flush, case) for case in FLUSH),
    *((check_compact, (case,)) for case in COMPACT),
    *((check_renew, (case,)) for case in RENEW),
    *((check_prefill, (case,)) for case in PREFILL),
    *((check_prefill_blocks, (padding,)) for padding in (None, [0, 140, 60, 190])),
]
COMPARISONS.sort(key=lambda one: _later(*one))
# target and dtype in which the emulator runs every third of them, by turns; float32 takes longest to compile
TURNS = [(80, "bf16"), (80, "fp16"), (80, "bf16"), (80, "fp32"), (80, "bf16"), (90, "bf16"), (80, "bf16"), (90, "fp16")]
