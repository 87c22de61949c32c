"""Prompts of benchmarks: read from a file, and shortened to what a model has positions for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from string import Formatter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsurgery.errors import TextError
from kvsurgery.evaluate.rows import read_json
from kvsurgery.text.chat import turn_tokens
from kvsurgery.text.tokens import text_of, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_prompts(
    path: str | None,
    shipped_prompts: Mapping[str, Mapping[str, Any]],
    required_field: str,
    optional_fields: Collection[str],
    example_file: str,
) -> dict[str, str]:
    """Prompts by dataset, of a JSON file if there is one.

    Args:
        shipped_prompts: by dataset, what has the `prompt` to use without a file.
        required_field: the field that every prompt must have, which the context fills in.
        optional_fields: fields that a prompt may have.
        example_file: a file of this kind, for the error.

    Raises:
        TextError: it is no JSON object of texts, or they have other fields than a row fills in.
    """
    if path is None:
        return {dataset: entry["prompt"] for dataset, entry in shipped_prompts.items()}
    prompts = read_json(path)
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise TextError(f"{path} must be a JSON object of prompts by dataset, such as {example_file}")
    for dataset, prompt in prompts.items():
        try:
            fields = [part[1:] for part in Formatter().parse(prompt) if part[1] is not None]
        except ValueError as error:
            raise TextError(f"{path}: the braces of {dataset} are not fields: {error}") from error
        # neither a format nor a conversion, which could ask for any width
        allowed = {(name, "", None) for name in (required_field, *optional_fields)}
        if (required_field, "", None) not in fields or {*fields} - allowed:
            allowed_text = ", ".join(f"{{{name}}}" for name in optional_fields)
            raise TextError(
                f"{path}: the prompt for {dataset} must have {{{required_field}}}, and no field but that and "
                f"{allowed_text}"
            )
    return prompts


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
        start, end = (text_of(tokenizer, part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
        tokens = turn_tokens(tokenizer, start + end, chat=chat)
        # where it is cut, text may be spelt by more tokens
        half -= max(1, (len(tokens) - room) // 2)
    return tokens
