"""How budgeted heads share cache groups: those of like budgets, which keep about as much of a prompt. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from kvsurgery.templates.kv_layout import TILE, KVLayout
from kvsurgery.vllm.groups import Bucket, Groups, Plan

MOST = 10  # cache groups, if full heads do not ask for smaller blocks


class Bin(NamedTuple):
    """The cache group of a budgeted head: its number, and the most tokens of a prompt that a head of it keeps."""

    index: int
    kept: int


def first_block(prompt: Any, kept: int, size: int) -> Any:
    """The first block of `size` tokens with places that heads move tokens of a prompt to, once it is complete.

    From there on, blocks are of one request only. With tiles, the first tokens of each head lie where it begins.
    `prompt` is the length of a prompt, or a tensor of lengths.
    """
    return (prompt - kept) * (prompt > kept) // size


@dataclass(frozen=True)
class BudgetedGroups:
    """The cache groups of a model with budgeted heads: one of full heads, and bins of budgeted ones.

    Where heads are `quantized`, bins have a group of tiles and one of newest tokens each; heads of layers without codes
    have as many tokens in the model's dtype in place of a tile.

    Attributes:
        tokens: of a block, if there are no tiles.
        itemsize: bytes of an element that is not quantized.
        quantized: whether the heads are stored in tiles.
    """

    others: ClassVar = "budgeted"  # the heads that are not full

    layout: KVLayout
    tokens: int
    itemsize: int = 2
    quantized: bool = False

    @cached_property
    def groups(self) -> Groups:
        """The cache groups of full heads."""
        return Groups(self.layout, self.tokens, self.itemsize, self.quantized)

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
        return self.groups.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return Plan.of([bucket for bucket, _ in self.held(0)]).width

    def held(self, prompt: int) -> list[tuple[Bucket, int]]:
        """Each bucket, with the blocks that a group of it holds for a prompt that is complete."""
        layers_by_bin: dict[Bin, list[int]] = {}
        for (layer, _), found in self.bins.items():
            layers_by_bin.setdefault(found, []).append(layer)
        held = self.groups.held(prompt)
        for found, layers in layers_by_bin.items():
            held += self._held(found, layers, prompt)
        return held

    def sequence_bytes(self, prompt: int) -> int:
        """What vLLM holds for a prompt that is complete."""
        held = self.held(prompt)
        plan = Plan.of([bucket for bucket, _ in held])
        return plan.width * sum(number * blocks for number, (_, blocks) in zip(plan.groups, held, strict=True))

    def _held(self, found: Bin, layers: list[int], prompt: int) -> list[tuple[Bucket, int]]:
        """The heads of a bin, one of each of these layers, and the blocks that a group of them holds."""
        size, head_dim = self.groups.size, self.layout.head_dim
        page = 2 * self.itemsize * head_dim * size
        first = first_block(prompt, found.kept, size)
        held = -(-prompt // size) - first
        bucket = Bucket((page,) * len(layers), sliding=False)
        if not self.quantized:
            return [(bucket, held)]
        found_codes = [self.layout.attended[layer].quantization for layer in layers]
        whole = 2 * self.itemsize * head_dim * TILE
        tiles = tuple(codes.tile_bytes(head_dim, self.itemsize) if codes else whole for codes in found_codes)
        older = Bucket(tiles, sliding=False), -(-prompt // TILE) - first_block(prompt, found.kept, TILE)
        packed = [codes for codes in found_codes if codes]
        if not packed:
            return [older]
        window = (prompt - packed[0].residual - TILE + 1) // size
        newest = Bucket((page,) * len(packed), sliding=False)
        return [older, (newest, held - max(window - first - -(-packed[0].sink // size), 0))]


def groups_of(layout: KVLayout, tokens: int, itemsize: int = 2, quantized: bool = False) -> Groups | BudgetedGroups:
    """The cache groups of a model, whatever its heads are."""
    kind = BudgetedGroups if any(layer.budgets for layer in layout.layers) else Groups
    return kind(layout, tokens, itemsize, quantized)
