"""The included needle sets, by difficulty, and the choice of the hardest set that a model answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvsurgery.errors import TextError
from kvsurgery.text.needles import Kind, Needle, read_needles

FOLDER = Path(__file__).with_name("needle_sets")
AUTO = "auto"
SETS = {"retrieval": ("phrase", "fact", "word"), "reasoning": ("reasoning", "choice")}  # by kind, hardest first
TRIALS = 8  # of a set: its first needles, each at a depth of its own


@dataclass(frozen=True)
class NeedleChoice:
    """The needle set chosen by trials: the hardest set with right answers in at least half of its trials.

    Attributes:
        name: of the set.
        right: number of right answers by set, in the order of the trials, hardest set first.
        trials: number of trials of each set.
        tokens: length of each trial's prompt.
        model: the model that answered.
    """

    name: str
    right: Mapping[str, int]
    trials: int
    tokens: int
    model: Literal["original", "converted"]

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {right} of {self.trials}" for name, right in self.right.items())
        message = (
            f"needles: {self.name}, the hardest set of which the {self.model} model answers at least half at "
            f"{self.tokens:,} tokens ({counts})"
        )
        return message if self.model == "original" else f"{message}; the original was not available for this choice"


def read_set(source: str) -> tuple[Needle, ...]:
    """Read the needles of an included set, by its name, or of a file; `./word` is a file.

    Raises:
        TextError: as `read_needles`.
    """
    is_shipped = source in (name for names in SETS.values() for name in names)
    return read_needles(FOLDER / f"{source}.jsonl" if is_shipped else source)


def trial_places(depths: Sequence[float]) -> list[tuple[int, float]]:
    """The number of the needle and the depth of each trial, from the first depth to the last."""
    return [(trial, depths[round(trial * (len(depths) - 1) / (TRIALS - 1))]) for trial in range(TRIALS)]


def trial_note(name: str, number: int) -> str:
    """A progress note before a trial of a set; trials are numbered from 0."""
    return f"trying needles: {name}, {number + 1} of {TRIALS}"


def choose_set(
    kind: Kind,
    count: Callable[[str], int],
    tokens: int,
    otherwise: str,
    model: Literal["original", "converted"] = "original",
) -> NeedleChoice:
    """Try the sets of a kind, hardest first, until a set has right answers in at least half of its trials.

    Args:
        kind: the kind of needle.
        count: returns the number of right answers in the trials of a set.
        tokens: length of each trial's prompt.
        otherwise: another way out for the user if no set is answered.
        model: the model that answers.

    Raises:
        TextError: the model answers no set.
    """
    right_counts: dict[str, int] = {}
    for name in SETS[kind]:
        right_counts[name] = count(name)
        if 2 * right_counts[name] >= TRIALS:
            return NeedleChoice(name, right_counts, TRIALS, tokens, model)
    counts = ", ".join(f"{name} {number}" for name, number in right_counts.items())
    raise TextError(
        f"the {model} model answers no set of {kind} needles in at least half of {TRIALS} trials at {tokens:,} tokens "
        f"(right: {counts}); give shorter `lengths`, another `text`, needles of your own (a file as `needles`), or "
        f"{SETS[kind][-1]} in any case (`needles` {SETS[kind][-1]}); {otherwise}"
    )
