"""Passkeys to recall: DuoAttention's synthetic data (Xiao et al. 2024, section 2.2).

Sequences of random tokens are hidden at random depths of a long text, each named by an ordinal, and recalled one after
the other at its end: nothing but the context tells them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kvsurgery.errors import ProfileError, TextError
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.prompts import Contexts
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.passkeys import ORDINALS, PasskeyWords
from kvsurgery.text.tokens import ordinary_tokens


class PasskeyPrompt(NamedTuple):
    """A prompt with its answers.

    Attributes:
        tokens: int64 [1, tokens].
        targets: bool [1, tokens], the passkeys' tokens where they are recalled.
        passkeys: int64 [1, tokens]: the number, from 1, of the passkey that a token belongs to, hidden or recalled; 0
            elsewhere.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    passkeys: torch.Tensor


@dataclass(frozen=True)
class Passkeys:
    """Prompts by step and place, drawn anew for each.

    Attributes:
        contexts: their lengths.
        haystack: the text around the passkeys.
        size: tokens of a passkey.
        alphabet: int64, the tokens that passkeys are made of: neither special ones nor added ones.
        words: what stands around passkeys.
    """

    contexts: Contexts
    haystack: Haystack
    size: int
    alphabet: np.ndarray
    words: PasskeyWords

    @classmethod
    def of(
        cls, measured: MeasuredModel, contexts: Contexts, text: str | None = None, *, count: int = 10, size: int = 32
    ) -> Passkeys:
        """Passkeys in a text, for a model to recall.

        Args:
            text: a file, a dataset or None, as `Haystack.read` takes it.
            count, size: passkeys in a prompt, and tokens of each.

        Raises:
            ProfileError: the shortest context does not hold them, or the text is too short.
        """
        if not 1 <= count <= len(ORDINALS) or size < 1:
            raise ProfileError(f"a prompt has 1 to {len(ORDINALS)} passkeys of 1 token or more, got {count} of {size}")
        words = passkey_words(measured, count)
        alphabet = ordinary_tokens(measured.text, measured.model.config.get_text_config().vocab_size)
        passkeys = cls(contexts, contexts.read(text, measured.text), size, alphabet, words)
        if contexts.shortest < passkeys.min_tokens:
            raise ProfileError(
                f"{count} passkeys of {size} tokens take a context of {passkeys.min_tokens} tokens or more, the "
                f"shortest is {contexts.shortest}; give a larger `min_context`, or fewer or shorter passkeys"
            )
        return passkeys

    @property
    def min_tokens(self) -> int:
        """Tokens of a prompt without any text between the passkeys."""
        return _min_tokens(self.words, self.size)

    @property
    def facts(self) -> dict[str, Any]:
        """For a profile's provenance."""
        settings = {"prompts": "passkeys", "passkeys": len(self.words.asked), "passkey_tokens": self.size}
        return {**settings, **asdict(self.contexts), **self.haystack.facts}

    def __call__(self, step: int, place: int) -> PasskeyPrompt:
        """The prompt at one place of a step's batch."""
        rng = self.contexts.rng(step, place)
        filler = self.contexts.length(step) - self.min_tokens
        text = self.haystack.piece(rng, filler)
        keys = rng.choice(self.alphabet, (len(self.words.asked), self.size))
        depths = np.sort(rng.integers(0, filler, len(keys), endpoint=True))

        # pieces of the prompt, and the passkey that each is
        pieces = self.words.hide(text, depths, keys)
        labels = [0, *(label for number in range(1, len(keys) + 1) for label in (0, 0, number, 0)), 0]
        recalls = len(pieces)
        for number, (question, key) in enumerate(zip(self.words.asked, keys, strict=True), 1):
            pieces += question, key, self.words.hidden[number - 1][1]
            labels += 0, number, 0

        lengths = [len(piece) for piece in pieces]
        tokens = torch.from_numpy(np.concatenate(pieces, dtype=np.int64))[None]
        passkeys = torch.from_numpy(np.repeat(labels, lengths))[None]
        targets = passkeys > 0
        targets[:, : sum(lengths[:recalls])] = False
        return PasskeyPrompt(tokens, targets, passkeys)


def passkey_words(measured: MeasuredModel, count: int) -> PasskeyWords:
    """The words around `count` passkeys, as the model's tokenizer spells them.

    Raises:
        ProfileError: it does not know them.
    """
    try:
        return PasskeyWords.of(measured.text, count)
    except TextError as error:
        raise ProfileError(
            f"{error}; train the gates of {measured.name} on a task of its own, with kvsurgery.measure.training"
        ) from error


def most_passkeys(measured: MeasuredModel, count: int, size: int, tokens: int) -> int:
    """How many passkeys of `size` tokens a prompt of `tokens` has room for, at most `count` and at least one.

    Raises:
        ProfileError: as `passkey_words`.
    """
    while count > 1 and _min_tokens(passkey_words(measured, count), size) > tokens:
        count -= 1
    return count


def _min_tokens(words: PasskeyWords, size: int) -> int:
    answers = sum(size + len(after) for _, after in words.hidden)
    return words.length(size) + sum(map(len, words.asked)) + answers
