"""Metrics that read one letter, number or word out of an answer, as LongBench v2 and InfiniteBench do: 0 or 1."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import Any

LETTERS = "ABCD"


def stated_letter(said: str, answers: Sequence[str]) -> float:
    """1 if "The correct answer is" is followed by the right letter, in parentheses or without (LongBench v2)."""
    said = said.replace("*", "")
    found = (re.search(rf"The correct answer is {form}", said) for form in (r"\(([A-D])\)", "([A-D])"))
    return float(next((match[1] for match in found if match), None) in answers)


def chosen_option(said: str, answers: Sequence[str]) -> float:
    """1 if an answer begins with the right letter or names it where answers do (InfiniteBench, questions on books).

    Args:
        answers: the option's text and its letter.
    """
    said = said.strip()
    if said[:1] in {*LETTERS}:
        return float(said[0] in answers)
    if said in answers:
        return 1.0
    said = _without(said, "\n\"'.,?!{}")
    after = _after(said, ("answer is:", "answer:", "answer is", "option is"))
    if after is not None:
        return float(after.startswith(tuple(answers)))
    return float(next((word in answers for word in said.split() if word in LETTERS), False))


def broken_function(said: str, answers: Sequence[str]) -> float:
    """1 if an answer begins with the right letter, or states it or the function's name (InfiniteBench, Code.Debug).

    Args:
        answers: the function's name and its letter.
    """
    said, (_, letter) = said.strip(), answers
    if said[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    said = _without(re.sub("[Oo]ption", " ", said), "\n`'\"-*")
    after = _after(said, ("answer is:", "is:", "answer:", "correct option is:"))
    return float(after is not None and after.startswith(tuple(answers)))


def first_digits(said: str, answers: Sequence[str]) -> float:
    """1 if the first digits said are the right ones (InfiniteBench, passkeys and strings of digits)."""
    found = re.search("[0-9]+", said)
    return float(found is not None and found[0] == answers[0])


def first_number(said: str, answers: Sequence[str]) -> float:
    """1 if the first number said is the right one; of an integer only what is before the point counts (Math.Find)."""
    found = re.search(r"([0-9]+)(\.[0-9]+)?", said)
    if found is None:
        return 0.0
    return float(float(found[0]) == float(answers[0]) if "." in answers[0] else _same(found[1], answers[0]))


def last_number(said: str, answers: Sequence[str]) -> float:
    """1 if the last word said is the right integer (InfiniteBench, Code.Run)."""
    words = _without(said, "\n.`'\":").split()
    stated = re.fullmatch("[+-]?[0-9]+", words[-1]) if words else None
    return float(stated is not None and _same(stated[0].removeprefix("+"), answers[0]))


def number_prefix(said: str, answers: Sequence[str]) -> float:
    """Share of the numbers that are right before the first wrong one, signs aside (InfiniteBench, Math.Calc)."""
    right = 0
    for found, number in zip(re.findall("[0-9]+", said), answers, strict=False):
        if not _same(found, number):
            break
        right += 1
    return right / len(answers)


def says(said: str, answers: Sequence[str]) -> float:
    """1 if the right answer is said somewhere, as it stands (SCBench, retrieval of strings)."""
    return float(answers[0] in said)


def among_words(said: str, answers: Sequence[str]) -> float:
    """1 if the right answer is among the words said (InfiniteBench, Retrieve.KV)."""
    return float(answers[0] in _words(said))


def among_names(said: str, answers: Sequence[str]) -> float:
    """1 if the first of several names is among the words said, in capitals (InfiniteBench, dialogues)."""
    return float(answers[0] in _words(said.upper()))


def cloze_exact(said: str, answers: Sequence[str], choices: Sequence[str]) -> float:
    """Share of the masks that an answer fills in right, as a Python or JSON object of texts by mask (LooGLE).

    Args:
        answers: what belongs in each mask.
        choices: how the masks are called.
    """
    filled = _object(said)
    return sum(filled.get(mask) == right for mask, right in zip(choices, answers, strict=True)) / len(answers)


def cloze_partial(said: str, answers: Sequence[str], choices: Sequence[str]) -> float:
    """Share of the masks that an answer fills in with at least one of the right words (LooGLE)."""
    filled = _object(said)
    pairs = zip(choices, answers, strict=True)
    return sum(bool({*str(filled.get(mask, "")).split()} & {*right.split()}) for mask, right in pairs) / len(answers)


def _object(said: str) -> dict[Any, Any]:
    """What an answer says as a literal of a dictionary; an empty one if it is none."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of what is almost Python
            found = ast.literal_eval(said.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _same(one: str, other: str) -> bool:
    """Whether two integers are equal; texts, since what is said may have more digits than Python converts."""
    signs = (text.startswith("-") for text in (one, other))
    return len({*signs}) == 1 and one.lstrip("-0") == other.lstrip("-0")


def _words(said: str) -> list[str]:
    return _without(said, "\n:\"'.,?!{}").split()


def _without(said: str, characters: str) -> str:
    """A text with spaces in place of some characters, and one space for several."""
    return re.sub(" +", " ", said.translate(dict.fromkeys(map(ord, characters), " ")))


def _after(said: str, phrases: Sequence[str]) -> str | None:
    """What follows the first of some phrases that is in a text, and a space; None: none is."""
    phrase = next((phrase for phrase in phrases if phrase in said), None)
    return None if phrase is None else said.partition(phrase)[2][1:]
