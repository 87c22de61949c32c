"""`Role`: what a tensor of a checkpoint is, and along which axis its heads lie."""

from __future__ import annotations

from dataclasses import dataclass

# symbols of lengths that no head lies along; a rank may be any number
HIDDEN, RANK = "hidden", "rank"


@dataclass(frozen=True)
class Role:
    """What a tensor is.

    Attributes:
        layer: its layer, None outside the layers.
        part: its name inside the layer or the model.
        shape: symbols (`hidden`, `rank`, `query_heads`, `gated_queries`, or letters of heads) of a tensor with heads;
            empty where any shape will do.
    """

    layer: int | None
    part: str
    shape: tuple[str, ...] = ()

    @property
    def axis(self) -> int | None:
        """The axis along which heads lie: 0 rows, 1 columns; None for a tensor that is copied."""
        return next((axis for axis, symbol in enumerate(self.shape) if symbol not in (HIDDEN, RANK)), None)
