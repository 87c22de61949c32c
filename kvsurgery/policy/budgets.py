"""KV budgets of heads from their scores (HeadKV, Fu et al. 2024, section 3.3), or in proportion to them."""

from __future__ import annotations

import numpy as np

from kvsurgery.errors import PolicyError
from kvsurgery.profile.methods import MAX_BUDGET

# where a recipe does not say how budgets follow scores
BETA = 1.2


def allocate_budgets(scores: np.ndarray, budget: int, beta: float | None) -> np.ndarray:
    """Entries that each KV head keeps: an even share, and a part of a pool that follows the scores.

    b_h = (B - B / beta) + S_h (B / beta) N, with the scores S normalized to sum 1 over the N heads.

    Args:
        scores: [heads], finite and non-negative.
        budget: B, mean entries per head.
        beta: divides the budget into share and pool, > 1. A larger beta means a *smaller* pool and more even budgets.
            None: everything is in the pool, so that budgets are in proportion to the scores.

    Returns:
        int64 [heads], summing to budget * heads exactly: what rounding leaves over goes to the largest remainders,
        then to the higher score, then to the earlier head.

    Raises:
        PolicyError: an option is out of range, or every score is 0.
    """
    if not 1 <= budget <= MAX_BUDGET:
        raise PolicyError(f"`budgeted.budget` must lie in [1, {MAX_BUDGET}], got {budget}")
    if beta is not None and not 1 < beta < np.inf:
        raise PolicyError(f"`budgeted.beta` must be > 1, got {beta}")
    scores = scores.astype(np.float64)
    if scores.size and not scores.sum() > 0:
        raise PolicyError(
            "budgets follow scores, and all heads that need a budget have the score 0; use another profile"
        )
    pool = budget if beta is None else budget / beta
    exact_budgets = (budget - pool) + scores / max(scores.sum(), np.finfo(float).tiny) * pool * scores.size
    floors = np.floor(exact_budgets).astype(np.int64)
    leftover = budget * scores.size - int(floors.sum())
    floors[np.lexsort((-scores, floors - exact_budgets))[:leftover]] += 1
    return floors
