"""Passkeys: sequences of random tokens in a long text, asked for one at a time.

The prompts of DuoAttention's training (Xiao et al. 2024, section 2.2), but with one question, at the end. The score is
the share of a passkey's tokens that are said in their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, product
from typing import TYPE_CHECKING

import numpy as np

from kvsurgery.errors import TextError
from kvsurgery.evaluate.sample import Reader, Sample
from kvsurgery.setting import (
    lengths_setting,
    passkey_tokens_setting,
    passkeys_setting,
    samples_setting,
    setting,
    text_setting,
)
from kvsurgery.text.haystack import Haystack, check_text, tokens_needed
from kvsurgery.text.lengths import default_lengths
from kvsurgery.text.passkeys import ASKED, HIDDEN, KEY, ORDINALS, PasskeyWords
from kvsurgery.text.tokens import ordinary_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUE = "{cue}"


@dataclass(frozen=True)
class PasskeyTask:
    """Prompts with several passkeys, each of which is asked for in a sample of its own.

    Attributes:
        lengths: of whole prompts, in tokens. None: as `NeedleTask` has them.
        count, size: passkeys in a prompt, and tokens of each.
        prompts: of each length.
        text: around them, as `Haystack.read` takes it.
        hidden, asked: what stands in the text, with `{key}` and maybe `{ordinal}`, and the question, in words that the
            tokenizer knows. A question with `{cue}`, at its end, says the passkey's first token, and asks for the
            others. None: the words of DuoAttention, or the passkey alone and its cue where the tokenizer does not know
            them.
        questions: of each length, a number that takes the place of `prompts`; None: every passkey of these.
    """

    lengths: tuple[int, ...] | None = lengths_setting()
    count: int = passkeys_setting(10)
    size: int = passkey_tokens_setting()
    prompts: int = 5
    text: str | None = text_setting()
    hidden: str | None = setting(None, "passkey_hidden", "the statement in the text, with {key} and maybe {ordinal}")
    asked: str | None = setting(
        None, "passkey_asked", "the question; {cue} at its end gives the first token of the passkey"
    )
    questions: int | None = samples_setting(None, 50)

    def check(self) -> None:
        """Check that the text can be read, and the sizes and sentences of a prompt."""
        check_text(self.text)
        if not 1 <= self.count <= len(ORDINALS) or self.size < 2 or self.prompts < 1:
            raise TextError(
                f"a prompt has 1 to {len(ORDINALS)} passkeys of 2 tokens or more, and there is 1 prompt or more; got "
                f"{self.count} of {self.size} in {self.prompts}"
            )
        if self.lengths and min(self.lengths) <= (minimum := self.count * self.size):
            raise TextError(
                f"{self.count} passkeys of {self.size} tokens take more than {minimum} tokens, and a prompt has "
                f"{min(self.lengths)}; give longer `lengths`, or fewer or shorter passkeys"
            )
        statement, question = self.hidden or HIDDEN, self.asked or ASKED
        if statement.count(KEY) != 1 or question.count(CUE) > 1 or KEY in question or CUE in statement:
            raise TextError(f"`hidden` must contain {KEY} once, and `asked` may contain {CUE} once")
        if CUE in question and not question.endswith(CUE):
            raise TextError(f"`asked` must end with {CUE}, since the answer continues it")

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """Prompt by prompt, of all lengths each; of these, passkey by passkey.

        Raises:
            TextError: a number is out of range, the words or the text are unknown to the tokenizer, or a length does
                not hold the passkeys.
        """
        self.check()
        lengths = self.lengths or default_lengths(reader.max_context)
        words = self._words(reader.tokenizer)
        needed_tokens = tokens_needed(self.text, max(lengths))
        haystack = Haystack.read(self.text, reader.tokenizer, needed_tokens, reader.seed)
        alphabet = _alphabet(reader, haystack)
        prompts = (
            _spread(self._prompt(*words, haystack, alphabet, length, number, reader.seed), self.count, asked)
            for (number, asked), length in product(enumerate(self._asked_counts()), lengths)
        )
        yield from islice(chain.from_iterable(prompts), limit)

    def _asked_counts(self) -> list[int]:
        """How many passkeys of each prompt are asked for."""
        questions = self.prompts * self.count if self.questions is None else self.questions
        whole_prompts, rest = divmod(questions, self.count)
        return [self.count] * whole_prompts + [rest] * (rest > 0)

    def _prompt(
        self,
        words: PasskeyWords,
        cue_length: int,
        haystack: Haystack,
        alphabet: np.ndarray,
        length: int,
        number: int,
        seed: int,
    ) -> Iterator[Sample]:
        """One prompt, with each of its passkeys asked for."""
        rng = np.random.default_rng([seed, number, length])
        # where there are enough, no token twice, so that a cue is of one passkey
        allow_repeats = self.count * self.size > len(alphabet)
        keys = rng.choice(alphabet, (self.count, self.size), replace=allow_repeats)
        questions = [[*question, *key[:cue_length]] for question, key in zip(words.asked, keys, strict=True)]
        rooms = [length - words.length(self.size) - len(question) for question in questions]
        if min(rooms) < 0:
            raise TextError(
                f"{self.count} passkeys of {self.size} tokens take {-min(rooms)} tokens more than a prompt of "
                f"{length} has; give longer `lengths`, or fewer or shorter passkeys"
            )
        text = haystack.piece(rng, max(rooms))
        depths = np.sort(rng.integers(0, min(rooms) + 1, self.count))
        for place, (key, question, room) in enumerate(zip(keys, questions, rooms, strict=True)):
            yield Sample(
                task="passkey",
                name=f"{length}/{number}/{place}",
                tokens=np.concatenate([*words.hide(text[:room], depths, keys), question]).astype(np.int64),
                metric="token_accuracy",
                limit=self.size - cue_length,
                facts={"tokens": length},
                answer_tokens=key[cue_length:],
            )

    def _words(self, tokenizer: PreTrainedTokenizerBase) -> tuple[PasskeyWords, int]:
        """What stands around passkeys, and how many tokens of a passkey its question says."""
        statement, question = self.hidden or HIDDEN, self.asked or ASKED
        if self.hidden is None and self.asked is None:
            try:
                return PasskeyWords.of(tokenizer, self.count, chat=True), 0
            except TextError:
                statement, question = KEY, CUE
        try:
            words = PasskeyWords.of(tokenizer, self.count, "", statement, question.removesuffix(CUE), chat=True)
        except TextError as error:
            raise TextError(f"{error}; give words that it knows (`hidden`, `asked`)") from error
        return words, int(CUE in question)


def _spread(samples: Iterator[Sample], total: int, count: int) -> Iterator[Sample]:
    """Some of the samples, at even distances; they are made as they are taken."""
    places = {(2 * place + 1) * total // (2 * count) for place in range(count)}
    return (sample for place, sample in enumerate(samples) if place in places)


def _alphabet(reader: Reader, haystack: Haystack) -> np.ndarray:
    """Tokens that passkeys are made of: none that are special or added, nor, if half is left, what the text has."""
    candidates = ordinary_tokens(reader.tokenizer, reader.vocabulary)
    unused_candidates = np.setdiff1d(candidates, haystack.tokens)
    return unused_candidates if 2 * len(unused_candidates) >= len(candidates) else candidates


TASK = PasskeyTask
