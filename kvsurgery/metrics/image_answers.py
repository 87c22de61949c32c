"""Metrics of answers to questions about images and text, as in MM-NIAH, from 0 to 1."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain

ARTICLES = {"a", "an", "the"}
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
DIGITS = {word: str(value) for value, word in enumerate(NUMBERS.split())}
DIGITS |= {word: str(10 * value) for value, word in enumerate(TENS.split(), 2)}
# words with an apostrophe, which may be left out
WITH_APOSTROPHE = (
    "ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd how'll how's "
    "isn't it'd it'll ma'am mightn't might've mustn't must've needn't o'clock oughtn't shan't should've shouldn't "
    "that'd that's there'd there're there's they'd they'll they're they've wasn't we'd we've weren't what'll "
    "what're what's what've when's where'd where's where've who'd who'll who's who've why'll why're why's won't "
    "would've wouldn't y'all you'd you'll you're you've"
)
CONTRACTIONS = {word.replace("'", ""): word for word in WITH_APOSTROPHE.split()}
# the two answers of MM-NIAH's video frames, which models give in words
CAMERA = {"the camera is moving left": "a", "the camera is moving right": "b"}


def option_index(answer: str, references: Sequence[str]) -> float:
    """1 if an answer, up to a period, is the letter of the right option or its index from 0.

    Args:
        references: the index of the right option.
    """
    answer = answer.strip(".")
    if answer.isdecimal():
        return float(answer.lstrip("0") == references[0].lstrip("0"))
    answer = answer.lower().replace("the answer is", "").replace("*", "")
    if "." in answer:
        answer = answer.split(".")[0].replace(",", "")
    answer = next((letter for phrase, letter in CAMERA.items() if phrase in answer), answer.strip())
    return float(answer == chr(ord("a") + int(references[0])))


def counts_in_place(answer: str, references: Sequence[str]) -> float:
    """Share of the numbers in the right place of a JSON list (soft accuracy); the lists of an object are joined.

    Args:
        references: the right numbers.
    """
    try:
        counts = json.loads(answer.strip(".").replace("json", "").replace("```", "").strip())
    except (ValueError, RecursionError):
        return 0.0
    if isinstance(counts, dict) and all(isinstance(value, list) for value in counts.values()):
        counts = [*chain.from_iterable(counts.values())]
    if not isinstance(counts, list):
        return 0.0
    return sum(count == int(reference) for count, reference in zip(counts, references, strict=False)) / len(references)


def vqa_words(answer: str, references: Sequence[str]) -> float:
    """1 if an answer has the right words, as VQA spells them: without case, articles and punctuation, digits for words.

    Contractions count with and without their apostrophe.
    """
    return float(re.search(rf"\b{re.escape(_vqa(references[0]))}\b", _vqa(answer.strip("."))) is not None)


def _vqa(text: str) -> str:
    text = re.sub(r"[\n\t]", " ", text).strip()
    in_number, spelling = re.search(r"\d,\d", text), text
    for mark in PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        spelling = spelling.replace(mark, "" if beside_space or in_number else " ")
    words = re.sub(r"\.(?!\d)", "", spelling).lower().split()
    words = (DIGITS.get(word, word) for word in words if word not in ARTICLES)
    return " ".join(CONTRACTIONS.get(word, word) for word in words)
