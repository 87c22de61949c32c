"""`Role`: the role of a tensor in a checkpoint, and the axis of its heads."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

# symbols of lengths that no head lies along; the last may be any number
HIDDEN, ONE, OTHER = "hidden", "one", "other"
# dtypes of weights that are not quantized
ATTENTION_DTYPES = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class Role:
    """The role of a tensor.

    Attributes:
        layer: its layer; None outside the layers.
        part: its name inside the layer or the model.
        shape: symbols (`hidden`, `one`, `other`, `query_heads`, `kv_heads`, `gated_queries`, or letters of heads) of a
            tensor with heads; empty if any shape is accepted.
        per: for quantized weights, the number of rows, columns or heads' numbers in one element along each axis.
        flat: for quantized weights whose rows follow one another in one axis, the numbers in one element; `shape` is
            then not the tensor's. None for other tensors.
    """

    layer: int | None
    part: str
    shape: tuple[str, ...] = ()
    per: tuple[Fraction, ...] = ()
    flat: Fraction | None = None

    @property
    def axis(self) -> int | None:
        """The axis along which heads lie: 0 rows, 1 columns; None for a tensor that is copied."""
        return next((axis for axis, symbol in enumerate(self.shape) if symbol not in (HIDDEN, ONE, OTHER)), None)
