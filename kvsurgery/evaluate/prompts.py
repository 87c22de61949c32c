"""Prompts of benchmarks: read from a file, and shortened to what a model has positions for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvsurgery.errors import TextError
from kvsurgery.text.chat import turn_tokens
from kvsurgery.text.tokens import text_of, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def truncated_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, room: int, *, chat: bool = True) -> np.ndarray:
    """int64 [tokens, at most `room`]: a prompt as `turn_tokens` has it, without its middle where it is too long.

    Raises:
        TextError: there is no room for any of it.
    """
    tokens = turn_tokens(tokenizer, prompt, chat=chat)
    ids = token_ids(tokenizer, prompt) if len(tokens) > room else []
    half = (room - (len(tokens) - len(ids))) // 2
    while len(tokens) > room:
        if half < 1:
            raise TextError(f"a prompt does not fit into {room} tokens")
        start = text_of(tokenizer, ids[:half], skip_special_tokens=True)
        end = text_of(tokenizer, ids[-half:], skip_special_tokens=True)
        tokens = turn_tokens(tokenizer, start + end, chat=chat)
        # where it is cut, text may be spelt by more tokens
        half -= max(1, (len(tokens) - room) // 2)
    return tokens
