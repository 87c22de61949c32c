"""The progress of an evaluation, and the scores so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from statistics import fmean
from typing import Any

from kvsurgery.display.progress import Progress


@dataclass(frozen=True)
class Steps:
    """The progress of several models that answer the same samples, as one.

    Attributes:
        samples: of each model.
        models: how many there are.
    """

    progress: Progress
    samples: int
    models: int

    def of(self, place: int, name: str) -> Progress:
        """The progress of one model."""

        def report(done: int, total: int | None, note: str = "") -> None:
            activity = note.partition(": ")[2]  # a note begins with the name of the answers
            self.progress(place * self.samples + done, self.models * self.samples, f"{name}: {activity}")

        return report


def standing(task: str, records: Sequence[Mapping[str, Any]]) -> str:
    """A task and the mean of its first metric so far."""
    task_records = [record for record in records if record["task"] == task]
    scores = [next(iter(record["scores"].values())) for record in task_records if record.get("scores")]
    losses = [record["nll"] for record in task_records if "nll" in record]
    if scores:
        return f"{task}, {fmean(scores):.0%} right"
    return f"{task} {exp(fmean(losses)):.3g}" if losses else task
