"""`Haystack`: long text to hide things in."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvsurgery.errors import ProfileError

# of the built-in text: sentences that fit together, are not alike, and hold no numbers or names to look for
SUBJECTS = (
    "the baker", "an old ferryman", "the youngest of the sisters", "a clerk from the harbour", "the gardener",
    "the schoolmaster", "a tired courier", "the widow at the corner", "the miller", "a travelling painter",
    "the night watchman", "the librarian", "a boy with a kite", "the station master", "the weaver", "a retired judge",
)  # fmt: skip
VERBS = (
    "carried", "had long forgotten", "described", "mended", "was looking for", "put away", "found",
    "would not part with", "sold", "kept talking about", "painted", "borrowed", "weighed", "hid", "counted",
    "could not explain",
)  # fmt: skip
OBJECTS = (
    "a basket of late apples", "the broken clock", "a letter without a stamp", "the map of the valley", "two lanterns",
    "a box of brass screws", "the key to the cellar", "an umbrella", "the ledger", "a chair with three legs",
    "the smallest of the bells", "a coat that smelled of smoke", "the recipe", "a coil of rope", "the blue jug",
    "a handful of seeds",
)  # fmt: skip
PLACES = (
    "by the river", "behind the church", "in the upper room", "on the way to the market", "under the old bridge",
    "at the end of the lane", "near the windmill", "in the rain", "beside the stove", "across the square",
    "on the ferry", "in front of the school",
)  # fmt: skip
ENDS = (
    "and nobody was surprised", "before the lamps were lit", "because the wind had turned", "while the dogs slept",
    "as everybody did in autumn", "although it was a holiday", "until the bell rang", "and then went home",
    "for no reason at all", "which pleased the children", "as if nothing had happened", "but said little about it",
)  # fmt: skip
MAX_UNKNOWN = 0.1  # share of unknown tokens in a text that a model can read
OPENINGS = ("", "", "", "Later that week ", "In those days ", "As far as anyone knew, ", "One morning ", "Even so, ")


@dataclass(frozen=True, eq=False)
class Haystack:
    """Token ids of one long text, without special tokens; `name` says where it is from."""

    tokens: np.ndarray
    name: str

    @classmethod
    def read(cls, source: str | None, tokenizer: PreTrainedTokenizerBase, length: int, seed: int = 0) -> Haystack:
        """Text of `length` tokens or more.

        Args:
            source: a text file, the Hub id of a dataset whose rows have a `text`, or None for generated text.
            tokenizer: of the model that will read it.
            length: tokens that are needed.
            seed: of generated text.

        Raises:
            ProfileError: it cannot be read, or is too short.
        """
        if source is None:
            text, name = _generated(tokenizer, length, seed), "generated"
        elif Path(source).exists():
            text, name = _file(Path(source)), Path(source).name
        else:
            text, name = _dataset(source, tokenizer, length), source
        tokens = np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
        unknown = (tokens == tokenizer.unk_token_id).mean() if len(tokens) and tokenizer.unk_token_id is not None else 0
        if unknown > MAX_UNKNOWN:
            raise ProfileError(
                f"{unknown:.0%} of {name} is unknown to the tokenizer; give a text that the model can read"
            )
        if len(tokens) < length:
            raise ProfileError(
                f"{name} has {len(tokens)} tokens, {length} are needed; give a longer text, or less context"
            )
        return cls(tokens, name)

    def piece(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """int64 [length]: a piece from anywhere.

        Raises:
            ProfileError: the text is shorter.
        """
        if length > len(self.tokens):
            raise ProfileError(
                f"{self.name} has {len(self.tokens)} tokens, {length} are needed; give a longer text, or less context"
            )
        start = rng.integers(0, len(self.tokens) - length + 1)
        return self.tokens[start : start + length]


def _file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ProfileError(f"cannot read text {path}: {error.strerror}") from error


def _dataset(source: str, tokenizer: PreTrainedTokenizerBase, length: int) -> str:
    """Rows of a dataset's training split, as many as are needed; only those are downloaded."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ProfileError(
            f"{source} is no file, and to read a dataset `datasets` is needed: pip install datasets"
        ) from error
    parts, count = [], 0
    try:
        for row in load_dataset(source, split="train", streaming=True):
            parts.append(row["text"])
            count += len(tokenizer(parts[-1], add_special_tokens=False, verbose=False)["input_ids"])
            if count >= length:
                break
    except KeyError as error:
        raise ProfileError(f"dataset {source} has no column `text`") from error
    except Exception as error:  # whatever the library or the network raises
        raise ProfileError(f"no file {source} is here, and as a dataset it cannot be read: {error}") from error
    return "\n\n".join(parts)


def _generated(tokenizer: PreTrainedTokenizerBase, length: int, seed: int) -> str:
    """Paragraphs of plain sentences."""
    rng = random.Random(seed)
    paragraphs, count = [], 0
    while count < length:
        sentences = []
        for _ in range(rng.randint(4, 9)):
            words = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)} {rng.choice(PLACES)}"
            sentence = rng.choice(OPENINGS) + words + rng.choice((".", f", {rng.choice(ENDS)}."))
            sentences.append(sentence[0].upper() + sentence[1:])
        paragraphs.append(" ".join(sentences))
        count += len(tokenizer(paragraphs[-1], add_special_tokens=False)["input_ids"])
    return "\n\n".join(paragraphs)
