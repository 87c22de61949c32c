"""What answers and divergences of a contender come to, paired with the original's, with 95% intervals.

Intervals are those of a bootstrap over texts, which hold several facts each; where heads were drawn at random, over the
draws too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsurgery.evaluate.results import Interval
from kvsurgery.evaluate.statistics import RESAMPLES, interval, resampled_means

Result = Mapping[str, Any]  # `right` by question, `kl` and `nats` by window


@dataclass(frozen=True)
class Scores:
    """One contender's.

    Attributes:
        recall: share of facts.
        outside: the same of facts outside of the first and last tokens that a streaming head keeps.
        more: `outside` less the original's.
        ratio: perplexity over the original's.
        kl: divergence from the original, in nats.
    """

    recall: Interval
    outside: Interval
    more: Interval
    ratio: Interval
    kl: Interval

    @property
    def cells(self) -> list[str]:
        """Of a table, under `HEADS`; the original has no loss."""
        return [_share(self.recall), self.outside_cell, *self.losses]

    @property
    def outside_cell(self) -> str:
        """With the difference in percentage points."""
        points = (self.more.mean, self.more.low, self.more.high)
        mean, low, high = (f"{100 * value:+.0f}" for value in points)
        return f"{self.outside.mean:.0%} ({mean} [{low}, {high}])"

    @property
    def losses(self) -> list[str]:
        """Perplexity and divergence."""
        ratio, kl = self.ratio, self.kl
        return [
            f"× {ratio.mean:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
            f"{kl.mean:.4f} [{kl.low:.4f}, {kl.high:.4f}]",
        ]

    @property
    def original_cells(self) -> list[str]:
        """Of the original."""
        return [_share(self.recall), f"{self.outside.mean:.0%}", "× 1", "0"]


HEADS = ["facts recalled", "outside the window (difference to the original, points)", "perplexity", "KL"]


def _share(value: Interval) -> str:
    return f"{value.mean:.0%} [{value.low:.0%}, {value.high:.0%}]"


def outside_window(report: Mapping[str, Any], sink: int, recent: int) -> np.ndarray:
    """Which questions are about facts that a window of first and latest tokens does not hold, bool [questions]."""
    places = np.array(report["places"])
    return (places >= sink) & (places < report["settings"]["length"] - recent)


def scores(draws: Sequence[Result], original: Result, texts: int, is_outside: np.ndarray) -> Scores:
    """Scores of results that are one contender's, such as several draws of random heads.

    Args:
        texts: with facts.
        is_outside: bool [questions], as `outside_window` has it.
    """
    correct = np.array([result["right"] for result in (original, *draws)], dtype=np.float64)
    by_text = correct.reshape(len(correct), texts, -1)
    is_outside = is_outside.reshape(texts, -1)
    counts = _draw_counts(len(draws))

    def shares(selection: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the original and the draws, the share of right answers among some, and resampled ones."""
        hits, all_of_them = (by_text * selection).sum(2), selection.sum(1)[None].astype(np.float64)
        return hits.sum(1) / all_of_them.sum(), resampled_means(hits, 0) / resampled_means(all_of_them, 0)

    overall, overall_resampled = shares(np.ones_like(is_outside))
    outside_shares, outside_resampled = shares(is_outside)
    recall, outside_recall = (
        _over_draws(resampled[1:], counts) for resampled in (overall_resampled, outside_resampled)
    )
    nats = np.array([np.subtract(result["nats"], original["nats"]) for result in draws])
    kl = np.array([result["kl"] for result in draws])
    nats_resampled, kl_resampled = (_over_draws(resampled_means(values, 0), counts) for values in (nats, kl))
    return Scores(
        interval(overall[1:].mean(), recall),
        interval(outside_shares[1:].mean(), outside_recall),
        interval(outside_shares[1:].mean() - outside_shares[0], outside_recall - outside_resampled[0]),
        interval(math.exp(nats.mean()), np.exp(nats_resampled)),
        interval(kl.mean(), kl_resampled),
    )


def _draw_counts(draws: int) -> np.ndarray:
    """How often each draw is drawn, float64 [RESAMPLES, draws] that add up to 1."""
    return np.random.default_rng(1).multinomial(draws, np.full(draws, 1 / draws), size=RESAMPLES) / draws


def _over_draws(resampled: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Means over draws, float64 [RESAMPLES], of values [draws, RESAMPLES]."""
    return (resampled * counts.T).sum(0)
