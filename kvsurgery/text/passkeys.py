"""Passkeys in a text, and the words around them, for training and evaluation (Xiao et al. 2024, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvsurgery.errors import TextError
from kvsurgery.text.chat import around_turn
from kvsurgery.text.tokens import first_tokens, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth",
    "twentieth",
)  # fmt: skip
ORDINAL, KEY = "{ordinal}", "{key}"
OPENING = "Passkeys are hidden in this text. Remember them.\n\n"
HIDDEN = "\nThe {ordinal} passkey is:{key}.\n"
ASKED = "\nWhat is the {ordinal} passkey? The {ordinal} passkey is:"


@dataclass(frozen=True)
class PasskeyWords:
    """The words around passkeys, in token ids.

    Attributes:
        opening: the start of a prompt.
        hidden: by ordinal, the words before and after a passkey in the text.
        asked: by ordinal, the question up to the start of the answer.
    """

    opening: list[int]
    hidden: list[tuple[list[int], list[int]]]
    asked: list[list[int]]

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        count: int,
        opening: str = OPENING,
        hidden: str = HIDDEN,
        asked: str = ASKED,
        *,
        chat: bool = False,
    ) -> PasskeyWords:
        """The words around `count` passkeys, with `{ordinal}` in them filled in, and `{key}` once in `hidden`.

        Args:
            chat: if there is a chat template, the prompt is a user's turn; the words after the question mark begin the
                answer.

        Raises:
            TextError: the tokenizer does not know the words.
            UnsupportedModel: the chat template cannot be used.
        """

        def encode(words: str) -> list[int]:
            ids = token_ids(tokenizer, words)
            if tokenizer.unk_token_id in ids:
                raise TextError(f"the tokenizer does not know all words of {words.strip()!r}")
            return ids

        frame = around_turn(tokenizer) if chat else None

        def ask(ordinal: str) -> list[int]:
            words = asked.replace(ORDINAL, ordinal)
            if frame is None:
                return encode(words)
            question, mark, answer = words.rpartition("?")
            return encode(question + mark) + token_ids(tokenizer, frame[1]) + encode(answer.lstrip())

        start = first_tokens(tokenizer) if frame is None else token_ids(tokenizer, frame[0])
        statements = (hidden.replace(ORDINAL, ordinal).partition(KEY) for ordinal in ORDINALS[:count])
        return cls(
            start + encode(opening),
            [(encode(before), encode(after)) for before, _, after in statements],
            [ask(ordinal) for ordinal in ORDINALS[:count]],
        )

    def length(self, size: int) -> int:
        """Number of tokens in the opening and in all passkeys of `size` tokens with their words, without other text."""
        return len(self.opening) + sum(len(before) + size + len(after) for before, after in self.hidden)

    def hide(self, text: np.ndarray, depths: np.ndarray, keys: np.ndarray) -> list[np.ndarray | Sequence[int]]:
        """A prompt up to its first question, in pieces: the opening, four for each passkey, and the rest of a text.

        The four are the text before the passkey, the words that introduce it, the passkey, and the words after it.

        Args:
            text: int64 [tokens].
            depths: places in the text, int64 [passkeys], ascending.
            keys: int64 [passkeys, size].
        """
        *parts, rest = np.split(text, depths)
        pieces: list[np.ndarray | Sequence[int]] = [self.opening]
        for part, (before, after), key in zip(parts, self.hidden, keys, strict=True):
            pieces += part, before, key, after
        return [*pieces, rest]
