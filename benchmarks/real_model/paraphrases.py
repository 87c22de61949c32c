"""Facts whose questions share no words with them but "of": a retriever by words does not find them."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from benchmarks.real_model.trials import Prompt, placed, questions
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.needle_sets import read_set
from kvsurgery.text.tokens import token_ids

FACT = " A {} was called {}."
QUESTION = "The name of the {} is"
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


def paraphrased_prompts(
    tokenizer: PreTrainedTokenizerBase, haystack: Haystack, length: int, facts: int, count: int, seed: int
) -> list[Prompt]:
    """Prompts like those of `trials.prompts`, whose questions name the subjects of the facts in other words."""
    names = [needle.answer for needle in read_set("word")]
    rng, result = np.random.default_rng([seed, length]), []
    for _ in range(count):
        subjects = [SUBJECTS[place] for place in rng.permutation(len(SUBJECTS))[:facts]]
        words = [names[place].capitalize() for place in rng.permutation(len(names))[:facts]]
        sentences = [
            token_ids(tokenizer, FACT.format(said, word)) for (said, _), word in zip(subjects, words, strict=True)
        ]
        text, places = placed(haystack.piece(rng, length - sum(map(len, sentences))), sentences, rng)
        asked = [(QUESTION.format(other), word) for (_, other), word in zip(subjects, words, strict=True)]
        result.append(Prompt(text, questions(tokenizer, asked), np.zeros(0, np.int64), places))
    return result
