"""`GateOptions`: how gates are trained. It imports nothing heavy, since `--help` shows the defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kvsurgery.errors import ProfileError

Loss = Literal["distill", "lm"]


@dataclass(frozen=True)
class GateOptions:
    """How gates are trained.

    Attributes:
        loss: "distill", or "lm" as `gates.add_gradient` has them.
        steps: of AdamW, without weight decay; the gates are clamped to [0, 1] after each.
        lr: peak learning rate.
        reg: weight of the mean gate in the loss. The paper's serves few steps too: a greater one would separate gates
            sooner, but take most of them to 0, where they rank alike, while gates that stay near 1 still differ.
        sink, recent: tokens of streaming attention.
        batch: prompts per step, over all processes.
        until_settled: stop earlier, after the warm-up, when more steps would hardly change which heads are full.

    Raises:
        ProfileError: any is out of range.
    """

    loss: Loss = "distill"
    steps: int = 2000
    lr: float = 0.02
    reg: float = 0.05
    sink: int = 64
    recent: int = 256
    batch: int = 1
    until_settled: bool = False

    def __post_init__(self) -> None:
        if self.loss not in ("distill", "lm"):
            raise ProfileError(f"unknown loss {self.loss!r}; known: distill, lm")
        for name, minimum in (("steps", 1), ("batch", 1), ("sink", 0), ("recent", 1)):
            if getattr(self, name) < minimum:
                raise ProfileError(f"{name} must be >= {minimum}, got {getattr(self, name)}")
        if not (0 < self.lr < math.inf and 0 <= self.reg < math.inf):
            raise ProfileError(f"lr must be > 0 and reg >= 0, got {self.lr} and {self.reg}")
