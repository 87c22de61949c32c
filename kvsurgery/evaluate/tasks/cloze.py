"""Cloze: the word that a passage goes on with, which has stood in it before.

As in LAMBADA (Paperno et al. 2016, arXiv 1606.06031), the model says the next word; passages are pieces of any text,
and the word is the last one of a sentence or clause. It shows whether a conversion leaves short contexts alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

import numpy as np

from kvsurgery.errors import TextError
from kvsurgery.evaluate.sample import Reader, Sample
from kvsurgery.setting import lengths_setting, samples_setting, text_setting
from kvsurgery.text.haystack import Haystack, check_text, tokens_needed
from kvsurgery.text.lengths import default_lengths
from kvsurgery.text.tokens import first_tokens, text_of, token_ids

WORD = re.compile(r"(?<= )[^\W\d_]{4,}(?=[.,;:!?])")  # the last word of a sentence or clause
SPARE_TOKENS = 256  # tokens after a passage's length, in one of which its last word is looked for
TRIES = 50  # pieces of text that are looked through for a word


@dataclass(frozen=True)
class ClozeTask:
    """Passages that end before a word that they hold already.

    Attributes:
        lengths: of passages, in tokens. None: as `NeedleTask` has them.
        passages: of each length.
        text: as `Haystack.read` takes it.
    """

    lengths: tuple[int, ...] | None = lengths_setting()
    passages: int = samples_setting(50, None)
    text: str | None = text_setting()

    def check(self) -> None:
        """Check that the text can be read, and the numbers of passages and tokens."""
        check_text(self.text)
        if self.passages < 1:
            raise TextError(f"there must be 1 passage or more, got {self.passages}")
        if self.lengths:
            _check_lengths(self.lengths)

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """Passage by passage, of all lengths each; those of one number ask for the same word.

        Raises:
            TextError: a number is out of range, or the text is unknown to the tokenizer, too short, or repeats no word.
        """
        self.check()
        prefix = first_tokens(reader.tokenizer)
        lengths = self.lengths or default_lengths(reader.max_context)
        _check_lengths(lengths, len(prefix))
        needed_tokens = tokens_needed(self.text, max(lengths) + SPARE_TOKENS)
        haystack = Haystack.read(self.text, reader.tokenizer, needed_tokens, reader.seed)
        for number, length in islice(product(range(self.passages), lengths), limit):
            passage, word = _passage(reader, haystack, max(lengths), min(lengths) - len(prefix), number)
            yield Sample(
                task="cloze",
                name=f"{length}/{number}",
                tokens=np.concatenate([prefix, passage[len(passage) + len(prefix) - length :]]).astype(np.int64),
                metric="first_words",
                answers=(word,),
                limit=len(token_ids(reader.tokenizer, f" {word}")) + 1,
                facts={"tokens": length},
            )


def _check_lengths(lengths: Sequence[int], prefix_length: int = 0) -> None:
    """Check that each passage has a word to repeat, besides `prefix_length` tokens before any text."""
    if min(lengths) < 2 + prefix_length:
        raise TextError(
            f"a passage takes {2 + prefix_length} tokens or more, got {min(lengths)}; give longer `lengths`"
        )


def _passage(reader: Reader, haystack: Haystack, max_length: int, window: int, number: int) -> tuple[np.ndarray, str]:
    """int64: the tokens before a word that stands among the last `window` of them too, and the word."""
    rng = np.random.default_rng([reader.seed, number])
    for _ in range(TRIES):
        piece = haystack.piece(rng, max_length + SPARE_TOKENS)
        text = text_of(reader.tokenizer, piece)
        skipped_text = text_of(reader.tokenizer, piece[:max_length])
        for match in WORD.finditer(text, len(skipped_text)):
            tokens = token_ids(reader.tokenizer, text[: match.start() - 1])
            if len(tokens) < max_length:
                continue
            window_text = text_of(reader.tokenizer, tokens[-window:])
            if re.search(rf"\b{re.escape(match[0])}\b", window_text, re.IGNORECASE):
                return np.array(tokens), match[0]
    raise TextError(
        f"no sentence of {haystack.name} ends with a word that stands in the {window} tokens before it; give longer "
        "`lengths`, or another text"
    )


TASK = ClozeTask
