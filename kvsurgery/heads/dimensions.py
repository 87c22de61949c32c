"""The attention dimensions of a model, shared by every artifact, and the attention of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class ModelDimensions:
    """Attention dimensions; a group is the query heads that share one KV head.

    If layers differ, these are the dimensions of the full-attention layers, whose heads a profile scores.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def query_width(self) -> int:
        """Elements of a token's queries, over all layers."""
        return self.layers * self.query_heads * self.head_dim

    @property
    def heads(self) -> str:
        """The number and size of the KV heads, as text."""
        return f"{self.kv_heads} KV heads of {self.head_dim}"

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.query_heads} query heads, {self.heads}"


def attention_name(window: int | None) -> str:
    """The attention of a layer as text, from its entry in `ModelLayers.windows`."""
    if window == 0:
        return "no KV cache"
    return "full attention" if window is None else f"a sliding window of {window} tokens"


@dataclass(frozen=True)
class ModelLayers:
    """The attention of each layer of a model, and the layers that share a KV cache.

    Attributes:
        dimensions: of the layers with full attention.
        windows: per layer, the model's own sliding window in tokens, 0 without a KV cache and None for full attention.
        chunked: whether windows are chunks.
        sliding: dimensions of the layers with a window, if they differ from the model's.
        sources: from each layer that shares the KV cache of an earlier layer to that layer.
        stateful: whether layers have states in place of a KV cache, or beside it.
    """

    dimensions: ModelDimensions
    windows: Sequence[int | None]
    chunked: bool = False
    sliding: ModelDimensions | None = None
    sources: Mapping[int, int] = field(default_factory=dict)
    stateful: bool = False

    @property
    def eligible(self) -> np.ndarray:
        """bool [layers]: whether a layer has full attention and a KV cache of its own."""
        return np.array([window is None and layer not in self.sources for layer, window in enumerate(self.windows)])
