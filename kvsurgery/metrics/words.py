"""Word metrics of answers: exact match, F1, ROUGE, and the words that benchmarks look for; from 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from itertools import product

ARTICLE = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
FULL_WIDTH = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"
    "–—‘’‛“”„‟…‧﹏"
)
NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + FULL_WIDTH)


def exact_match(answer: str, reference: str) -> float:
    """1 if an answer equals the right one, without case, punctuation, articles and space, as in SQuAD."""
    return float(_qa_words(answer) == _qa_words(reference))


def first_words(answer: str, reference: str) -> float:
    """1 if an answer begins with the words of `reference`, without case; later words are ignored."""
    answer_words = re.findall(r"\w+", answer.lower())
    reference_words = re.findall(r"\w+", reference.lower())
    return float(answer_words[: len(reference_words)] == reference_words)


def qa_f1(answer: str, reference: str) -> float:
    """Word F1 of an answer, 0 to 1, as in SQuAD: without case, punctuation and articles."""
    return _f1(_qa_words(answer), _qa_words(reference))


def rouge1_recall(answer: str, reference: str) -> float:
    """Share of the words of `reference` that are in `answer` (ROUGE-1 recall, Lin 2004), without case; no stemming."""
    answer_words = Counter(re.findall(r"\w+", answer.lower()))
    reference_words = Counter(re.findall(r"\w+", reference.lower()))
    return (answer_words & reference_words).total() / max(1, reference_words.total())


def rouge_l_recall(answer: str, reference: str) -> float:
    """ROUGE-L recall, as LooGLE computes it with the `rouge` package.

    In this package, a sentence ends with a period, words are separated by spaces, and each word counts once. The recall
    is the share of the distinct words of `reference` that are in a longest common subsequence of two sentences.
    """
    return len(_common_words(answer, reference)) / max(1, len(_distinct_words(reference)))


def distinct_word_recall(answer: str, reference: str) -> float:
    """ROUGE-1 recall, as LooGLE computes it with the `rouge` package: the share of distinct words that are found."""
    reference_words = _distinct_words(reference)
    return len(_distinct_words(answer) & reference_words) / max(1, len(reference_words))


def rouge_l_sum(answer: str, reference: str) -> float:
    """ROUGE-L F1 of summaries with one sentence per line, as InfiniteBench computes it with `rouge-score`.

    For each line of `reference`, the words count that are in its longest common subsequence with a line of `answer`,
    but no word counts more often than it occurs in both texts.
    """
    answer_lines = [re.findall("[a-z0-9]+", line.lower()) for line in answer.split("\n")]
    reference_lines = [re.findall("[a-z0-9]+", line.lower()) for line in reference.split("\n")]
    left_in_answer = Counter(word for line in answer_lines for word in line)
    left_in_reference = Counter(word for line in reference_lines for word in line)
    total, common = left_in_answer.total() + left_in_reference.total(), 0
    for line in reference_lines:
        for place in sorted(set().union(*(_common_places(line, other) for other in answer_lines))):
            word = line[place]
            if left_in_answer[word] and left_in_reference[word]:
                left_in_answer[word] -= 1
                left_in_reference[word] -= 1
                common += 1
    return 2 * common / max(1, total)


def character_f1_zh(answer: str, reference: str) -> float:
    """F1 of the characters of Chinese, without case, punctuation and space (InfiniteBench)."""
    answer = "".join(answer.lower().translate(NO_CHINESE_PUNCTUATION).split())
    reference = "".join(reference.lower().translate(NO_CHINESE_PUNCTUATION).split())
    return _f1([*answer], [*reference])


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """Share of the right answers that an answer contains, without case (RULER)."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """1 if an answer contains one of the right answers, without case (RULER)."""
    return float(any(reference.lower() in answer.lower() for reference in references))


def _qa_words(text: str) -> list[str]:
    return ARTICLE.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()


def _f1(answer: list[str], reference: list[str]) -> float:
    common = (Counter(answer) & Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference)) if common else 0.0


def _sentences(text: str) -> list[list[str]]:
    """The sentences between periods as lists of words, as in the `rouge` package."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _distinct_words(text: str) -> set[str]:
    """The words of `_sentences`, each once."""
    return set().union(*_sentences(text))


def _common_places(one: list[str], other: list[str]) -> set[int]:
    """The places in `one` of its longest common subsequence with `other`; ties as in `rouge-score`."""
    # of the first i and the first j words
    longest = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one):
        for j, other_word in enumerate(other):
            longest[i + 1][j + 1] = (
                longest[i][j] + 1 if word == other_word else max(longest[i][j + 1], longest[i + 1][j])
            )
    places = set()
    i = len(one)
    j = len(other)
    while i and j:
        if one[i - 1] == other[j - 1]:
            places.add(i - 1)
            i, j = i - 1, j - 1
        elif longest[i][j - 1] > longest[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return places


def _common_words(answer: str, reference: str) -> set[str]:
    """The words in the longest common subsequences of two sentences; ties as in `rouge`, which swaps the two texts."""
    pairs = product(_sentences(answer), _sentences(reference))
    return {one[place] for one, other in pairs for place in _common_places(one, other)}
