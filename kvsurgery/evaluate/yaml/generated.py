"""Documents that are made for a model's tokenizer; metadata says their lengths, as for RULER's tasks of lm-eval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsurgery.evaluate.sample import Reader
from kvsurgery.evaluate.tasks.cloze import ClozeTask
from kvsurgery.metrics.words import first_words
from kvsurgery.text.haystack import Haystack, tokens_needed
from kvsurgery.text.tokens import text_of, token_ids

if TYPE_CHECKING:
    from datasets import Dataset

COUNT = 50  # documents of each length
TURN = 40  # tokens that a chat template and cuts between words may add
BEFORE = "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it.\n\n"
HIDDEN = " The pass key is {key}. Remember it. {key} is the pass key. "
AFTER = "\n\nWhat is the pass key?"
LEAD = "The pass key is"


def passkeys(max_seq_lengths: Sequence[int] = (4096,), text: str | None = None, **model: Any) -> dict[str, Dataset]:
    """Texts with a number of five digits.

    Args:
        max_seq_lengths: tokens of a prompt, at most.
        text: as `Haystack.read` takes it.
        model: its name, by `tokenizer` or `pretrained`.
    """
    tokenizer = _tokenizer(**model)
    around = TURN + len(token_ids(tokenizer, BEFORE + HIDDEN.format(key=99_999) + AFTER + LEAD))

    def documents() -> Iterator[dict[str, Any]]:
        for length in max_seq_lengths:
            if length <= around:
                raise ValueError(f"a prompt with a passkey takes more than {around} tokens, got {length}")
            haystack = Haystack.read(text, tokenizer, tokens_needed(text, length))
            for number in range(COUNT):
                rng = np.random.default_rng([number, length])
                piece = haystack.piece(rng, length - around)
                place = rng.integers(0, len(piece) + 1)
                key = str(rng.integers(10_000, 100_000))
                before = text_of(tokenizer, piece[:place])
                after = text_of(tokenizer, piece[place:])
                context = BEFORE + (before + HIDDEN.format(key=key) + after).strip()
                yield {"context": context, "question": AFTER, "lead": LEAD, "answer": key}

    return _test_split(documents())


def clozes(max_seq_lengths: Sequence[int] = (512,), text: str | None = None, **model: Any) -> dict[str, Dataset]:
    """Passages that end before a word that they hold already; arguments as for `passkeys`."""
    tokenizer = _tokenizer(**model)
    reader = Reader(tokenizer, max(max_seq_lengths), len(tokenizer))
    samples = ClozeTask(tuple(max_seq_lengths), COUNT, text).samples(reader)
    return _test_split(
        {
            "context": text_of(tokenizer, sample.tokens, skip_special_tokens=True),
            "answer": sample.answers[0],
        }
        for sample in samples
    )


def first_words_of(document: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """Whether an answer begins with the word."""
    return {"first_words": first_words(answers[0], document["answer"])}


def _tokenizer(tokenizer: str | None = None, pretrained: str | None = None, **_: Any) -> Any:
    from transformers import AutoTokenizer

    if name := tokenizer or pretrained:
        return AutoTokenizer.from_pretrained(name)
    raise ValueError('the model\'s name is needed, by which tokens are counted: metadata={"tokenizer": NAME}')


def _test_split(documents: Iterator[dict[str, Any]]) -> dict[str, Dataset]:
    from datasets import Dataset

    return {"test": Dataset.from_list(list(documents))}
