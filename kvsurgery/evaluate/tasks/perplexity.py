"""Perplexity of text through the cache: a prefill, then every token of what follows read by itself.

One forward over all tokens would see no eviction, no budget and no quantized state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

import numpy as np

from kvsurgery.errors import TextError
from kvsurgery.evaluate.sample import Reader, Sample
from kvsurgery.setting import lengths_setting, samples_setting, setting, text_setting
from kvsurgery.text.haystack import Haystack, check_text, tokens_needed
from kvsurgery.text.lengths import default_lengths
from kvsurgery.text.tokens import first_tokens


@dataclass(frozen=True)
class PerplexityTask:
    """Pieces of a text, of which the last tokens are measured.

    Attributes:
        lengths: of whole pieces, in tokens. None: as `NeedleTask` has them.
        continuation: tokens at the end of a piece that are measured.
        pieces: of each length, from anywhere in the text.
        text: a file, a dataset's id such as WikiText's or PG-19's, or None for generated text.
    """

    lengths: tuple[int, ...] | None = lengths_setting()
    continuation: int = setting(
        256, "continuation", "number of last tokens that are decoded one by one and measured", tokens=True
    )
    pieces: int = samples_setting(10, None)
    text: str | None = text_setting()

    def check(self) -> None:
        """Check that the text can be read, and the numbers of pieces and tokens."""
        check_text(self.text)
        if self.continuation < 1 or self.pieces < 1:
            raise TextError(
                f"perplexity takes 1 token or more, in 1 piece or more; got {self.continuation} in {self.pieces}"
            )
        if self.lengths:
            self._check_lengths(self.lengths)

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """Piece by piece, of all lengths each; those of one number end at the same token, so that lengths compare.

        Raises:
            TextError: a number is out of range, or the text is unknown to the tokenizer or too short.
        """
        prefix = first_tokens(reader.tokenizer)
        lengths = self.lengths or default_lengths(reader.max_context)
        self.check()
        self._check_lengths(lengths, len(prefix))
        max_length = max(lengths)
        haystack = Haystack.read(self.text, reader.tokenizer, tokens_needed(self.text, max_length), reader.seed)
        for number, length in islice(product(range(self.pieces), lengths), limit):
            piece = haystack.piece(np.random.default_rng([reader.seed, number]), max_length - len(prefix))
            yield Sample(
                task="perplexity",
                name=f"{length}/{number}",
                tokens=np.concatenate([prefix, piece[len(piece) + len(prefix) - length :]]).astype(np.int64),
                metric="perplexity",
                continuation=self.continuation,
                facts={"tokens": length},
            )

    def _check_lengths(self, lengths: Sequence[int], prefix_length: int = 0) -> None:
        """Check that each piece has tokens before those that are measured, besides `prefix_length` ones of any text."""
        if min(lengths) <= self.continuation + prefix_length:
            raise TextError(
                f"perplexity measures the last {self.continuation} tokens of a piece, and {min(lengths)} tokens leave "
                "none before them; give longer `lengths`, or a shorter `continuation`"
            )


TASK = PerplexityTask
