"""`QueryFactors`: how the keys of every KV head of a model are rounded by the queries that meet them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from kvsurgery.errors import ProfileError
from kvsurgery.heads.dimensions import ModelDimensions


@dataclass(frozen=True, eq=False)
class QueryFactors:
    """How keys are rounded, as `kv_rounding.QueryRounding` takes it.

    Attributes:
        order: int16 [layers, kv_heads, head_dim], channels in the order in which they are rounded.
        feedback: float16 [layers, kv_heads, head_dim, head_dim], by places in this order: the share of the error of a
            channel that is taken off a later one.
    """

    order: np.ndarray
    feedback: np.ndarray

    @classmethod
    def unmeasured(cls, model: ModelDimensions) -> Self:
        """Factors of a model that round each channel by itself."""
        shape = model.layers, model.kv_heads, model.head_dim
        order = np.broadcast_to(np.arange(model.head_dim, dtype=np.int16), shape).copy()
        return cls(order, np.zeros((*shape, model.head_dim), dtype=np.float16))

    def check(self, model: ModelDimensions) -> None:
        """Raise ProfileError where they are not factors of a model."""
        shape = model.layers, model.kv_heads, model.head_dim
        if self.order.shape != shape or self.feedback.shape != (*shape, model.head_dim):
            raise ProfileError(f"factors of rounding by the queries are not of {model}")
        if (self.order.dtype, self.feedback.dtype) != (np.int16, np.float16):
            raise ProfileError("factors of rounding by the queries are int16 and float16")
        if (np.sort(self.order) != np.arange(model.head_dim)).any() or not np.isfinite(self.feedback).all():
            raise ProfileError("factors of rounding by the queries are no order of the channels and finite shares")
