"""Needle in a haystack: a statement at some depth of a long text, asked for at its end (Kamradt 2023).

The grid of lengths and depths, the prompts and the shipped needles are those that HeadKV's scores are measured with.
Answers are measured as there, by ROUGE-1 recall, and by whether they hold the right one as it stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product

import numpy as np

from kvsurgery.errors import TextError
from kvsurgery.evaluate.sample import Reader, Sample
from kvsurgery.score.retrieval import default_lengths
from kvsurgery.text.haystack import Haystack, token_ids
from kvsurgery.text.needles import SHIPPED, Prompt, needle_place, read_needles

DEPTHS = tuple(round(depth, 2) for depth in np.linspace(0, 1, 10).tolist())
ANSWER = 2  # tokens to generate for one of the right answer
STOPS = ("\n",)


@dataclass(frozen=True)
class NeedleTask:
    """Every needle at every length and depth.

    Attributes:
        lengths: of whole prompts, in tokens. None: five, from 1,000 to 32,000 or to what fits the model's context.
        depths: of needles in the text, 0 (first) to 1 (last).
        text: around them: a file, a dataset's id, or None for generated text, as `Haystack.read` takes it.
        needles: a JSONL file. None: those that ship, of the kind that is found and not reasoned about.
    """

    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] = DEPTHS
    text: str | None = None
    needles: str | None = None

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """The grid, needle by needle.

        Raises:
            TextError: a needle or the text is unknown to the tokenizer, or a length holds no text around a needle.
        """
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise TextError(f"--depths lie in [0, 1], got {', '.join(map(str, self.depths))}")
        tokenizer, lengths = reader.tokenizer, self.lengths or default_lengths(reader.max_context)
        needles = read_needles(self.needles or SHIPPED)
        if self.needles is None:
            needles = tuple(needle for needle in needles if needle.kind == "retrieval")
        prompts = [Prompt.of(needle, tokenizer) for needle in needles]
        for prompt, length in product(prompts, lengths):
            if length - prompt.overhead < len(prompt.needle):
                raise TextError(
                    f"a prompt of {length} tokens has no text around a needle and its question, which take "
                    f"{prompt.overhead} tokens; give longer --lengths"
                )
        haystack = Haystack.read(self.text, tokenizer, max(lengths), reader.seed)
        grid = product(enumerate(zip(needles, prompts, strict=True)), lengths, self.depths)
        for (number, (needle, prompt)), length, depth in islice(grid, limit):
            rng = np.random.default_rng([reader.seed, number, length, round(1000 * depth)])
            text = haystack.piece(rng, length - prompt.overhead)
            yield Sample(
                task="needle",
                name=f"{length}/{depth}/{number}",
                tokens=prompt.around(text, needle_place(text, depth, tokenizer))[0],
                metric="rouge1_recall",
                also=("string_match_all",),
                answers=(needle.answer,),
                limit=ANSWER * len(token_ids(tokenizer, needle.answer)),
                facts={"tokens": length, "depth": depth},
                stops=STOPS,
            )
