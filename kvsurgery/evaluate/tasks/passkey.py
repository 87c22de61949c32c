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
from kvsurgery.setting import SAMPLES, lengths_setting, setting, text_setting
from kvsurgery.text import help as says
from kvsurgery.text.chat import around_turn
from kvsurgery.text.haystack import Haystack, check_text, first_tokens, ordinary_tokens, token_ids, tokens_needed
from kvsurgery.text.lengths import default_lengths
from kvsurgery.text.passkey_words import ASKED, END, HIDDEN, OPENING, ORDINALS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY, CUE, ORDINAL = "{key}", "{cue}", "{ordinal}"
WORDS = (HIDDEN.format(ORDINAL) + KEY + END, ASKED.format(ORDINAL, ORDINAL))
BARE = (KEY, CUE)  # where a vocabulary does not have the words


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
    """

    lengths: tuple[int, ...] | None = lengths_setting()
    count: int = setting(10, "passkeys", says.PASSKEYS)
    size: int = setting(32, "passkey_tokens", says.PASSKEY_TOKENS)
    prompts: int = setting(5, "samples", SAMPLES)
    text: str | None = text_setting()
    hidden: str | None = setting(None, "passkey_hidden", "the statement in the text, with {key} and maybe {ordinal}")
    asked: str | None = setting(
        None, "passkey_asked", "the question; {cue} at its end gives the first token of the passkey"
    )

    def check(self) -> None:
        """Check numbers and words, and that the text can be read.

        Raises:
            KVSurgeryError: a number is out of range, words lack a place for the passkey, or the text cannot be read.
        """
        check_text(self.text)
        if not 1 <= self.count <= len(ORDINALS) or self.size < 2 or self.prompts < 1:
            raise TextError(
                f"a prompt has 1 to {len(ORDINALS)} passkeys of 2 tokens or more, and there is 1 prompt or more; got "
                f"{self.count} of {self.size} in {self.prompts}"
            )
        if self.lengths and min(self.lengths) <= (least := self.count * self.size):
            raise TextError(
                f"{self.count} passkeys of {self.size} tokens take more than {least} tokens, and a prompt has "
                f"{min(self.lengths)}; give longer `lengths`, or fewer or shorter passkeys"
            )
        hidden, asked = self.hidden or WORDS[0], self.asked or WORDS[1]
        if hidden.count(KEY) != 1 or asked.count(CUE) > 1 or KEY in asked or CUE in hidden:
            raise TextError(f"`hidden` has {KEY} once, and `asked` may have {CUE} once")
        if CUE in asked and not asked.endswith(CUE):
            raise TextError(f"`asked` ends in {CUE}, since the answer goes on from there")

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """Prompt by prompt, of all lengths each; of these, passkey by passkey.

        Raises:
            TextError: a number is out of range, the words or the text are unknown to the tokenizer, or a length does
                not hold the passkeys.
        """
        self.check()
        words, lengths = self._words(reader.tokenizer), self.lengths or default_lengths(reader.max_context)
        needed = tokens_needed(self.text, max(lengths))
        haystack = Haystack.read(self.text, reader.tokenizer, needed, reader.seed)
        alphabet = _alphabet(reader, haystack)
        prompts = (
            self._prompt(words, haystack, alphabet, length, number, reader.seed)
            for number, length in product(range(self.prompts), lengths)
        )
        yield from islice(chain.from_iterable(prompts), limit)

    def _prompt(
        self, words: _Words, haystack: Haystack, alphabet: np.ndarray, length: int, number: int, seed: int
    ) -> Iterator[Sample]:
        """One prompt, with each of its passkeys asked for."""
        rng = np.random.default_rng([seed, number, length])
        # where there are enough, no token twice, so that a cue is of one passkey
        repeated = self.count * self.size > len(alphabet)
        keys = rng.choice(alphabet, (self.count, self.size), replace=repeated)
        hidden = [words.hide(place, key) for place, key in enumerate(keys)]
        rooms = [
            length - len(words.opening) - sum(map(len, hidden)) - len(words.ask(place, key))
            for place, key in enumerate(keys)
        ]
        if min(rooms) < 0:
            raise TextError(
                f"{self.count} passkeys of {self.size} tokens take {-min(rooms)} tokens more than a prompt of "
                f"{length} has; give longer `lengths`, or fewer or shorter passkeys"
            )
        text, depths = haystack.piece(rng, max(rooms)), np.sort(rng.integers(0, min(rooms) + 1, self.count))
        for place, (key, room) in enumerate(zip(keys, rooms, strict=True)):
            parts = np.split(text[:room], depths)
            pieces = [piece for pair in zip(parts, [*hidden, []], strict=True) for piece in pair]
            yield Sample(
                task="passkey",
                name=f"{length}/{number}/{place}",
                tokens=np.concatenate([words.opening, *pieces, words.ask(place, key)]).astype(np.int64),
                metric="token_accuracy",
                limit=self.size - words.cued,
                facts={"tokens": length},
                answer_tokens=key[words.cued :],
            )

    def _words(self, tokenizer: PreTrainedTokenizerBase) -> _Words:
        if self.hidden is not None or self.asked is not None:
            hidden, asked = self.hidden or WORDS[0], self.asked or WORDS[1]
            return _Words.of(tokenizer, self.count, "", hidden, asked)
        try:
            return _Words.of(tokenizer, self.count, OPENING, *WORDS)
        except TextError:
            return _Words.of(tokenizer, self.count, "", *BARE)


@dataclass(frozen=True)
class _Words:
    """What stands around passkeys, in token ids.

    Attributes:
        opening: the start of the prompt.
        hidden: by ordinal, what is before and after a passkey in the text.
        asked: by ordinal, the question up to where the answer, or the cue, begins.
        cued: tokens of a passkey that the question says.
    """

    opening: list[int]
    hidden: list[tuple[list[int], list[int]]]
    asked: list[list[int]]
    cued: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, count: int, opening: str, hidden: str, asked: str) -> _Words:
        """A turn of the user where there is a chat template; what follows the question mark then begins the answer.

        Raises:
            TextError: the tokenizer does not know the words.
        """

        def encode(words: str) -> list[int]:
            ids = token_ids(tokenizer, words)
            if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
                raise TextError(
                    f"the tokenizer does not know all words of {words.strip()!r}; give words that it knows "
                    "(`hidden`, `asked`)"
                )
            return ids

        around, cued = around_turn(tokenizer), CUE in asked
        asked = asked.removesuffix(CUE)
        question, mark, lead = asked.rpartition("?")
        question += mark
        start = first_tokens(tokenizer) if around is None else token_ids(tokenizer, around[0])

        def ask(ordinal: str) -> list[int]:
            if around is None:
                return encode(asked.replace(ORDINAL, ordinal))
            turn, answer = (part.replace(ORDINAL, ordinal) for part in (question, lead.lstrip()))
            return encode(turn) + token_ids(tokenizer, around[1]) + encode(answer)

        hide = [hidden.replace(ORDINAL, ordinal).split(KEY) for ordinal in ORDINALS[:count]]
        return cls(
            start + encode(opening),
            [(encode(before), encode(after)) for before, after in hide],
            [ask(ordinal) for ordinal in ORDINALS[:count]],
            int(cued),
        )

    def hide(self, place: int, key: np.ndarray) -> np.ndarray:
        """What stands in the text of a passkey."""
        before, after = self.hidden[place]
        return np.concatenate([before, key, after])

    def ask(self, place: int, key: np.ndarray) -> np.ndarray:
        """What asks for it."""
        return np.concatenate([self.asked[place], key[: self.cued]])


def _alphabet(reader: Reader, haystack: Haystack) -> np.ndarray:
    """Tokens that passkeys are made of: none that are special or added, nor, if half is left, what the text has."""
    known = ordinary_tokens(reader.tokenizer, reader.vocabulary)
    foreign = np.setdiff1d(known, haystack.tokens)
    return foreign if 2 * len(foreign) >= len(known) else known


TASK = PasskeyTask
