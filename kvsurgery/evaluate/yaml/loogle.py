"""Scores of LooGLE's tasks, as its own code counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsurgery.metrics.answer_parsing import cloze_exact, cloze_partial
from kvsurgery.metrics.words import distinct_word_recall, rouge_l_recall


def recall(document: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """Recall of the words of the right answer."""
    [answer], reference = answers, document["answer"]
    return {
        "rouge_l_recall": rouge_l_recall(answer, reference),
        "distinct_word_recall": distinct_word_recall(answer, reference),
    }


def clozes(document: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """Shares of the masks that are filled in right.

    Raises:
        ValueError: the document's `answer` is not a list with a name for each mask.
    """
    [answer], names = answers, document["answer"]
    if not isinstance(names, list):
        raise ValueError(f'"answer" must be a list of names, got {names!r}')
    masks = [f"<mask-{place}>" for place in range(len(names))]
    return {"cloze_exact": cloze_exact(answer, names, masks), "cloze_partial": cloze_partial(answer, names, masks)}
