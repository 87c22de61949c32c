"""How right an answer is: metrics of answers, 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def qa_f1(said: str, right: str) -> float:
    """Word F1 of an answer, 0 to 1, as LongBench and SQuAD count: without case, punctuation and articles."""
    said_words, right_words = _qa_words(said), _qa_words(right)
    common = (said_words & right_words).total()
    return 2 * common / (said_words.total() + right_words.total()) if common else 0.0


def rouge1_recall(said: str, right: str) -> float:
    """Share of the words of `right` that are in `said` (ROUGE-1 recall, Lin 2004), without case; no stemming."""
    said_words, right_words = (Counter(re.findall(r"\w+", text.lower())) for text in (said, right))
    return (said_words & right_words).total() / max(1, right_words.total())


def _qa_words(text: str) -> Counter[str]:
    return Counter(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())
