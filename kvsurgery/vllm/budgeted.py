"""How budgeted heads share cache groups: those of like budgets, which keep about as much of a prompt. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from kvsurgery.templates.kv_layout import KVLayout
from kvsurgery.vllm.groups import Bucket, Plan

MOST = 10  # cache groups, if full heads do not ask for smaller blocks


class Bin(NamedTuple):
    """The cache group of a budgeted head: its number, and the most tokens of a prompt that a head of it keeps."""

    index: int
    kept: int


@dataclass(frozen=True)
class BudgetedGroups:
    """The cache groups of a model with budgeted heads: one of full heads, and bins of budgeted ones.

    Attributes:
        tokens: of a block.
        itemsize: bytes of an element.
    """

    others: ClassVar = "budgeted"  # the heads that are not full

    layout: KVLayout
    tokens: int
    itemsize: int = 2

    @cached_property
    def bins(self) -> dict[tuple[int, int], Bin]:
        """The bin of each budgeted head, by its layer and its place among the layer's budgets.

        Bins are as wide as the full heads of the model, so that blocks are filled, or wider where there would be many.
        """
        heads = sorted(
            (
                (budget, layer, head)
                for layer, part in enumerate(self.layout.attended)
                for head, budget in enumerate(part.budgets)
            ),
            reverse=True,
        )
        full = sum(layer.full for layer in self.layout.layers)
        size = max(full, -(-len(heads) // MOST), 1)
        found = {}
        for index, first in enumerate(range(0, len(heads), size)):
            members = heads[first : first + size]
            window = max(self._window(layer) for _, layer, _ in members)
            found |= {(layer, head): Bin(index, members[0][0] + window) for _, layer, head in members}
        return found

    def _window(self, layer: int) -> int:
        selection = self.layout.attended[layer].selection
        assert selection is not None  # as it has budgets
        return selection.window

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the full heads of the model."""
        return 2 * self.itemsize * self.layout.head_dim * sum(layer.full for layer in self.layout.layers)

    def sequence_bytes(self, prompt: int) -> int:
        """What vLLM holds for a prompt that is complete."""
        head = 2 * self.itemsize * self.layout.head_dim * self.tokens  # bytes of a head's part of a block
        full = [layer.full * head for layer in self.layout.layers if layer.full]
        counts: dict[Bin, int] = {}
        for found in self.bins.values():
            counts[found] = counts.get(found, 0) + 1
        buckets = [Bucket((head,) * count, sliding=False) for count in counts.values()]
        plan = Plan.of([*([Bucket(tuple(full), sliding=False)] if full else []), *buckets])
        total = -(-prompt // self.tokens)
        groups = list(plan.groups)
        blocks = total * groups.pop(0) if full else 0
        for found, number in zip(counts, groups, strict=True):
            blocks += number * (total - max(prompt - found.kept, 0) // self.tokens)
        return blocks * plan.width
