"""`Haystack`: long text in which needles and passkeys are hidden."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from kvsurgery.errors import TextError
from kvsurgery.system.files import reading_text
from kvsurgery.text.hub_dataset import dataset_of, dataset_rows, require_datasets
from kvsurgery.text.tokens import special_ids, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
OPENINGS = ("", "", "", "Later that week ", "In those days ", "As far as anyone knew, ", "One morning ", "Even so, ")
MAX_UNKNOWN = 0.1  # share of unknown tokens in a text that a model can read
GENERATED_PIECES = 8  # a generated text has this many times the tokens of its longest piece
MAX_CHARACTERS = 1 << 24  # of a file; what follows is not read


@dataclass(frozen=True, eq=False)
class Haystack:
    """Token ids of one long text, without special tokens; `name` is its source."""

    tokens: np.ndarray
    name: str

    @classmethod
    def read(cls, source: str | None, tokenizer: PreTrainedTokenizerBase, length: int, seed: int = 0) -> Haystack:
        """Read a text of `length` tokens or more.

        Tokens that are unknown to the tokenizer, and text that spells a special token, are left out.

        Args:
            source: a text file, the Hub id of a dataset whose rows have a `text`, as `owner/name` or
                `owner/name:configuration`, or None for generated text.
            tokenizer: the tokenizer of the model that will read the text.
            length: number of tokens that are needed.
            seed: random seed of generated text.

        Raises:
            TextError: the text cannot be read, is too short, or is mostly unknown to the tokenizer.
        """
        if source is None:
            texts, name = islice(_generated_texts(seed), length), "generated text"
        elif dataset := _dataset(source):
            texts, name = _dataset_texts(source, *dataset), source
        else:
            texts = [_file_text(source)]
            name = os.path.basename(source)
        special_tokens = special_ids(tokenizer)
        read = [np.empty(0, dtype=np.int64)]
        count = 0
        unknown = 0
        total = 0
        for text in texts:
            read.append(np.array(token_ids(tokenizer, text), dtype=np.int64))
            count += (~np.isin(read[-1], special_tokens)).sum()
            unknown += (read[-1] == tokenizer.unk_token_id).sum()
            total += len(read[-1])
            # of a language that the tokenizer does not know, no more has to be read to tell
            if count >= length or (total >= length and unknown > MAX_UNKNOWN * total):
                break
        tokens = np.concatenate(read)
        if unknown > MAX_UNKNOWN * total:
            raise TextError(
                f"{unknown / total:.0%} of {name} is unknown to the tokenizer; give a text that it knows (`text`)"
            )
        haystack = cls(tokens[~np.isin(tokens, special_tokens)], name)
        haystack.require(length)
        return haystack

    @property
    def facts(self) -> dict[str, str]:
        """Facts about the text, for a profile's provenance."""
        return {"text": self.name, "text_hash": blake3(self.tokens.tobytes()).hexdigest()[:32]}

    def require(self, length: int) -> None:
        """Check that the text has `length` tokens.

        Raises:
            TextError: the text is shorter.
        """
        if len(self.tokens) < length:
            raise TextError(
                f"{self.name} has {len(self.tokens)} tokens, {length} are needed; give a longer text, or less context"
            )

    def piece(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """int64 [length]: a piece of the text from a random place.

        Raises:
            TextError: the text is shorter.
        """
        self.require(length)
        start = rng.integers(0, len(self.tokens) - length + 1)
        return self.tokens[start : start + length]


def even_pieces(tokens: np.ndarray, length: int, count: int) -> list[np.ndarray]:
    """Pieces of a text, int64 [length] each, that start at even distances.

    Args:
        tokens: int64 [tokens], `length` or more.
        count: number of pieces. More than the text has room for overlap.
    """
    starts = np.linspace(0, len(tokens) - length, count + 2).astype(int)[1:-1]
    return [tokens[start : start + length] for start in starts]


def tokens_needed(source: str | None, longest: int) -> int:
    """Number of tokens to read from a text for pieces of up to `longest` tokens; more from a generated text."""
    return longest * (GENERATED_PIECES if source is None else 1)


def check_text(source: str | None) -> None:
    """Check that `Haystack.read` can read a text, without reading all of it.

    Raises:
        TextError: there is no such file or dataset, it cannot be read, or `datasets` is not installed.
    """
    if source is None:
        return
    if dataset := _dataset(source):
        require_datasets(dataset[0])
    else:
        _file_text(source)


def _dataset(source: str) -> tuple[str, str | None] | None:
    """The dataset and configuration of a text's source; None if it is a file.

    Raises:
        TextError: the source is neither.
    """
    if os.path.exists(source):
        return None
    if dataset := dataset_of(source):
        return dataset
    raise TextError(f"cannot read text {source}: there is no such file, and it is not the Hub id of a dataset")


def _file_text(path: str) -> str:
    with reading_text(path, "text"), open(path, encoding="utf-8") as file:
        return file.read(MAX_CHARACTERS)


def _dataset_texts(source: str, dataset: str, config: str | None) -> Iterator[str]:
    """Texts of a dataset's training split."""
    for row in dataset_rows(dataset, config, "train"):
        if not isinstance(row.get("text"), str):
            raise TextError(f'dataset {source} has no text in a column "text"; its columns: {", ".join(row)}')
        yield row["text"] + "\n\n"


def _generated_texts(seed: int) -> Iterator[str]:
    """Generate an endless sequence of paragraphs of plain sentences."""
    rng = random.Random(seed)
    while True:
        sentences = []
        for _ in range(rng.randint(4, 9)):
            words = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)} {rng.choice(PLACES)}"
            sentence = rng.choice(OPENINGS) + words + rng.choice((".", f", {rng.choice(ENDS)}."))
            sentences.append(sentence[0].upper() + sentence[1:])
        yield " ".join(sentences) + "\n\n"
