"""`METHODS`: what head scores are, by the method that measured them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Method:
    """What scores of a method mean.

    Attributes:
        kind: "gate", a trained share of full attention; "importance", an amount without a scale; "share" of the tokens
            that a head keeps; "choice", 1 for a head that was chosen; or "rank".
        most: upper bound of a score. None: any finite, non-negative number.
        rest: how heads that are not full behave where a recipe does not say.
    """

    kind: Literal["gate", "importance", "share", "choice", "rank"]
    most: float | None
    rest: Literal["streaming", "budgeted"]


METHODS = {
    "duo": Method("gate", 1.0, "streaming"),
    "rlkv": Method("gate", 1.0, "streaming"),
    "attention": Method("importance", 1.0, "streaming"),
    "ablation": Method("importance", None, "streaming"),
    "kvzip": Method("importance", None, "streaming"),
    "headkv-r": Method("importance", None, "budgeted"),
    "headkv-er": Method("importance", None, "budgeted"),
    "headkv-r2": Method("importance", None, "budgeted"),
    "wg-kv": Method("share", 1.0, "budgeted"),
    "flexicache": Method("choice", 1.0, "streaming"),
    "rank-product": Method("rank", 1.0, "streaming"),
}
# a method without scores: its profile has embedding heads
REFORM = "reform"
