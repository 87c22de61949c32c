"""Facts whose questions share no words with them but "of": a retriever by words does not find them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from benchmarks.real_model.trials import placed
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.needle_sets import read_set
from kvsurgery.text.tokens import token_ids

FACT = " A {} was called {}."
QUESTION = "The name of the {} is"
FACTS = 12  # of a text
WORDS = ("its own words", "other words")  # of a question
# what a fact says, and what its question says
SUBJECTS = (
    ("feline of a physician", "doctor's cat"),
    ("hound of an attorney", "lawyer's dog"),
    ("vessel at a quay", "boat in our harbour"),
    ("automobile within some shed", "car inside that garage"),
    ("tavern beside a brook", "inn near our stream"),
    ("stallion of a monarch", "king's horse"),
    ("infant of a cook", "chef's baby"),
    ("residence of a schoolmaster", "teacher's house"),
    ("woodland behind a chapel", "forest past that church"),
    ("accomplice of a thief", "robber's partner"),
    ("spouse of a mariner", "sailor's wife"),
    ("gem of a sovereign", "jewel from our queen"),
    ("store of an apothecary", "pharmacist's shop"),
    ("melody of a maiden", "girl's song"),
    ("gazette of a town", "newspaper from our city"),
    ("foe of a commander", "enemy to our general"),
)


@dataclass(frozen=True)
class Facts:
    """A text with facts.

    Attributes:
        text: int64 [tokens].
        spans: the places of each fact.
        questions: tokens of the questions about each fact, by their `WORDS`.
    """

    text: np.ndarray
    spans: tuple[range, ...]
    questions: dict[str, list[list[int]]]


def texts(tokenizer: PreTrainedTokenizerBase, haystack: Haystack, length: int, count: int) -> Iterator[Facts]:
    """Texts of `length` tokens, each with some of the facts at random depths."""
    names = [needle.answer for needle in read_set("word")]
    rng = np.random.default_rng([0, length])
    for _ in range(count):
        subjects = [SUBJECTS[place] for place in rng.permutation(len(SUBJECTS))[:FACTS]]
        words = [names[place].capitalize() for place in rng.permutation(len(names))[:FACTS]]
        sentences = [
            token_ids(tokenizer, FACT.format(said, word)) for (said, _), word in zip(subjects, words, strict=True)
        ]
        text, ends = placed(haystack.piece(rng, length - sum(map(len, sentences))), sentences, rng)
        spans = tuple(range(end + 1 - len(fact), end + 1) for end, fact in zip(ends, sentences, strict=True))
        asked = {
            words: [token_ids(tokenizer, f"\n\n{QUESTION.format(subject[index])}") for subject in subjects]
            for index, words in enumerate(WORDS)
        }
        yield Facts(text, spans, asked)
