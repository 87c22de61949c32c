"""What the processes of tensor parallelism have in common: vLLM frees the same blocks in all of them. Needs no vLLM."""

from __future__ import annotations

from dataclasses import replace

from kvsurgery.templates.kv_layout import KVLayout, Quantization


def common_part(layout: KVLayout, processes: int) -> KVLayout | None:
    """The heads of each process, with budgets that are large enough for all; None if numbers of full heads differ.

    Budgets are the largest of any process at each of the `places`. No other assignment of heads to places of their kind
    has a smaller sum of these.

    Raises:
        ValueError: the heads do not divide so; `layout.processes` has the numbers that do.
    """
    parts = layout.parts(processes)
    if len({tuple(replace(layer, budgets=()) for layer in part.layers) for part in parts}) > 1:
        return None
    largest: dict[tuple[int, int], int] = {}
    for part in parts:
        for (layer, head), place in places(part).items():
            largest[place] = max(largest.get(place, 0), part.layers[layer].budgets[head])
    layers = (
        replace(layer, budgets=tuple(largest[index, head] for head in range(len(layer.budgets))))
        for index, layer in enumerate(parts[0].layers)
    )
    return replace(layout, layers=tuple(layers))


def places(part: KVLayout) -> dict[tuple[int, int], tuple[int, int]]:
    """The place of each budgeted head of a process; places and heads are named by layer and number within the layer.

    Every process has the same places. Heads get them by descending budget, so that the budgets of all processes at a
    place are about the same. A head may get a place of another layer, if heads of both layers are of one size and
    quantized alike: they then need blocks of the same size.
    """
    budgets: dict[tuple[int, Quantization | None], dict[tuple[int, int], int]] = {}
    for index, layer in enumerate(part.layers):
        alike = budgets.setdefault((layer.head_dim or part.head_dim, layer.quantization), {})
        alike |= {(index, head): budget for head, budget in enumerate(layer.budgets)}
    return {
        head: place
        for alike in budgets.values()
        for head, place in zip(sorted(alike, key=alike.__getitem__, reverse=True), alike, strict=True)
    }
