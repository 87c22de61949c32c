"""Methods whose prompts differ in length, and those that hide passkeys in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsurgery.errors import ProfileError
from kvsurgery.measure.methods.method import Method
from kvsurgery.setting import passkey_tokens_setting, passkeys_setting, setting
from kvsurgery.text.lengths import LONGEST_PROMPT, SHORTEST_PROMPT

if TYPE_CHECKING:
    from kvsurgery.measure.model import MeasuredModel
    from kvsurgery.measure.passkeys import Passkeys
    from kvsurgery.measure.prompts import Contexts

PASSKEYS = 10  # in a prompt, where it has room
PASSKEY_ROOM = 100  # tokens that a passkey takes with the words around it


def roomy_passkeys(tokens: int) -> int:
    """How many passkeys a prompt holds with text between them."""
    return min(max(tokens // PASSKEY_ROOM, 1), PASSKEYS)


@dataclass(frozen=True)
class ContextMethod(Method):
    """A method whose prompts differ in length.

    Attributes:
        min_context, max_context: tokens of the shortest and of the longest prompt.
    """

    min_context: int | None = setting(
        None,
        "min_context",
        "tokens of the shortest prompt; with rlkv-lite, of prompt and answer",
        default=SHORTEST_PROMPT,
        tokens=True,
    )
    max_context: int | None = setting(
        None,
        "max_context",
        "tokens of the longest prompt; with rlkv-lite, of prompt and answer",
        default=f"{LONGEST_PROMPT}, or the model's maximum",
        tokens=True,
    )

    def contexts(self, measured: MeasuredModel) -> Contexts:
        """Lengths that the model has positions for.

        Raises:
            ProfileError: it has not.
        """
        from kvsurgery.measure.prompts import Contexts

        return Contexts.of(measured, self.shortest, self.max_context, self.seed)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest prompt."""
        return SHORTEST_PROMPT if self.min_context is None else self.min_context


@dataclass(frozen=True)
class PasskeyMethod(ContextMethod):
    """A method that hides passkeys.

    Attributes:
        passkeys, passkey_tokens: how many are in a prompt, and tokens of each.
    """

    passkeys: int | None = passkeys_setting(None, PASSKEYS)
    passkey_tokens: int = passkey_tokens_setting(least=2)

    def check(self) -> None:
        self.check_passkeys()
        super().check()

    def check_passkeys(self) -> None:
        """Check that the shortest prompt has room for the passkeys, whatever the words around them are.

        Raises:
            ProfileError: it has not.
        """
        if self.minutes is not None and None in (self.min_context, self.passkeys):
            return  # the time chooses them
        count, size = self.count, self.passkey_tokens
        if self.shortest <= (min_tokens := 2 * count * size):
            raise ProfileError(
                f"{count} passkeys of {size} tokens, hidden and recalled, take more than {min_tokens} tokens; give a "
                "longer `min_context`, or fewer or shorter passkeys"
            )

    def passkey_prompts(self, measured: MeasuredModel) -> Passkeys:
        """Prompts in words of the model's tokenizer.

        Raises:
            ProfileError: the tokenizer does not know the words, or the text is too short.
        """
        from kvsurgery.measure.passkeys import Passkeys

        return Passkeys.of(measured, self.contexts(measured), self.text, count=self.count, size=self.passkey_tokens)

    def fitting_passkeys(self, measured: MeasuredModel, tokens: int) -> int:
        """How many passkeys prompts of so many tokens get, unless the number is given.

        Raises:
            ProfileError: the tokenizer does not know the words around them.
        """
        from kvsurgery.measure.passkeys import most_passkeys

        if self.passkeys is not None:
            return self.passkeys
        return most_passkeys(measured, roomy_passkeys(tokens), self.passkey_tokens, tokens)

    @property
    def count(self) -> int:
        """Passkeys in a prompt."""
        return PASSKEYS if self.passkeys is None else self.passkeys
