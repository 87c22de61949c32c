"""Token ids of plain text, and the special tokens and end tokens of a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text, without special tokens around it."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int] | np.ndarray, **options: bool) -> str:
    """Decode token ids to text, with the options of `decode`."""
    text = tokenizer.decode(tokens, **options)
    assert isinstance(text, str)  # there is a list of texts for several lists of ids only
    return text


def first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that the tokenizer puts before any text."""
    period = token_ids(tokenizer, ".")
    ids = tokenizer(".")["input_ids"]
    return ids[: next(start for start in range(len(ids)) if ids[start : start + len(period)] == period)]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of special tokens, which stand for no text."""
    added_special = (token for token, content in tokenizer.added_tokens_decoder.items() if content.special)
    return sorted({*tokenizer.all_special_ids, *added_special})


def end_tokens(config: GenerationConfig) -> list[int]:
    """The tokens that end an answer; chat models have several."""
    tokens = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return [token for token in tokens if token is not None]


def ordinary_tokens(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> np.ndarray:
    """int64: the token ids of a model with this vocabulary that are neither special nor added."""
    excluded_ids = {*special_ids(tokenizer), *tokenizer.added_tokens_decoder}
    return np.array([token for token in range(min(len(tokenizer), vocabulary)) if token not in excluded_ids])
