"""Metrics that read one letter, number or object out of an answer, as SCBench and LooGLE do."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import Any

LETTERS = "ABCD"


def chosen_option(answer: str, references: Sequence[str]) -> float:
    """1 if an answer begins with the right letter, or names it in a usual phrase (InfiniteBench, questions on books).

    Args:
        references: the option's text and its letter.
    """
    answer = answer.strip()
    if answer[:1] in {*LETTERS}:
        return float(answer[0] in references)
    if answer in references:
        return 1.0
    answer = _without(answer, "\n\"'.,?!{}")
    statement = _text_after(answer, ("answer is:", "answer:", "answer is", "option is"))
    if statement is not None:
        return float(statement.startswith(tuple(references)))
    return float(next((word in references for word in answer.split() if word in LETTERS), False))


def first_digits(answer: str, references: Sequence[str]) -> float:
    """1 if the first digits in an answer are the right ones (InfiniteBench, passkeys and strings of digits)."""
    match = re.search("[0-9]+", answer)
    return float(match is not None and match[0] == references[0])


def first_number(answer: str, references: Sequence[str]) -> float:
    """1 if the first number in an answer is right; for an integer, digits after the point are ignored (Math.Find)."""
    match = re.search(r"([0-9]+)(\.[0-9]+)?", answer)
    if match is None:
        return 0.0
    return float(
        float(match[0]) == float(references[0]) if "." in references[0] else _same_integer(match[1], references[0])
    )


def says(answer: str, references: Sequence[str]) -> float:
    """1 if an answer contains the right answer verbatim (SCBench, retrieval of strings)."""
    return float(references[0] in answer)


def cloze_exact(answer: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """Share of the masks that an answer fills in correctly, as a Python or JSON object of texts by mask (LooGLE).

    Args:
        references: the right text of each mask.
        choices: the names of the masks.
    """
    answers = _dict_literal(answer)
    pairs = zip(choices, references, strict=True)
    return sum(answers.get(mask) == reference for mask, reference in pairs) / len(references)


def cloze_partial(answer: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """Share of the masks that an answer fills in with at least one of the right words (LooGLE)."""
    answers = _dict_literal(answer)
    pairs = [(str(answers.get(mask, "")), words) for mask, words in zip(choices, references, strict=True)]
    return sum(bool({*filling.split()} & {*words.split()}) for filling, words in pairs) / len(references)


def _dict_literal(answer: str) -> dict[Any, Any]:
    """Parse an answer as a dictionary literal; empty if it is not one."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about invalid Python
            value = ast.literal_eval(answer.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _same_integer(one: str, other: str) -> bool:
    """Whether two integers are equal, as texts, because an answer may have more digits than Python converts."""
    signs = (text.startswith("-") for text in (one, other))
    return len({*signs}) == 1 and one.lstrip("-0") == other.lstrip("-0")


def _without(answer: str, characters: str) -> str:
    """Replace some characters of a text by spaces, and several spaces by one."""
    return re.sub(" +", " ", answer.translate(dict.fromkeys(map(ord, characters), " ")))


def _text_after(answer: str, phrases: Sequence[str]) -> str | None:
    """The text after the first phrase that it contains, and a space; None if it contains none of the phrases."""
    phrase = next((phrase for phrase in phrases if phrase in answer), None)
    return None if phrase is None else answer.partition(phrase)[2][1:]
