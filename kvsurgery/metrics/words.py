"""Metrics of answers by their words: exact match, F1, ROUGE, and the words that benchmarks look for; 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import product

from kvsurgery.errors import KVSurgeryError

ARTICLE = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
FULL_WIDTH = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"
    "–—‘’‛“”„‟…‧﹏"
)
NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + FULL_WIDTH)


def exact_match(answer: str, reference: str) -> float:
    """1 if an answer is the right one but for case, punctuation, articles and space, as SQuAD counts."""
    return float(_qa_words(answer) == _qa_words(reference))


def first_words(answer: str, reference: str) -> float:
    """1 if an answer begins with the words of `reference`, without case; what follows them does not count."""
    answer_words, reference_words = (re.findall(r"\w+", text.lower()) for text in (answer, reference))
    return float(answer_words[: len(reference_words)] == reference_words)


def qa_f1(answer: str, reference: str) -> float:
    """Word F1 of an answer, 0 to 1, as LongBench and SQuAD count: without case, punctuation and articles."""
    return _f1(_qa_words(answer), _qa_words(reference))


def qa_f1_zh(answer: str, reference: str) -> float:
    """`qa_f1` of Chinese, in the words that jieba finds; articles count."""
    return _f1(_qa_words_zh(answer), _qa_words_zh(reference))


def rouge1_recall(answer: str, reference: str) -> float:
    """Share of the words of `reference` that are in `answer` (ROUGE-1 recall, Lin 2004), without case; no stemming."""
    answer_words, reference_words = (Counter(re.findall(r"\w+", text.lower())) for text in (answer, reference))
    return (answer_words & reference_words).total() / max(1, reference_words.total())


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L F1 of summaries (Lin 2004, section 3.2), as LongBench counts with the `rouge` package.

    There a sentence ends with a period, words are what is between spaces, and each counts once: of the different words
    of either text, those that are in the longest common subsequence of some two sentences.
    """
    common = _common_words(answer, reference)
    return 2 * len(common) / (len(_distinct_words(answer)) + len(_distinct_words(reference))) if common else 0.0


def rouge_l_recall(answer: str, reference: str) -> float:
    """ROUGE-L recall, as LooGLE counts with the `rouge` package: the words of `rouge_l`, of those of `reference`."""
    return len(_common_words(answer, reference)) / max(1, len(_distinct_words(reference)))


def distinct_word_recall(answer: str, reference: str) -> float:
    """ROUGE-1 recall, as LooGLE counts with the `rouge` package: of the different words of `reference`, those said."""
    reference_words = _distinct_words(reference)
    return len(_distinct_words(answer) & reference_words) / max(1, len(reference_words))


def rouge_l_zh(answer: str, reference: str) -> float:
    """`rouge_l` of Chinese, in the words that jieba finds."""
    return rouge_l(" ".join(chinese_words(answer)), " ".join(chinese_words(reference)))


def rouge_l_sum(answer: str, reference: str) -> float:
    """ROUGE-L F1 of summaries, whose sentences are lines, as InfiniteBench counts with the `rouge-score` package.

    Of each line of `reference`, the words that are in its longest common subsequence with some line of `answer` count,
    but no word more often than both texts have it.
    """
    answer_lines, reference_lines = (
        [re.findall("[a-z0-9]+", line.lower()) for line in text.split("\n")] for text in (answer, reference)
    )
    left_in_answer, left_in_reference = (
        Counter(word for line in lines for word in line) for lines in (answer_lines, reference_lines)
    )
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
    answer, reference = (
        "".join(text.lower().translate(NO_CHINESE_PUNCTUATION).split()) for text in (answer, reference)
    )
    return _f1([*answer], [*reference])


def code_similarity(answer: str, reference: str) -> float:
    """How alike a line of code is, in steps of 0.01 (LongBench): of the first line without backticks or a comment."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not re.search("`|#|//", line)), "")
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


def number_share(answer: str, reference: str) -> float:
    """Share of the numbers said that are the one in `reference`: LongBench's count and retrieval scores."""
    numbers = re.findall(r"\d+", answer)
    return sum([number] == re.findall(r"\d+", reference)[:1] for number in numbers) / max(1, len(numbers))


def classification(answer: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """1 / the classes that the first line names if the right one is among them (LongBench).

    A class that is a part of the right one's name is not counted.

    Args:
        references: right classes; the best counts.
        choices: all classes.
    """
    named_classes = [choice for choice in choices if choice in first_line(answer)]
    right_classes = [reference for reference in references if reference in named_classes]
    shares = (
        1 / sum(reference == name or name not in reference for name in named_classes) for reference in right_classes
    )
    return max(shares, default=0.0)


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """Share of the answers that are said somewhere, without case (RULER)."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """1 if one of the answers is said somewhere, without case (RULER)."""
    return float(any(reference.lower() in answer.lower() for reference in references))


def babilong(answer: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """1 if the first sentence names the answers and none of the other labels, without case (BABILong).

    A label in another word counts, as it does there.

    Args:
        references: the right labels, all of which must be named.
        choices: all labels that the question does not name.
    """
    sentence = re.split(r"\.|<context>|<example>", answer.lower())[0]
    return float({choice for choice in choices if choice in sentence} == {*references})


def require_jieba() -> None:
    """Check that jieba is installed, which finds the words of Chinese text.

    Raises:
        KVSurgeryError: it is not.
    """
    try:
        import jieba  # noqa: F401
    except ImportError as error:
        raise KVSurgeryError("answers in Chinese need jieba: pip install 'kvsurgery[eval]'") from error


def chinese_words(text: str) -> list[str]:
    """Words of Chinese text.

    Raises:
        KVSurgeryError: jieba is not installed.
    """
    require_jieba()
    import jieba

    jieba.setLogLevel("WARNING")
    return jieba.lcut(text)


def _qa_words(text: str) -> list[str]:
    return ARTICLE.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()


def _qa_words_zh(text: str) -> list[str]:
    words = ("".join(word.lower().translate(NO_CHINESE_PUNCTUATION).split()) for word in chinese_words(text))
    return [word for word in words if word]


def _f1(answer: list[str], reference: list[str]) -> float:
    common = (Counter(answer) & Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference)) if common else 0.0


def _sentences(text: str) -> list[list[str]]:
    """Words between spaces of what is between periods, as the `rouge` package has them."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _distinct_words(text: str) -> set[str]:
    """The words of `_sentences`, each once."""
    return set().union(*_sentences(text))


def _common_places(one: list[str], other: list[str]) -> set[int]:
    """Where in `one` the longest common subsequence with `other` is; of several the one that `rouge-score` finds."""
    # of the first i and the first j words
    longest = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one):
        for j, other_word in enumerate(other):
            longest[i + 1][j + 1] = (
                longest[i][j] + 1 if word == other_word else max(longest[i][j + 1], longest[i + 1][j])
            )
    places, i, j = set(), len(one), len(other)
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
    """The words in the longest common subsequence of some two sentences; of several the one that `rouge` finds, which
    takes the texts the other way round."""
    pairs = product(_sentences(answer), _sentences(reference))
    return {one[place] for one, other in pairs for place in _common_places(one, other)}


def first_line(answer: str) -> str:
    """The first line of a text that is not empty."""
    return answer.lstrip("\n").split("\n")[0]
