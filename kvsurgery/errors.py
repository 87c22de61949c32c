"""Errors that a user can act on, each with the exit code of the command that raises it."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SETTING = re.compile(r"`([a-z0-9_.]+)`")


class KVSurgeryError(Exception):
    """One clear line: what is wrong, where, and how to mend it.

    Settings stand in backticks, which the command line shows as its options: `renamed`. Columns and keys of files stand
    in quotes.
    """

    exit_code = 1


class Mismatch(KVSurgeryError):
    """A checkpoint is not what its provenance says."""

    exit_code = 3


class ProfileError(KVSurgeryError):
    """A head profile is malformed or belongs to another model."""


class TooLittleTime(ProfileError):
    """A measurement does not fit its time.

    Attributes:
        minutes: that are enough.
    """

    def __init__(self, message: str, minutes: int) -> None:
        super().__init__(message)
        self.minutes = minutes


class TextError(KVSurgeryError):
    """A text, or what is to be asked about it, cannot be used: unreadable, too short, unknown to the tokenizer."""


class PolicyError(KVSurgeryError):
    """A recipe cannot give a policy for this model."""


class RecipeError(PolicyError):
    """A recipe's file cannot be read."""


class CheckpointError(KVSurgeryError):
    """A checkpoint is malformed: bad header, missing shard, name outside the folder."""


class SourceChanged(CheckpointError):
    """A file of a checkpoint changed while it was read, so that what was read belongs to no checkpoint."""


class UnsupportedModel(KVSurgeryError):
    """A sound checkpoint that surgery does not cover: unknown family, unknown tensor, quantized weights."""


class OutputError(KVSurgeryError):
    """The output folder cannot be used: not empty, equal to the source, or too little disk."""


class HubError(KVSurgeryError):
    """The Hub cannot be reached, or refuses."""


class Interrupted(KVSurgeryError):
    """Somebody pressed Ctrl-C; what is finished stays, and the hint says how to go on."""

    exit_code = 130

    def __init__(self, hint: str = "rerun the same command to resume") -> None:
        super().__init__(f"interrupted; {hint}")


def not_loaded(source: object, error: Exception) -> CheckpointError:
    """The error for a checkpoint that transformers cannot load, with the first line of its reason."""
    return CheckpointError(f"{source} cannot be loaded: {(str(error) or type(error).__name__).splitlines()[0]}")


def needs_trust(error: Exception) -> bool:
    """Whether transformers refuses to run code of a checkpoint without `trust_remote_code`."""
    return "trust_remote_code" in str(error)


def untrusted(source: object, part: str) -> UnsupportedModel:
    """The error for a checkpoint, a part of which has code of its own."""
    return UnsupportedModel(
        f"the {part} of {source} has code of its own; read it, and set `trust_remote_code` to run it"
    )


def renamed(message: str, names: Mapping[str, str]) -> str:
    """A message with other names of its settings, as far as they have any."""
    return _SETTING.sub(lambda match: names.get(match[1], match[0]), message)


def short(value: object) -> str:
    """A value as an error shows it, in at most 60 characters."""
    return cut(repr(value))


def cut(text: str) -> str:
    """The beginning of a text, in at most 60 characters."""
    return text if len(text) <= 60 else text[:57] + "..."


class ServingError(KVSurgeryError):
    """vLLM cannot serve a checkpoint, or not with these settings. No ValueError, of which vLLM makes several lines."""
