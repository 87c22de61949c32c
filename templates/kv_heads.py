"""Storage of the heads of one kind in one layer, by position."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, overload

import torch

from .kv_columns import Rows, on_device
from .kv_layout import EVERY, LayerLayout
from .kv_softmax import Skipped

# elements of keys that are quantized or dequantized together: what stays in a CPU's cache, and enough work for a GPU
BLOCK, CUDA_BLOCK = 2**20, 2**24


def block_elements(states: torch.Tensor) -> int:
    """Elements that are worked on together where `states` are."""
    return CUDA_BLOCK if states.is_cuda else BLOCK


class HeadGroup:
    """Keys and values of one layer's heads of one kind: [batch, heads, slots, head_dim] each.

    A token's position is its column less the columns that its row skips: left padding, and what a budgeted head has
    dropped. Full heads store position p in slot p. Streaming heads do so while p < sink, and from there on go round a
    ring: slot sink + (p - sink) % ring.
    """

    def __init__(self, states: torch.Tensor, heads: int, sink: int | None = None, recent: int = 0):
        """Empty storage for `heads` heads like `states` [batch, _, _, head_dim]; without a sink they are full heads."""
        self.sink, self.recent, self.margin = sink, recent, 0
        self.keys = self.values = states.new_zeros(states.shape[0], heads, 0, states.shape[-1])
        self.in_buffers = False  # whether keys and values are views of the layer's buffers
        self.min_skipped = 0  # columns that every row skips
        self.max_tokens = EVERY  # tokens that a row ever has here
        self.dropped = [0] * states.shape[0]  # of each row, the columns before those that a budgeted head has kept
        self.skips = self.dropped  # the columns that each row skips
        self.skipped: Skipped = 0  # the same, a number where rows agree
        self.packed = [0] * states.shape[0]  # of each row, tokens that are in tiles and not here
        self.settled = 0  # columns that tiles may take

    def __copy__(self) -> "HeadGroup":
        clone = type(self).__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone

    def __getstate__(self) -> dict:
        """Without views of the layer's buffers, as pickle would write a whole buffer for each; the layer makes them."""
        if not self.in_buffers:
            return self.__dict__
        empty_states = self.keys.new_zeros(*self.keys.shape[:2], 0, self.keys.shape[3])
        return {**self.__dict__, "keys": empty_states, "values": empty_states}

    @property
    def heads(self) -> int:
        """KV heads of the group."""
        return self.keys.shape[1]

    @property
    def slots(self) -> int:
        """Tokens per row that storage is allocated for."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are allocated."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def ring(self) -> int:
        """Slots that the newest tokens of a streaming head go round in: its window and what may be taken back."""
        return self.recent + self.margin

    @property
    def wraps(self) -> bool:
        """Whether tokens may take the place of others, so that slots differ from positions."""
        return self.sink is not None and self.slots >= self.sink + self.ring

    def align(self, pads: Sequence[int]) -> None:
        """Learn the left padding of each row; none is an empty list."""
        skips = [max(pair) for pair in zip(pads or [0] * len(self.dropped), self.dropped, strict=True)]
        rows_agree = len(set(skips)) <= 1
        self.skips, self.skipped = skips, skips[0] if rows_agree else on_device(skips, self.keys.device)

    def spans(self) -> Iterator[tuple[slice, int]]:
        """Rows that skip the same number of columns, and that number."""
        if isinstance(self.skipped, int):
            yield slice(None), self.skipped
        else:
            yield from ((slice(row, row + 1), skip) for row, skip in enumerate(self.skips))

    def lengths(self, columns: int) -> torch.Tensor:
        """Tokens of each row among this many columns, less than 1 for padding: int64 [1 or batch, 1]."""
        if isinstance(self.skipped, int):
            return torch.full((1, 1), columns - self.skipped, device=self.keys.device)
        return columns - self.skipped[:, None]

    @overload
    def slot(self, position: int) -> int: ...
    @overload
    def slot(self, position: torch.Tensor) -> torch.Tensor: ...
    def slot(self, position: int | torch.Tensor) -> int | torch.Tensor:
        """The slot of a position: an integer, or a tensor of them."""
        if self.sink is None:
            return position
        ring_slot = self.sink + (position - self.sink) % self.ring
        if isinstance(position, int):
            return position if position < self.sink else ring_slot
        return torch.where(position < self.sink, position, ring_slot)

    def positions(self, lengths: torch.Tensor, slots: int, ring: int) -> torch.Tensor:
        """The position that each of `slots` slots holds in rows of `lengths` tokens; -1 or >= length: it is empty.

        [rows, 1] -> int64 [rows, slots]
        """
        slot = torch.arange(slots, device=lengths.device)
        if self.sink is None:
            return slot.expand(lengths.shape[0], -1)
        newest_positions = lengths - 1 - (lengths - 1 - slot) % ring
        return torch.where(slot < self.sink, slot, torch.where(newest_positions < self.sink, -1, newest_positions))

    def wanted(self, capacity: int) -> int:
        """Slots that hold what a head keeps of this many columns; never fewer than there are."""
        tokens = min(capacity - self.min_skipped, self.max_tokens)
        return max(self.slots, tokens if self.sink is None else min(tokens, self.sink + self.ring))

    def widen(self, margin: int, seen: int, capacity: int) -> None:
        """Let the ring hold `margin` tokens beyond the window; `seen` columns have come, of `capacity`."""
        if self.sink is not None and seen - self.min_skipped > self.sink + self.ring:
            ring = self.recent + margin
            slots = min(capacity - self.min_skipped, self.max_tokens, self.sink + ring)
            positions = self.positions(self.lengths(seen), slots, ring)
            # positions that the old ring has dropped yield other tokens, outside of every window that can come
            self.keys, self.values = self.take(self.slot(positions.clamp(min=0)))
        self.margin = margin

    def take(self, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of some slots: int64 [1 or batch, n] -> keys and values [batch, heads, n, head_dim]."""
        batch, heads, _, head_dim = self.keys.shape
        index = slot[:, None, :, None].expand(batch, heads, -1, head_dim)
        return self.keys.gather(2, index), self.values.gather(2, index)

    def window(self, seen: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in the last `tokens` columns of `seen`, oldest first; what is padding there is arbitrary."""
        columns = torch.arange(seen - tokens, seen, device=self.keys.device)[None]
        return self.at(columns - (self.skipped if isinstance(self.skipped, int) else self.skipped[:, None]))

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [batch, heads, n, head_dim] at positions, int64 [1 or batch, n]; of others arbitrary ones."""
        return self.take(self.slot(positions.clamp(min=0)))

    def store(self, column: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the columns from `column` on: [batch, heads, tokens, head_dim]. Padding is not stored."""
        tokens = keys.shape[2]
        if isinstance(self.skipped, int) and column >= self.skipped:
            self.write(slice(None), column - self.skipped, keys, values)
            return
        if tokens == 1 and torch.is_tensor(self.skipped):
            self.write_one(column - self.skipped, keys, values)
            return
        for rows, skip in self.spans():
            begin = max(skip - column, 0)
            if begin < tokens:
                self.write(rows, column + begin - skip, keys[rows, :, begin:], values[rows, :, begin:])

    def write(self, rows: slice, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store positions start, start + 1, ... of some rows: [rows, heads, tokens, head_dim]. Older ones may go."""
        tokens = keys.shape[2]
        if tokens == 1:
            slot = self.slot(start)
            self.keys[rows, :, slot : slot + 1], self.values[rows, :, slot : slot + 1] = keys, values
            return
        stop = start + tokens
        if self.sink is None or stop <= self.sink:
            spans = [(start, stop)]
        else:
            ring_start = max(start, self.sink, stop - self.ring)  # of the ring, only what survives is written
            wrap = min(stop, ring_start + self.ring - (ring_start - self.sink) % self.ring)
            spans = [(start, min(stop, self.sink)), (ring_start, wrap), (wrap, stop)]
        for begin, end in spans:
            if begin < end:
                slot, size = self.slot(begin), end - begin
                for storage, states in ((self.keys, keys), (self.values, values)):
                    part = states if size == tokens else states[:, :, begin - start : end - start]
                    storage[rows, :, slot : slot + size] = part

    def write_one(self, position: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one token per row at `position` [batch]; padding, at a negative one, is overwritten by position 0."""
        rows = torch.arange(keys.shape[0], device=keys.device)
        slot = self.slot(position.clamp(min=0))
        self.keys[rows, :, slot], self.values[rows, :, slot] = keys[:, :, 0], values[:, :, 0]

    def take_rows(self, reorder: Callable[[list], list]) -> None:
        """Follow a change of rows in what is known of them; storage is its owner's to change."""
        self.dropped, self.skips, self.packed = reorder(self.dropped), reorder(self.skips), reorder(self.packed)


class SelectingHeads(Protocol):
    """What the cache and attention use of one layer's budgeted heads; `BudgetedHeads` documents it.

    kv_budget.py has them, and kv_hold.py those whose budgets hold. A checkpoint carries these files where it has such
    heads; each adds its class to `SELECTING`.
    """

    groups: Sequence[HeadGroup]  # one for each head
    selected: bool
    margin: int

    @property
    def nbytes(self) -> int: ...
    @property
    def due(self) -> int: ...
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: Any,
        path: Any,
        needs_grad: bool,
        scoring: Any,
    ) -> tuple[torch.Tensor, Callable]: ...
    def take_rows(self, rows: "Rows") -> None: ...
    def oldest(self, settled: int) -> int: ...
    def widen(self, margin: int, seen: int, capacity: int) -> None: ...
    def reserve(self, columns: int) -> None: ...
    def watch(self, column: int, query: torch.Tensor) -> None: ...
    def watch_step(self, columns: torch.Tensor, query: torch.Tensor) -> None: ...
    def renew(self, column: int, layer: Any, kernels: bool = False) -> None: ...
    def take_back(self, length: int, layer: Any) -> None: ...


# by whether budgets hold: makes empty storage for heads like `states`, with a layer's layout and the prompt's columns
SELECTING: dict[bool, Callable[[torch.Tensor, LayerLayout, int], SelectingHeads]] = {}


def selecting_heads(layout: LayerLayout) -> Callable[[torch.Tensor, LayerLayout, int], SelectingHeads] | None:
    """The class of a layer's budgeted heads; None: it has none.

    Raises:
        ValueError: this checkpoint was converted without such heads, and does not carry their code.
    """
    if not layout.budgets:
        return None
    if layout.holds not in SELECTING:
        heads_suffix, options_suffix = (" with rolling budgets", " and --hold") if layout.holds else ("", "")
        raise ValueError(
            f"config.json asks for budgeted heads{heads_suffix}, and this checkpoint was converted without their code; "
            f"convert the original model with --rest budgeted{options_suffix}"
        )
    return SELECTING[layout.holds]


def allocate(groups: Sequence[HeadGroup], slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Move groups of one layer into one buffer of keys and one of values, with this many slots a head.

    Returns:
        The buffers, [batch, sum of heads x slots, head_dim]: head after head, group after group.
    """
    old_states = [(group.keys, group.values) for group in groups]
    batch, _, _, head_dim = old_states[0][0].shape
    total_slots = sum(keys.shape[1] * count for (keys, _), count in zip(old_states, slots, strict=True))
    # zeros, not uninitialized memory: a masked slot has weight 0, and 0 x NaN would be NaN
    buffers = (
        old_states[0][0].new_zeros(batch, total_slots, head_dim),
        old_states[0][0].new_zeros(batch, total_slots, head_dim),
    )
    bind(groups, slots, buffers)
    for group, (keys, values) in zip(groups, old_states, strict=True):
        group.keys[:, :, : keys.shape[2]], group.values[:, :, : keys.shape[2]] = keys, values
    return buffers


def bind(groups: Sequence[HeadGroup], slots: Sequence[int], buffers: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Let groups be views of buffers that `allocate` made, or of their rows."""
    shapes = [(group.heads, count) for group, count in zip(groups, slots, strict=True)]
    parts = (buffer.split([heads * count for heads, count in shapes], 1) for buffer in buffers)
    for group, shape, keys, values in zip(groups, shapes, *parts, strict=True):
        group.keys, group.values = keys.unflatten(1, shape), values.unflatten(1, shape)
        group.in_buffers = True
