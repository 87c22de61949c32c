"""`setting`: a field of a dataclass that commands offer as an option, such as an evaluation task's."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

# words that several settings share
SAMPLES = "number of prompts of each length, and of each of a task's subtasks"
SOURCE = "a file, a folder or the Hub id of a dataset"
THERE = "all that the source has"
CHUNK_HELP = "tokens of a prompt that are read at once"
_KEY = "setting"


@dataclass(frozen=True)
class Setting:
    """What a command says of a field; its type and default are the field's.

    Attributes:
        option: the option's name without dashes: "passkey_tokens". Classes may share an option.
        help: what the option sets.
        default: where the field's default is None, the value that it stands for, or words that describe it.
        tokens: whether integers are numbers of tokens, which people write as 4K.
        least: the smallest value of other integers.
        basic: whether it is among the few that --help shows.
    """

    option: str
    help: str
    default: str | int | None = None
    tokens: bool = False
    least: int = 1
    basic: bool = False


def setting(
    value: Any,
    option: str,
    text: str,
    *,
    default: str | int | None = None,
    tokens: bool = False,
    least: int = 1,
    basic: bool = False,
) -> Any:
    """A dataclass field with the default `value` that commands offer as an option: see `Setting`."""
    return field(default=value, metadata={_KEY: Setting(option, text, default, tokens, least, basic)})


def lengths_setting() -> Any:
    """The lengths of prompts, by default what `default_lengths` gives."""
    return setting(
        None, "lengths", "prompt lengths in tokens", default="five lengths up to 32000", tokens=True, basic=True
    )


def text_setting() -> Any:
    """The text of prompts, as `Haystack.read` takes it."""
    help_text = "text that prompts are made of: a file, or a dataset of the Hub, owner/name[:config]"
    return setting(None, "text", help_text, default="generated", basic=True)


def samples_setting(value: int | None = None, default: str | int | None = THERE) -> Any:
    """The number of prompts, which limits every task."""
    return setting(value, "samples", SAMPLES, default=default)


def ask_later_setting() -> Any:
    """Whether the context is read, and a compressed cache selects, before the question is known."""
    return setting(
        False, "ask_later", "read the context before the question is known, each question on a copy of its cache"
    )


def needles_setting() -> Any:
    """A needle set, as `read_set` takes it, or "auto"."""
    help_text = (
        "a JSONL file, or a shipped set: word, fact and phrase, from easy to hard; choice and reasoning, which need "
        "reasoning; or auto, the hardest set that the original answers in at least half of the trials"
    )
    return setting("auto", "needles", help_text)


def depths_setting(value: Any) -> Any:
    """The depths of needles, of which `DEPTHS` are ten."""
    return setting(value, "depths", "depths of needles in the text, 0 (start) to 1 (end)", default="ten")


def passkeys_setting(value: Any, default: int | None = None) -> Any:
    """The number of passkeys."""
    return setting(value, "passkeys", "number of passkeys in a prompt", default=default)


def passkey_tokens_setting(least: int = 1) -> Any:
    """The length of passkeys."""
    return setting(32, "passkey_tokens", "random tokens of each passkey", least=least)


def settings_of(kind: type[Any]) -> dict[str, Setting]:
    """The settings of a dataclass by the names of their fields."""
    return {entry.name: entry.metadata[_KEY] for entry in fields(kind) if _KEY in entry.metadata}
