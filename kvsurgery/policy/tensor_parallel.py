"""Blocks of heads: what each process of tensor parallelism holds, alike in bytes.

A layer's KV heads are stored as T blocks of equal size, so that T processes get one each, and fewer get neighbors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvsurgery.errors import PolicyError


class Blocks(NamedTuple):
    """One layer: its source heads by place, and of each block how many are full and how many are not."""

    order: tuple[int, ...]
    counts: tuple[tuple[int, int], ...]


def check_blocks(blocks: int, kv_heads: int) -> None:
    """Raise PolicyError where a layer's heads do not divide into this many blocks."""
    if blocks < 1 or kv_heads % blocks:
        divisors = ", ".join(str(count) for count in range(1, kv_heads + 1) if kv_heads % count == 0)
        raise PolicyError(f"`devices.tp` must divide the {kv_heads} KV heads of a layer ({divisors}), got {blocks}")


def arrange(full: np.ndarray, budgets: np.ndarray | None, blocks: int) -> list[Blocks]:
    """Put every layer's heads into blocks that are as heavy as each other over the model.

    Full heads are spread evenly; what a layer has beyond a multiple of `blocks` goes to the blocks with the fewest so
    far. Budgeted heads are dealt from the largest budget on, in rounds of one head a block, the lightest block first:
    two blocks that have as many full heads then differ by no more than two budgets of one round do, however many layers
    there are. In the end blocks are ordered so that neighbors balance. Inside a block, full heads come first, and each
    kind is in the source's order.

    Args:
        full: bool [layers, kv_heads].
        budgets: int [layers, kv_heads], what heads keep that are not full; None where they stream.
        blocks: how many a layer has; divides its heads.
    """
    size = full.shape[1] // blocks
    weights = [[0, 0] for _ in range(blocks)]  # full heads and budgets of the layers so far
    shares = []  # of each layer, how many full heads each block has, and which budgeted ones
    for layer, row in enumerate(full):
        even_count, extra_count = divmod(int(row.sum()), blocks)
        counts = [even_count] * blocks
        for block in _lightest(weights)[:extra_count]:
            counts[block] += 1
        for weight, count in zip(weights, counts, strict=True):
            weight[0] += count
        dealt_heads: list[list[int]] = [[] for _ in range(blocks)]
        if budgets is not None:
            remaining = [head for head in np.argsort(-budgets[layer], kind="stable").tolist() if not row[head]]
            while remaining:
                open_blocks = [block for block in _lightest(weights) if counts[block] + len(dealt_heads[block]) < size]
                for block, head in zip(open_blocks, remaining, strict=False):
                    dealt_heads[block].append(head)
                    weights[block][1] += int(budgets[layer, head])
                remaining = remaining[len(open_blocks) :]
        shares.append((counts, dealt_heads))
    order = _balanced_order(weights)
    return [
        _layer_blocks(row, order, *share, size, budgets is not None) for row, share in zip(full, shares, strict=True)
    ]


def _layer_blocks(
    full: np.ndarray, order: Sequence[int], counts: list[int], dealt_heads: list[list[int]], size: int, budgeted: bool
) -> Blocks:
    """One layer's heads, block after block."""
    full_heads = iter(np.flatnonzero(full).tolist())
    other_heads = iter(np.flatnonzero(~full).tolist())
    heads: list[int] = []
    for block in order:
        heads += islice(full_heads, counts[block])
        heads += sorted(dealt_heads[block]) if budgeted else islice(other_heads, size - counts[block])
    return Blocks(tuple(heads), tuple((counts[block], size - counts[block]) for block in order))


def _lightest(weights: list[list[int]]) -> list[int]:
    """Blocks by weight, of equal ones the earlier first."""
    return sorted(range(len(weights)), key=lambda block: weights[block])


def _balanced_order(weights: list[list[int]]) -> list[int]:
    """Blocks in an order in which pairs of neighbors, and pairs of pairs, are about as heavy as others."""
    runs = [([block], *weight) for block, weight in enumerate(weights)]
    while len(runs) % 2 == 0 and len({run[1:] for run in runs}) > 1:
        runs.sort(key=lambda run: run[1:])
        half_count = len(runs) // 2
        runs = [
            tuple(one + other for one, other in zip(*pair, strict=True))
            for pair in zip(runs[:half_count], runs[: -half_count - 1 : -1], strict=True)
        ]
    return [block for run in runs for block in run[0]]
