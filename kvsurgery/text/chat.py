"""Prompts of chat models: a user's turn in the chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvsurgery.errors import UnsupportedModel
from kvsurgery.text.tokens import first_tokens, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

CONTENT = "@@content@@"  # stands for the user's words while a chat template is filled in
# what may stand in a template besides the messages: no reasoning aloud, and the same prompt on every day
TEMPLATE_OPTIONS: dict[str, Any] = {"enable_thinking": False, "date_string": "26 Jul 2024"}


def around_turn(
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin, *, as_parts: bool = False
) -> tuple[str, str] | None:
    """The text of the chat template before a user's first words, and after them up to the start of the answer.

    None if the tokenizer has no chat template.

    Args:
        as_parts: whether a turn is a list of texts and images, as templates of models that read images expect.

    Raises:
        UnsupportedModel: the template cannot be rendered, or changes the user's words.
    """
    if not tokenizer.chat_template:
        return None
    content = [{"type": "text", "text": CONTENT}] if as_parts else CONTENT
    prompt = _fill_template(tokenizer, [{"role": "user", "content": content}])
    if prompt.count(CONTENT) != 1:
        raise UnsupportedModel("the chat template does not contain the user's words unchanged and exactly once")
    before, after = prompt.split(CONTENT)
    return before, after


def turn_with_context(
    tokenizer: PreTrainedTokenizerBase, context: str, question: str, lead: str = "", *, chat: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [tokens] each: a user's turn in two parts, context and question; the first does not depend on the second.

    Args:
        lead, chat: as in `turn_tokens`.

    Raises:
        UnsupportedModel: the template cannot be used.
    """
    frame = around_turn(tokenizer) if chat else None
    if frame is None:
        token_lists = first_tokens(tokenizer) + token_ids(tokenizer, context), token_ids(tokenizer, question + lead)
    else:
        before, after = frame
        token_lists = token_ids(tokenizer, before + context), token_ids(tokenizer, question + after + lead)
    context_tokens, question_tokens = (np.array(tokens, dtype=np.int64) for tokens in token_lists)
    return context_tokens, question_tokens


def turn_tokens(tokenizer: PreTrainedTokenizerBase, content: str, lead: str = "", *, chat: bool = True) -> np.ndarray:
    """int64 [tokens]: a prompt, as a user's turn if there is a chat template, else as plain text.

    Args:
        content: the user's words.
        lead: the first words of the answer.
        chat: if False, the prompt is plain text even if there is a template.

    Raises:
        UnsupportedModel: the template cannot be used.
    """
    frame = around_turn(tokenizer) if chat else None
    if frame is None:
        return np.array(first_tokens(tokenizer) + token_ids(tokenizer, content + lead), dtype=np.int64)
    before, after = frame
    return np.array(token_ids(tokenizer, before + content + after + lead), dtype=np.int64)


def _fill_template(tokenizer: PreTrainedTokenizerBase | ProcessorMixin, turns: list[dict[str, Any]]) -> str:
    try:
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **TEMPLATE_OPTIONS)
    except Exception as error:  # whatever a template raises
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UnsupportedModel(f"the chat template cannot be filled in: {reason}") from error
    return prompt if isinstance(prompt, str) else ""
