"""The progress of an evaluation, and the scores so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from statistics import fmean
from typing import Any

Progress = Callable[[int, int | None, str], None]  # samples done, how many there are if that is known, and a note


@dataclass(frozen=True)
class Steps:
    """The progress of several models that answer the same samples, as one.

    Attributes:
        samples: of each model.
        models: how many there are.
    """

    progress: Progress | None
    samples: int
    models: int

    def of(self, place: int, name: str) -> Progress:
        """The progress of one model."""

        def report(done: int, total: int | None, note: str) -> None:
            if self.progress is not None:
                # the note begins with the name of the answers
                what = note.partition(": ")[2]
                self.progress(place * self.samples + done, self.models * self.samples, f"{name}: {what}")

        return report


def standing(task: str, records: Sequence[Mapping[str, Any]]) -> str:
    """A task and the mean of its first metric so far."""
    answered = [record for record in records if record["task"] == task]
    scores = [next(iter(record["scores"].values())) for record in answered if record.get("scores")]
    losses = [record["nll"] for record in answered if "nll" in record]
    if scores:
        return f"{task}, {fmean(scores):.0%} right"
    return f"{task} {exp(fmean(losses)):.3g}" if losses else task
