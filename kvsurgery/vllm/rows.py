"""Slots of a cache group as rows of a layer's cache, so that whole rows are read and written at once. Needs no vLLM.

In a lean cache group, only tokens that later steps see have slots. There a step reads its own tokens from the layer's
inputs, and stores them last: the slots that they get may hold tokens which the step still reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch


class InputTokens(NamedTuple):
    """Tokens of a step among those that it reads: rows and columns of the latter, and indices in the batch."""

    rows: torch.Tensor
    columns: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(
        cls, rows: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
    ) -> InputTokens:
        """Find them among positions [n, tokens] of requests [n, 1].

        Args:
            starts: [requests + 1], index of each request's first new token in the batch, then the end.
            lengths: [requests], tokens of each request, new ones included.
        """
        tokens = positions + (starts[1:] - lengths)[rows]
        found = (tokens >= starts[rows]).nonzero(as_tuple=True)
        return cls(*found, tokens[found])


@dataclass
class Places:
    """Slots of a cache group, the same in each of its layers.

    They are blocks [requests, 1, tokens], and each head's slots in them [requests, heads, tokens]. In a lean group,
    `inputs` are the tokens among these that are read from the inputs.
    """

    blocks: torch.Tensor
    slots: torch.Tensor
    inputs: InputTokens | None = None
    _rows: torch.Tensor | None = None

    def read(self, cache: torch.Tensor, states: torch.Tensor | None = None) -> torch.Tensor:
        """Keys and values there, or of these among the step's `states` [tokens, heads, 2 * head_dim].

        Returns:
            [requests, heads, tokens, 2 * head_dim]
        """
        if (stored := rows_of(cache)) is None:
            found = cache.flatten(1, 2)[self.blocks, self.slots]
        else:
            found = stored.index_select(0, self._rows_in(cache)).view(*self.slots.shape, cache.shape[3])
        if self.inputs is not None:
            assert states is not None  # no layer shares a lean cache
            copies, originals = self._input_rows
            found.view(-1, found.shape[3]).index_copy_(0, copies, states.flatten(0, 1).index_select(0, originals))
        return found

    def store(self, cache: torch.Tensor, states: torch.Tensor) -> None:
        """Store keys and values of as many tokens, head by head: [..., 2 * head_dim]."""
        if (stored := rows_of(cache)) is None:
            cache.flatten(1, 2)[self.blocks, self.slots] = states.view(*self.slots.shape, cache.shape[3])
        else:
            stored.index_copy_(0, self._rows_in(cache), states.view(-1, cache.shape[3]))

    @cached_property
    def _input_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of what is read that come from the inputs, and their rows there, head by head."""
        assert self.inputs is not None
        _, heads, count = self.slots.shape
        rows, columns, tokens = (part[:, None] for part in self.inputs)
        head = torch.arange(heads)
        return ((rows * heads + head) * count + columns).flatten(), (tokens * heads + head).flatten()

    def _rows_in(self, cache: torch.Tensor) -> torch.Tensor:
        """Their rows in `rows_of` a layer's cache: [requests * heads * tokens]."""
        if self._rows is None:
            self._rows = torch.add(self.slots, self.blocks, alpha=cache.stride(0) // cache.shape[3]).flatten()
        return self._rows


@dataclass(frozen=True)
class NewTokens:
    """New tokens of a step in a cache group.

    Attributes:
        count: their number; tokens of the batch after these are padding.
        places: their slots.
        stored: indices of those that have slots, in a lean group; None: all have.
    """

    count: int
    places: Places
    stored: torch.Tensor | None = None

    @classmethod
    def of(cls, slots: torch.Tensor, size: int, heads: torch.Tensor, lean: bool) -> NewTokens:
        """Tokens with these slots [tokens], in blocks of `size` tokens; heads begin at slots `heads` [heads, 1]."""
        count, stored = len(slots), None
        if lean:
            (stored,) = (slots >= size).nonzero(as_tuple=True)  # block 0 stands for those that are not allocated
            slots = slots[stored]
        slots = slots[:, None, None]
        return cls(count, Places(slots // size, slots % size + heads), stored)

    @property
    def lean(self) -> bool:
        """Whether they are stored after attention."""
        return self.stored is not None

    def store(self, cache: torch.Tensor, states: torch.Tensor) -> None:
        """Store keys and values [tokens, heads, 2 * head_dim]."""
        if self.stored is not None:
            states = states[self.stored]
        self.places.store(cache, states)


def rows_of(cache: torch.Tensor) -> torch.Tensor | None:
    """A layer's cache [blocks, heads, slots, 2 * head_dim] as rows of a slot each, those of other layers between them.

    Moving whole rows is several times as fast as indexing blocks, heads and slots. Where a block is no whole number of
    rows, beside tiles or states of other widths, there are none: None.
    """
    blocks, heads, size, width = cache.shape
    if cache.stride(0) % width:
        return None
    count = (blocks - 1) * (cache.stride(0) // width) + heads * size
    return cache.as_strided((count, width), (width, 1))
