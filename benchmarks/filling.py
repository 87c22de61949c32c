"""Filling a converted model's cache without the model."""

from __future__ import annotations

import torch

from kvsurgery.templates.kv_cache import KVLayerCache


def append(layer: KVLayerCache, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Store new columns of every head, as a forward does: [batch, kv_heads, tokens, head_dim].

    A prompt of budgeted heads needs the queries too: there, only the attention function can.
    """
    layer.make_room(keys.shape[2])
    groups = layer.storage.groups
    heads = [group.heads for group in groups]
    for group, *states in zip(groups, keys.split(heads, 1), values.split(heads, 1), strict=True):
        group.store(layer.seen, *states)
    layer.finish(keys.shape[2])
