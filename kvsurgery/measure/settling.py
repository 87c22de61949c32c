"""When gates have settled: when more steps would hardly change which heads stay full."""

from __future__ import annotations

import math

import numpy as np

LATEST = 40  # steps that are compared: the first half of them with the second
SHARES = (0.25, 0.5, 0.75)  # of the heads that a user may keep full
MOST_MOVED = 1 / 16  # how far a gate may move, relative to one that falls at the full learning rate
EXCEPTIONS = 0.05  # share of the gates that may move further, and of full heads that may be others


def settled(gates: np.ndarray, lr: float) -> bool:
    """Whether gates have stood still over the latest steps.

    Each prompt pushes the gates a little, so even settled gates vary from step to step. Their means over the two
    halves of the steps are compared. Gates that tie do not count as heads that stay: with many gates at 0, most heads
    that would be full are chosen by their place in the model, and nothing measured says that they stay.

    Args:
        gates: float [LATEST, heads], after each step.
        lr: peak learning rate: how far a gate falls in a step.
    """
    earlier_means, later_means = (half.mean(0, dtype=np.float64) for half in np.split(gates, 2))
    has_moved = np.abs(later_means - earlier_means) > MOST_MOVED * lr * len(gates) / 2
    return has_moved.mean() <= EXCEPTIONS and all(
        _full_heads_stay(earlier_means, later_means, round(share * earlier_means.size)) for share in SHARES
    )


def _full_heads_stay(earlier_means: np.ndarray, later_means: np.ndarray, count: int) -> bool:
    """Whether almost all of the `count` heads with the largest gates are ranked, and the same."""
    full_in_both = _ranked_full(earlier_means, count) & _ranked_full(later_means, count)
    return count - full_in_both.sum() <= math.ceil(EXCEPTIONS * count)


def _ranked_full(gates: np.ndarray, count: int) -> np.ndarray:
    """bool [heads]: those with one of the `count` largest gates, without heads that tie with the next one."""
    largest = np.sort(np.append(gates, -np.inf))[::-1]
    return gates > largest[count]
