"""Questions and documents for RULER's qa_1 and qa_2, from files as SQuAD and HotpotQA publish them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvsurgery.errors import TextError
from kvsurgery.evaluate.rows import read_json


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
        answers: any of which is right.
        documents: that answer it, by their place.
        near: others of the same article.
    """

    question: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """Questions, and all documents there are."""

    entries: tuple[Question, ...]
    documents: tuple[str, ...]


def read_squad(path: str) -> Questions:
    """Questions of a file like SQuAD's, with paragraphs as documents; those that have no answer are left out.

    Raises:
        TextError: it cannot be read, or is no such file.
    """
    documents, questions = _Documents(), []
    try:
        for article in read_json(path)["data"]:
            places = [documents.place(paragraph["context"]) for paragraph in article["paragraphs"]]
            for place, paragraph in zip(places, article["paragraphs"], strict=True):
                near = tuple(dict.fromkeys(other for other in places if other != place))
                for entry in paragraph["qas"]:
                    if not entry.get("is_impossible", False):
                        answers = tuple(dict.fromkeys(_text(answer["text"]) for answer in entry["answers"]))
                        questions.append(Question(_text(entry["question"]), answers, (place,), near))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TextError(f"{path} is not in SQuAD's layout: {_reason(error)}") from error
    return _questions(path, questions, documents)


def read_hotpot(path: str) -> Questions:
    """Questions of a file like HotpotQA's, with its titled passages as documents.

    Raises:
        TextError: it cannot be read, or is no such file.
    """
    documents, questions = _Documents(), []
    try:
        for entry in read_json(path):
            passages = [f"{_text(title)}\n{''.join(sentences)}" for title, sentences in entry["context"]]
            places = tuple(dict.fromkeys(map(documents.place, passages)))
            questions.append(Question(_text(entry["question"]), (_text(entry["answer"]),), places))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TextError(f"{path} is not in HotpotQA's layout: {_reason(error)}") from error
    return _questions(path, questions, documents)


class _Documents:
    """Different texts, by place."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def place(self, text: Any) -> int:
        return self.places.setdefault(_text(text), len(self.places))


def _questions(path: str, questions: Sequence[Question], documents: _Documents) -> Questions:
    answered_questions = tuple(entry for entry in questions if entry.answers)
    if not answered_questions:
        raise TextError(f"{path} holds no questions with an answer")
    return Questions(answered_questions, tuple(documents.places))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"a text is empty, or is {type(value).__name__}")
    return value


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
