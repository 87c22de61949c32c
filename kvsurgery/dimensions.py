"""The attention dimensions of a model, shared by every artifact."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelDimensions:
    """Attention dimensions; a group is the query heads that share one KV head.

    Where layers differ, those of the layers with full attention are the model's: a profile is of their heads.
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
    def heads(self) -> str:
        """KV heads and their size, in words."""
        return f"{self.kv_heads} KV heads of {self.head_dim}"

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.query_heads} query heads, {self.heads}"
