"""`Heads`: what a kind of heads keeps and sees in one layer."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .kv_columns import Columns, Rows
from .kv_heads import HeadGroup
from .kv_layout import EVERY, LayerLayout
from .kv_softmax import AttentionPath, Read, Scoring
from .kv_storage import Storage


class Forward(NamedTuple):
    """What a layer's kinds know of the forward under way."""

    past: int  # columns before it
    path: AttentionPath
    snapshot: bool  # whether what is read must last beyond the next change, as autograd wants it
    shared: bool  # whether later layers attend to what this one stores


class Heads:
    """The heads of one kind in one layer: the base has what most kinds need not do."""

    groups: Sequence[HeadGroup]
    plain = True  # whether a token's states are all that a step has to store
    ready = True  # whether all that is known of the past lies in the groups
    due = EVERY  # the next column before which `renew` has something to do

    def __init__(self, states: torch.Tensor, layout: LayerLayout, columns: Columns, storage: Storage):
        """Empty storage for heads like `states` [batch, _, _, head_dim]."""
        self.layout, self.columns, self.storage = layout, columns, storage

    @staticmethod
    def count(layout: LayerLayout) -> int:
        """How many heads of this kind a layer has."""
        raise NotImplementedError

    @property
    def extra_bytes(self) -> int:
        """Bytes that are allocated beside the groups."""
        return 0

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, forward: Forward, scoring: Scoring
    ) -> tuple[torch.Tensor, Read]:
        """Store this kind's new tokens and attend from them: [batch, its heads, tokens, head_dim].

        Returns:
            [batch, query_heads, tokens, head_dim], and how queries of later layers attend to the same.
        """
        raise NotImplementedError

    def align(self, pads: Sequence[int]) -> None:
        """Learn the left padding of each row."""
        for group in self.groups:
            group.align(pads)

    def widen(self, margin: int, seen: int, capacity: int) -> None:
        """Keep enough to take back up to `margin` of the columns that come; `seen` have come."""
        for group in self.groups:
            group.widen(margin, seen, capacity)

    def reserve(self, columns: int) -> None:
        """Make room for `columns` columns beside the groups; never less than before."""

    def settle(self, column: int) -> None:
        """Let tiles take tokens before a column, beyond what `make_room` allows."""

    def renew(self, column: int, kernels: bool = False) -> None:
        """Do what is due before a column, with kernels if `kernels`. Does not wait for the device."""

    def watch(self, column: int, query: torch.Tensor) -> None:
        """Remember queries at columns from `column` on, which come after the prompt, if they will select."""

    def watch_step(self, columns: torch.Tensor, query: torch.Tensor) -> None:
        """Remember queries [batch, query_heads, head_dim] at the last of `columns`, int32 [1, 1], without waiting."""

    def advance(self, seen: int) -> None:
        """Learn how many columns have been stored."""

    def check_crop(self, length: int, seen: int) -> None:
        """Raise ValueError where columns from `length` on cannot be taken back."""
        tiles_end = max(group.tiles_end for group in self.groups)
        if length < tiles_end:
            raise ValueError(
                f"cannot take the cache back from {seen} to {length} tokens: the first {tiles_end} are quantized"
            )

    def take_back(self, length: int) -> None:
        """Undo the effects of columns from `length` on, beside their storage."""

    def take_rows(self, rows: Rows) -> None:
        """Follow a change of rows in what is stored beside the groups."""


def split_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: Sequence[int]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Queries, keys and values of this many KV heads each."""
    sizes = shares(heads, query.shape[1])
    parts = (states.split(counts, 1) for states, counts in ((query, sizes), (key, [*heads]), (value, [*heads])))
    return zip(*parts, strict=True)


def by_heads(reads: Sequence[tuple[int, Read]]) -> Read:
    """Attention of several groups together, each of this many KV heads."""

    def read(query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        sizes = shares([heads for heads, _ in reads], query.shape[1])
        parts = zip(reads, query.split(sizes, 1), scoring.split(sizes), strict=True)
        return torch.cat(
            [group_read(group_query, group_scoring) for (_, group_read), group_query, group_scoring in parts], 1
        )

    return read


def shares(kv_heads: Sequence[int], heads: int) -> list[int]:
    """How many of `heads` query or KV heads belong to this many KV heads each."""
    return [count * heads // sum(kv_heads) for count in kv_heads]
