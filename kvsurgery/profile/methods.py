"""`METHODS`: what head scores are, by the method that measured them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsurgery.heads.kinds import Rest


@dataclass(frozen=True)
class Method:
    """What scores of a method mean.

    Attributes:
        kind: "gate", a trained share of full attention; "importance", an amount without a scale; "share" of the tokens
            that a head keeps; "budget", tokens that a head keeps; "choice", 1 for a head that was chosen; or "rank".
        most: upper bound of a score. None: any finite, non-negative number.
        rest: how heads that are not full behave where a recipe does not say.
    """

    kind: Literal["gate", "importance", "share", "budget", "choice", "rank"]
    most: float | None
    rest: Rest

    @property
    def divides(self) -> bool:
        """Whether scores are already a division of the tokens among heads, and not a reason for one."""
        return self.kind in ("share", "budget")


METHODS = {
    "duo": Method("gate", 1.0, "streaming"),
    "rlkv": Method("gate", 1.0, "streaming"),
    "rlkv-lite": Method("gate", 1.0, "streaming"),
    "attention": Method("importance", 1.0, "streaming"),
    "ablation": Method("importance", None, "streaming"),
    "kv-bits": Method("importance", None, "streaming"),
    "kvzip": Method("importance", None, "streaming"),
    "headkv-r": Method("importance", None, "budgeted"),
    "headkv-er": Method("importance", None, "budgeted"),
    "headkv-r2": Method("importance", None, "budgeted"),
    "wg-kv": Method("share", 1.0, "budgeted"),
    "lu-kv": Method("share", 1.0, "budgeted"),
    "budgets": Method("budget", None, "budgeted"),
    "flexicache": Method("choice", 1.0, "streaming"),
    "rank-product": Method("rank", 1.0, "streaming"),
}
# the largest budget of a head, in tokens; every whole number up to it is a float32
MAX_BUDGET = 1 << 24
# a method without scores: its profile has embedding heads
REFORM = "reform"
