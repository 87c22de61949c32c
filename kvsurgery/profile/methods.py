"""`SCORE_METHODS`: the meaning of head scores, by the method that measured them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsurgery.heads.kinds import Rest


@dataclass(frozen=True)
class ScoreMethod:
    """The meaning of the scores of a method.

    Attributes:
        kind: "gate", a trained share of full attention; "importance", an amount without a scale; "share" of the tokens
            that a head keeps; "budget", tokens that a head keeps; "choice", 1 for a head that was chosen; or "rank".
        most: upper bound of a score; None if any finite, non-negative number is possible.
        rest: the default behavior of heads that are not full.
    """

    kind: Literal["gate", "importance", "share", "budget", "choice", "rank"]
    most: float | None
    rest: Rest

    @property
    def divides(self) -> bool:
        """Whether the scores themselves divide the tokens among heads (shares and budgets)."""
        return self.kind in ("share", "budget")


SCORE_METHODS = {
    "duo": ScoreMethod("gate", 1.0, "streaming"),
    "rlkv": ScoreMethod("gate", 1.0, "streaming"),
    "rlkv-lite": ScoreMethod("gate", 1.0, "streaming"),
    "attention": ScoreMethod("importance", 1.0, "streaming"),
    "ablation": ScoreMethod("importance", None, "streaming"),
    "kv-bits": ScoreMethod("importance", None, "streaming"),
    "kvzip": ScoreMethod("importance", None, "streaming"),
    "headkv-r": ScoreMethod("importance", None, "budgeted"),
    "headkv-er": ScoreMethod("importance", None, "budgeted"),
    "headkv-r2": ScoreMethod("importance", None, "budgeted"),
    "wg-kv": ScoreMethod("share", 1.0, "budgeted"),
    "lu-kv": ScoreMethod("share", 1.0, "budgeted"),
    "budgets": ScoreMethod("budget", None, "budgeted"),
    "flexicache": ScoreMethod("choice", 1.0, "streaming"),
    "rtpurbo": ScoreMethod("choice", 1.0, "streaming"),
    "rank-product": ScoreMethod("rank", 1.0, "streaming"),
}
# the largest budget of a head, in tokens; every whole number up to it is a float32
MAX_BUDGET = 1 << 24
# a method without scores: its profile has embedding heads
REFORM = "reform"
