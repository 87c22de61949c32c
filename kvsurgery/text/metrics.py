"""How right an answer is: metrics of answers, 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import wraps
from itertools import product

from kvsurgery.errors import KVSurgeryError
from kvsurgery.text import answer_parsing, image_answers
from kvsurgery.text.code_metrics import edit_similarity, lines_match
from kvsurgery.text.functions import repeated_function

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
FULL_WIDTH = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"
    "–—‘’‛“”„‟…‧﹏"
)
CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + FULL_WIDTH)


def exact_match(said: str, right: str) -> float:
    """1 if an answer is the right one but for case, punctuation, articles and space, as SQuAD counts."""
    return float(_qa_words(said) == _qa_words(right))


def qa_f1(said: str, right: str) -> float:
    """Word F1 of an answer, 0 to 1, as LongBench and SQuAD count: without case, punctuation and articles."""
    return _f1(_qa_words(said), _qa_words(right))


def qa_f1_zh(said: str, right: str) -> float:
    """`qa_f1` of Chinese, in the words that jieba finds; articles count."""
    return _f1(_qa_words_zh(said), _qa_words_zh(right))


def rouge1_recall(said: str, right: str) -> float:
    """Share of the words of `right` that are in `said` (ROUGE-1 recall, Lin 2004), without case; no stemming."""
    said_words, right_words = (Counter(re.findall(r"\w+", text.lower())) for text in (said, right))
    return (said_words & right_words).total() / max(1, right_words.total())


def rouge_l(said: str, right: str) -> float:
    """ROUGE-L F1 of summaries (Lin 2004, section 3.2), as LongBench counts with the `rouge` package.

    There a sentence ends with a period, words are what is between spaces, and each counts once: of the different words
    of either text, those that are in the longest common subsequence of some two sentences.
    """
    common = _common_words(said, right)
    return 2 * len(common) / (len(_distinct_words(said)) + len(_distinct_words(right))) if common else 0.0


def rouge_l_recall(said: str, right: str) -> float:
    """ROUGE-L recall, as LooGLE counts with the `rouge` package: the words of `rouge_l`, of those of `right`."""
    return len(_common_words(said, right)) / max(1, len(_distinct_words(right)))


def rouge_1_recall(said: str, right: str) -> float:
    """ROUGE-1 recall, as LooGLE counts with the `rouge` package: of the different words of `right`, those said."""
    right_words = _distinct_words(right)
    return len(_distinct_words(said) & right_words) / max(1, len(right_words))


def rouge_l_zh(said: str, right: str) -> float:
    """`rouge_l` of Chinese, in the words that jieba finds."""
    return rouge_l(" ".join(chinese_words(said)), " ".join(chinese_words(right)))


def rouge_l_sum(said: str, right: str) -> float:
    """ROUGE-L F1 of summaries, whose sentences are lines, as InfiniteBench counts with the `rouge-score` package.

    Of each line of `right`, the words that are in its longest common subsequence with some line of `said` count, but
    no word more often than both texts have it.
    """
    said_lines, right_lines = (
        [re.findall("[a-z0-9]+", line.lower()) for line in text.split("\n")] for text in (said, right)
    )
    left_said, left_right = (Counter(word for line in lines for word in line) for lines in (said_lines, right_lines))
    total, common = left_said.total() + left_right.total(), 0
    for line in right_lines:
        for place in sorted(set().union(*(_common_places(line, other) for other in said_lines))):
            word = line[place]
            if left_said[word] and left_right[word]:
                left_said[word] -= 1
                left_right[word] -= 1
                common += 1
    return 2 * common / max(1, total)


def character_f1_zh(said: str, right: str) -> float:
    """F1 of the characters of Chinese, without case, punctuation and space (InfiniteBench)."""
    said, right = ("".join(text.lower().translate(CHINESE_PUNCTUATION).split()) for text in (said, right))
    return _f1([*said], [*right])


def code_similarity(said: str, right: str) -> float:
    """How alike a line of code is, in steps of 0.01 (LongBench): of the first line without backticks or a comment."""
    lines = said.lstrip("\n").split("\n")
    line = next((line for line in lines if not re.search("`|#|//", line)), "")
    return round(100 * SequenceMatcher(None, line, right).ratio()) / 100


def number_share(said: str, right: str) -> float:
    """Share of the numbers said that are the one in `right`: LongBench's count and retrieval scores."""
    numbers = re.findall(r"\d+", said)
    return sum([number] == re.findall(r"\d+", right)[:1] for number in numbers) / max(1, len(numbers))


def classification(said: str, answers: Sequence[str], choices: Sequence[str]) -> float:
    """1 / the classes that the first line names if the right one is among them (LongBench).

    A class that is a part of the right one's name is not counted.

    Args:
        answers: right classes; the best counts.
        choices: all classes.
    """
    named = [choice for choice in choices if choice in _first_line(said)]
    shares = (1 / sum(right == name or name not in right for name in named) for right in answers if right in named)
    return max(shares, default=0.0)


def string_match_all(said: str, answers: Sequence[str]) -> float:
    """Share of the answers that are said somewhere, without case (RULER)."""
    return sum(answer.lower() in said.lower() for answer in answers) / len(answers)


def string_match_part(said: str, answers: Sequence[str]) -> float:
    """1 if one of the answers is said somewhere, without case (RULER)."""
    return float(any(answer.lower() in said.lower() for answer in answers))


def babilong(said: str, answers: Sequence[str], choices: Sequence[str]) -> float:
    """1 if the first sentence names the answers and none of the other labels, without case (BABILong).

    A label in another word counts, as it does there.

    Args:
        answers: the right labels, all of which must be named.
        choices: all labels that the question does not name.
    """
    sentence = re.split(r"\.|<context>|<example>", said.lower())[0]
    return float({choice for choice in choices if choice in sentence} == {*answers})


def chinese_words(text: str) -> list[str]:
    """Words of Chinese text.

    Raises:
        KVSurgeryError: jieba is not installed.
    """
    try:
        import jieba
    except ImportError as error:
        raise KVSurgeryError("answers in Chinese need jieba: pip install 'kvsurgery[eval]'") from error
    jieba.setLogLevel("WARNING")
    return jieba.lcut(text)


def _qa_words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def _qa_words_zh(text: str) -> list[str]:
    words = ("".join(word.lower().translate(CHINESE_PUNCTUATION).split()) for word in chinese_words(text))
    return [word for word in words if word]


def _f1(said: list[str], right: list[str]) -> float:
    common = (Counter(said) & Counter(right)).total()
    return 2 * common / (len(said) + len(right)) if common else 0.0


def _sentences(text: str) -> list[list[str]]:
    """Words between spaces of what is between periods, as the `rouge` package has them."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _distinct_words(text: str) -> set[str]:
    """The words of `_sentences`, each once."""
    return set().union(*_sentences(text))


def _common_places(one: list[str], other: list[str]) -> set[int]:
    """Where in `one` the longest common subsequence with `other` is; of several the one that `rouge-score` finds."""
    # of the first i and the first j words
    longest = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one):
        for j, against in enumerate(other):
            longest[i + 1][j + 1] = longest[i][j] + 1 if word == against else max(longest[i][j + 1], longest[i + 1][j])
    found, i, j = set(), len(one), len(other)
    while i and j:
        if one[i - 1] == other[j - 1]:
            found.add(i - 1)
            i, j = i - 1, j - 1
        elif longest[i][j - 1] > longest[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return found


def _common_words(said: str, right: str) -> set[str]:
    """The words in the longest common subsequence of some two sentences; of several the one that `rouge` finds, which
    takes the texts the other way round."""
    pairs = product(_sentences(said), _sentences(right))
    return {one[place] for one, other in pairs for place in _common_places(one, other)}


def _first_line(said: str) -> str:
    return said.lstrip("\n").split("\n")[0]


Metric = Callable[[str, Sequence[str], Sequence[str]], float]


def _best(metric: Callable[[str, str], float], *, first_line: bool = False) -> Metric:
    """The best over several answers, any of which is right."""

    def best(said: str, answers: Sequence[str], choices: Sequence[str] = ()) -> float:
        said = _first_line(said) if first_line else said
        return max((metric(said, answer) for answer in answers), default=0.0)

    return best


def _without_choices(metric: Callable[[str, Sequence[str]], float]) -> Metric:
    """A metric that has no use for what there is to choose from."""

    @wraps(metric)
    def measured(said: str, answers: Sequence[str], choices: Sequence[str] = ()) -> float:
        return metric(said, answers)

    return measured


# what is said, what is right, what there is to choose from -> 0 to 1
METRICS: Mapping[str, Metric] = {
    "exact_match": _best(exact_match),
    "qa_f1": _best(qa_f1),
    "qa_f1_first_line": _best(qa_f1, first_line=True),
    "qa_f1_zh": _best(qa_f1_zh),
    "rouge1_recall": _best(rouge1_recall),
    "rouge_l": _best(rouge_l),
    "rouge_l_first_line": _best(rouge_l, first_line=True),
    "rouge_l_zh": _best(rouge_l_zh),
    "classification": classification,
    "code_similarity": _best(code_similarity),
    "number_share": _best(number_share),
    "string_match_all": _without_choices(string_match_all),
    "string_match_part": _without_choices(string_match_part),
    "babilong": babilong,
    "stated_letter": _without_choices(answer_parsing.stated_letter),
    "chosen_option": _without_choices(answer_parsing.chosen_option),
    "broken_function": _without_choices(answer_parsing.broken_function),
    "first_digits": _without_choices(answer_parsing.first_digits),
    "first_number": _without_choices(answer_parsing.first_number),
    "last_number": _without_choices(answer_parsing.last_number),
    "number_prefix": _without_choices(answer_parsing.number_prefix),
    "says": _without_choices(answer_parsing.says),
    "among_words": _without_choices(answer_parsing.among_words),
    "among_names": _without_choices(answer_parsing.among_names),
    "option_index": _without_choices(image_answers.option_index),
    "counts_in_place": _without_choices(image_answers.counts_in_place),
    "vqa_words": _without_choices(image_answers.vqa_words),
    "lines_match": _best(lines_match),
    "edit_similarity": _best(edit_similarity),
    "repeated_function": repeated_function,
    "cloze_exact": answer_parsing.cloze_exact,
    "cloze_partial": answer_parsing.cloze_partial,
    "rouge_1_recall": _best(rouge_1_recall),
    "rouge_l_recall": _best(rouge_l_recall),
    "rouge_l_sum": _best(rouge_l_sum),
    "character_f1_zh": _best(character_f1_zh),
}
