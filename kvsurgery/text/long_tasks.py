"""Tasks with long answers that recall facts of the prompt, or build on numbers earlier in the answer."""

from __future__ import annotations

import numpy as np

NUMBERS, LARGEST = 16, 40
SUM_TASK = (
    "Add these numbers one after the other: {}. Show every step: say which number is next, and the total so far. "
    "Then add them again from the last to the first."
)
STORY_NAMES = (
    "Ada", "Bruno", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kamala", "Leo", "Mira",
    "Nils", "Olga", "Pablo",
)  # fmt: skip
STORY_WORDS = (
    "apple", "river", "lantern", "piano", "tortoise", "silver", "violin", "window", "garden", "bottle", "castle",
    "feather", "ladder", "mirror", "needle", "basket",
)  # fmt: skip
PEOPLE = 12
LIST_TASK = (
    "These people each chose a word: {}. Write a long story in which every person appears with the chosen word. "
    "At the end, list all people and words again."
)


def long_task(number: int, seed: int) -> str:
    """A task as a user's words: sums for even numbers, a list to recall for odd ones; deterministic."""
    rng = np.random.default_rng([seed, number])
    if number % 2 == 0:
        return SUM_TASK.format(", ".join(map(str, rng.integers(2, LARGEST + 1, NUMBERS))))
    pairs = zip(rng.permutation(STORY_NAMES)[:PEOPLE], rng.permutation(STORY_WORDS)[:PEOPLE], strict=True)
    return LIST_TASK.format("; ".join(f"{name} chose {word}" for name, word in pairs))
