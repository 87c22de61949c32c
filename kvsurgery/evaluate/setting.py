"""`setting`: a field of a task that commands offer as an option."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from kvsurgery.text.help import TEXT

if TYPE_CHECKING:
    from kvsurgery.evaluate.sample import Task

# words that several tasks' settings share
SAMPLES = "number of prompts of each length (ruler: of each task and length)"
SOURCE = "a file, a folder or the Hub id of a dataset"
THERE = "all that the source has"
_KEY = "setting"


@dataclass(frozen=True)
class TaskSetting:
    """What a command says of a task's field; its type and default are the field's.

    Attributes:
        option: the option's name without dashes: "passkey_tokens". Tasks may share an option.
        help: what the option sets.
        default: describes the default where the field's default is None.
        tokens: whether integers are numbers of tokens, which people write as 4K.
    """

    option: str
    help: str
    default: str | None = None
    tokens: bool = False


def setting(value: Any, option: str, text: str, *, default: str | None = None, tokens: bool = False) -> Any:
    """A dataclass field with the default `value` that commands offer as an option: see `TaskSetting`."""
    return field(default=value, metadata={_KEY: TaskSetting(option, text, default, tokens)})


def lengths_setting() -> Any:
    """The lengths of prompts, by default what `default_lengths` gives."""
    return setting(None, "lengths", "tokens of prompts", default="five up to 32000", tokens=True)


def text_setting() -> Any:
    """The text of prompts, as `Haystack.read` takes it."""
    return setting(None, "text", TEXT, default="generated")


def settings_of(task: type[Task]) -> dict[str, TaskSetting]:
    """The settings of a task's class by the names of their fields."""
    return {entry.name: entry.metadata[_KEY] for entry in fields(task) if _KEY in entry.metadata}
