"""The attention dimensions of a model, shared by every artifact, and what its layers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class ModelDimensions:
    """Attention dimensions; a group is the query heads that share one KV head.

    Where layers differ, these are the dimensions of the full-attention layers, whose heads a profile scores.
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
        """Elements of the queries of a token, over all layers."""
        return self.layers * self.query_heads * self.head_dim

    @property
    def heads(self) -> str:
        """KV heads and their size, in words."""
        return f"{self.kv_heads} KV heads of {self.head_dim}"

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.query_heads} query heads, {self.heads}"


def attention_name(window: int | None) -> str:
    """What attention a layer has whose own window this is, as in `ModelLayers.windows`."""
    if window == 0:
        return "linear attention"
    return "full attention" if window is None else f"a sliding window of {window} tokens"


@dataclass(frozen=True)
class ModelLayers:
    """What attention each layer of a model has, and where its KV cache is.

    Attributes:
        dimensions: of the layers with full attention.
        windows: per layer, the model's own sliding window in tokens, 0 for linear and None for full attention.
        chunked: whether windows are chunks.
        sliding: dimensions of the layers with a window, where these are others.
        sources: the layers that share the KV cache of an earlier one, and which.
    """

    dimensions: ModelDimensions
    windows: Sequence[int | None]
    chunked: bool = False
    sliding: ModelDimensions | None = None
    sources: Mapping[int, int] = field(default_factory=dict)

    @property
    def eligible(self) -> np.ndarray:
        """bool [layers]: those with full attention and a KV cache of their own."""
        return np.array([window is None and layer not in self.sources for layer, window in enumerate(self.windows)])
