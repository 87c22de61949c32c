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
from kvsurgery.setting import depths_setting, lengths_setting, needles_setting, samples_setting, text_setting
from kvsurgery.text.haystack import Haystack, check_text
from kvsurgery.text.lengths import DEPTHS, default_lengths
from kvsurgery.text.needle_sets import AUTO, NeedleChoice, read_set, trial_places
from kvsurgery.text.needles import Needle, Prompt, needle_place
from kvsurgery.text.tokens import token_ids

GENERATED_PER_TOKEN = 2  # tokens to generate for one of the right answer
STOPS = ("\n",)


@dataclass(frozen=True)
class NeedleTask:
    """Every needle at every length and depth.

    Attributes:
        lengths: of whole prompts, in tokens. None: five, from 1,000 to 32,000 or to what fits the model's context.
        depths: of needles in the text, 0 (first) to 1 (last).
        text: around them: a file, a dataset's id, or None for generated text, as `Haystack.read` takes it.
        needles: a shipped set, a JSONL file, or "auto": the retrieval set that `choice` names.
        choice: what a trial chose; an `Evaluation` fills it in.
        count: of needles and depths at each length, spread over both. None: each needle at each depth.
    """

    lengths: tuple[int, ...] | None = lengths_setting()
    depths: tuple[float, ...] = depths_setting(DEPTHS)
    text: str | None = text_setting()
    needles: str = needles_setting()
    choice: NeedleChoice | None = None
    count: int | None = samples_setting(None, "every needle at every depth")

    def check(self) -> None:
        """Check that the text can be read, and the set of needles."""
        check_text(self.text)
        if self.needles != AUTO:
            read_set(self.needles)

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """The grid, needle by needle; of some of its places, place by place.

        Raises:
            TextError: a needle or the text is unknown to the tokenizer, a length holds no text around a needle, or no
                set has been chosen.
        """
        name = self.choice.name if self.choice else self.needles
        if name == AUTO:
            raise TextError("no needle set has been chosen; name one, such as word")
        grid = self._grid(reader, name)
        for place in islice(self._places(grid), limit):
            yield grid.sample(*place)

    def trial(self, reader: Reader, name: str) -> list[Sample]:
        """The samples of a set's trial, of the shortest length.

        Raises:
            TextError: as `samples`.
        """
        grid = self._grid(reader, name)
        return [grid.sample(number, min(grid.lengths), depth) for number, depth in trial_places(self.depths)]

    def _places(self, grid: _Grid) -> Iterator[tuple[int, int, float]]:
        """The number of the needle, the length and the depth of each sample."""
        needles, depths = len(grid.needles), self.depths
        if self.count is None or self.count >= needles * len(depths):
            yield from product(range(needles), grid.lengths, depths)
            return
        # neighbors have other needles, so that no needle is twice at a depth
        for place, length in product(range(self.count), grid.lengths):
            yield place % needles, length, depths[(2 * place + 1) * len(depths) // (2 * self.count)]

    def _grid(self, reader: Reader, name: str) -> _Grid:
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise TextError(f"`depths` must lie in [0, 1], got {', '.join(map(str, self.depths))}")
        lengths = self.lengths or default_lengths(reader.max_context)
        needles = read_set(name)
        prompts = tuple(Prompt.of(needle, reader.tokenizer) for needle in needles)
        for prompt, length in product(prompts, lengths):
            if length - prompt.overhead < len(prompt.needle):
                raise TextError(
                    f"a prompt of {length} tokens has no room for text around a needle and its question, which "
                    f"take {prompt.overhead} tokens; give longer `lengths`"
                )
        haystack = Haystack.read(self.text, reader.tokenizer, max(lengths), reader.seed)
        return _Grid(reader, lengths, needles, prompts, haystack)


@dataclass(frozen=True, eq=False)
class _Grid:
    """Needles and the text to hide them in, checked."""

    reader: Reader
    lengths: tuple[int, ...]
    needles: tuple[Needle, ...]
    prompts: tuple[Prompt, ...]
    haystack: Haystack

    def sample(self, number: int, length: int, depth: float) -> Sample:
        """A needle at a length and a depth."""
        needle, prompt, tokenizer = self.needles[number], self.prompts[number], self.reader.tokenizer
        rng = np.random.default_rng([self.reader.seed, number, length, round(1000 * depth)])
        text = self.haystack.piece(rng, length - prompt.overhead)
        return Sample(
            task="needle",
            name=f"{length}/{depth}/{number}",
            tokens=prompt.around(text, needle_place(text, depth, tokenizer))[0],
            metric="rouge1_recall",
            also=("string_match_all",),
            answers=(needle.answer,),
            limit=GENERATED_PER_TOKEN * len(token_ids(tokenizer, needle.answer)),
            facts={"tokens": length, "depth": depth},
            stops=STOPS,
        )


TASK = NeedleTask
