"""The file of a converted checkpoint with the factors by which its keys are rounded."""

from __future__ import annotations

from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.profile.tensor_file import to_bytes
from kvsurgery.templates.kv_layout import KVLayout


def rounding_file(layout: KVLayout, losses: CacheLosses) -> bytes:
    """The factors of the layers that round keys by the queries, with heads in their converted order."""
    tensors = {}
    for index, layer in enumerate(layout.layers):
        if layer.quantization and layer.rounded_by_queries:
            factors = losses.rounding[str(layer.quantization.rotate)]
            heads = list(layer.order)
            tensors[f"layers.{index}.order"] = factors.order[index, heads]
            tensors[f"layers.{index}.feedback"] = factors.feedback[index, heads]
    return to_bytes({}, tensors)
