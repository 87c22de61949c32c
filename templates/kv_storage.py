"""`Storage`: the buffers of one layer, which its groups of heads are views of, and how kernels see them."""

import copy
from itertools import groupby
from typing import Any, NamedTuple

import torch

from .kv_columns import Rows, on_device
from .kv_heads import HeadGroup
from .kv_layout import LayerLayout, Quantization


class HeadTable(NamedTuple):
    """A layer's KV heads and their storage, as the kernels take them."""

    keys: torch.Tensor  # [batch, slots, head_dim], of all heads one after the other
    values: torch.Tensor  # with equal strides
    offsets: torch.Tensor  # int32 [heads], each head's first slot
    sinks: torch.Tensor  # int32 [heads]; `EVERY` of a full head that is not quantized
    rings: torch.Tensor  # int32 [heads], slots of the ring: `recents` or more, but where tiles take a part
    recents: torch.Tensor  # int32 [heads], the window; of a quantized full head one that no position reaches
    skipped: torch.Tensor  # int32 [batch, heads], columns before position 0
    tiles: Any = None  # `Tiles` of all heads; None: there are none
    first_tiles: torch.Tensor | None = None  # int32 [heads], each head's first tile; -1: it has none
    packed: torch.Tensor | None = None  # int32 [batch, heads], tokens after the sinks in tiles, maybe in a ring too
    counts: torch.Tensor | None = None  # int32 [heads], tiles that go round a ring; None: no head has a ring of tiles
    quantization: Quantization | None = None
    rotated_keys: int = 0  # heads, the first ones, whose keys are stored rotated
    rotated_values: int = 0
    matrix: torch.Tensor | None = None  # [head_dim, head_dim] in fp32, which rotates them
    launches: dict | None = None  # prepared for this table alone; None: each is prepared anew

    def last(self, heads: int) -> "HeadTable":
        """The last heads alone, of which none has a ring of tiles."""
        heads_before = len(self.offsets) - heads
        names = ("offsets", "sinks", "rings", "recents", "first_tiles", "skipped", "packed")
        parts = {name: getattr(self, name) for name in names}
        return self._replace(
            counts=None,
            launches=None,
            rotated_keys=max(self.rotated_keys - heads_before, 0),
            rotated_values=max(self.rotated_values - heads_before, 0),
            **{name: part if part is None else part[..., heads_before:] for name, part in parts.items()},
        )


class Storage:
    """One buffer of keys and one of values for all groups of a layer."""

    def __init__(self, layout: LayerLayout):
        self.layout = layout
        self.groups: list[HeadGroup] = []
        self.keys = self.values = None  # [batch, slots of all heads, head_dim]: head after head, group after group
        self.slots: list[int] = []  # of a head of each group
        self.tiled: list[Any] = []  # the groups that have tiles
        self.tiles: Any = None  # `Tiles` of all of these
        self.made: HeadTable | None = None  # what `table` made of all this

    def __getstate__(self) -> dict:
        return {**self.__dict__, "made": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._bind()

    def add(
        self, states: torch.Tensor, heads: int, quantized: bool, sink: int | None = None, recent: int = 0
    ) -> HeadGroup:
        """Empty storage for `heads` heads like `states`, which may be quantized; without a sink they are full."""
        self.groups.append(HeadGroup(states, heads, sink, recent))
        return self.groups[-1]

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(group.nbytes for group in self.groups)

    def fit(self, capacity: int) -> None:
        """Make room for this many columns."""
        slots = [group.wanted(capacity) for group in self.groups]
        if self.keys is not None and slots == self.slots:
            return
        old_states = [(group.keys, group.values) for group in self.groups]
        first = old_states[0][0]
        total_slots = sum(group.heads * count for group, count in zip(self.groups, slots, strict=True))
        # zeros, not uninitialized memory: a masked slot has weight 0, and 0 x NaN would be NaN
        self.keys = first.new_zeros(first.shape[0], total_slots, first.shape[3])
        self.values = torch.zeros_like(self.keys)
        self.slots, self.made = slots, None
        self._bind()
        for group, (keys, values) in zip(self.groups, old_states, strict=True):
            group.keys[:, :, : keys.shape[2]], group.values[:, :, : keys.shape[2]] = keys, values

    def _bind(self) -> None:
        """Let the groups be views of the buffers."""
        if self.keys is None or self.values is None:
            return
        begin = 0
        for group, slots in zip(self.groups, self.slots, strict=True):
            shape, end = (group.heads, slots), begin + group.heads * slots
            group.keys = self.keys[:, begin:end].unflatten(1, shape)
            group.values = self.values[:, begin:end].unflatten(1, shape)
            group.in_buffers, begin = True, end

    @torch.inference_mode(False)
    def take_rows(self, rows: Rows) -> None:
        """Reorder, repeat or drop rows."""
        if self.keys is not None and self.values is not None:
            self.keys = rows(self.keys)
            self.values = rows(self.values)
        self.made = None
        self._bind()
        for group in self.groups:
            group.take_rows(rows.of)

    def note_rows(self) -> None:
        """Tell the kernels, in the tensors that they have, what groups know of their rows."""
        if self.made is not None:
            self.made.skipped.copy_(self._by_row("skips"))

    def _by_row(self, name: str) -> torch.Tensor:
        """What groups know of their rows: int32 [batch, heads]."""
        values = [getattr(group, name) for group in self.groups for _ in range(group.heads)]
        return on_device([*zip(*values, strict=True)], self.groups[0].keys.device, torch.int32)

    def table(self) -> HeadTable:
        """The heads as the kernels see them; the same tensors until storage moves."""
        if self.made is None:
            with torch.inference_mode(False):  # later selections write to it
                self.made = self._make()._replace(launches={})
        return self.made

    def _make(self) -> HeadTable:
        assert self.keys is not None  # as `fit` was called
        assert self.values is not None
        heads, offset = [], 0
        for group, slots in zip(self.groups, self.slots, strict=True):
            for _ in range(group.heads):
                heads.append((offset, *group.descriptor()))
                offset += slots
        offsets, sinks, rings, recents = on_device([*zip(*heads, strict=True)], self.keys.device, torch.int32)
        return HeadTable(self.keys, self.values, offsets, sinks, rings, recents, self._by_row("skips"))

    def pack(self, settled: int) -> None:
        """Quantize the tiles that are due, by kernels; no column before `settled` is taken back."""

    def runs(self) -> list[HeadGroup]:
        """Neighbors that hold equally many tokens, as one group each: all that a plain step has to do."""
        assert self.keys is not None  # as `fit` was called
        assert self.values is not None
        runs, begin = [], 0
        for (_, slots, _), neighbors in groupby(self.groups, lambda group: (group.wraps, group.slots, group.skips)):
            group, *others = neighbors
            run = copy.copy(group)
            shape = (sum(neighbor.heads for neighbor in (group, *others)), slots)
            end = begin + shape[0] * slots
            run.keys = self.keys[:, begin:end].unflatten(1, shape)
            run.values = self.values[:, begin:end].unflatten(1, shape)
            runs.append(run)
            begin = end
        return runs

    def rotated_query(self, query: torch.Tensor) -> torch.Tensor:
        """Queries as the keys are that they meet."""
        return query

    def rotated(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they are stored."""
        return key, value

    def rotated_back(self, output: torch.Tensor) -> torch.Tensor:
        """Attention to values as they came, of attention to values as they are stored."""
        return output
