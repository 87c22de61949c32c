"""`METRICS`: what measures an answer, by the name that samples, results and pages have for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps

from kvsurgery.metrics import answer_parsing, code, image_answers, words
from kvsurgery.metrics.functions import repeated_function

Metric = Callable[[str, Sequence[str], Sequence[str]], float]


def _best(metric: Callable[[str, str], float], *, first_line: bool = False) -> Metric:
    """The best over several answers, any of which is right."""

    def best(answer: str, references: Sequence[str], choices: Sequence[str] = ()) -> float:
        answer = words.first_line(answer) if first_line else answer
        return max((metric(answer, reference) for reference in references), default=0.0)

    return best


def _without_choices(metric: Callable[[str, Sequence[str]], float]) -> Metric:
    """A metric that has no use for what there is to choose from."""

    @wraps(metric)
    def wrapper(answer: str, references: Sequence[str], choices: Sequence[str] = ()) -> float:
        return metric(answer, references)

    return wrapper


# an answer, the references, what there is to choose from -> 0 to 1
METRICS: Mapping[str, Metric] = {
    "exact_match": _best(words.exact_match),
    "first_words": _best(words.first_words),
    "qa_f1": _best(words.qa_f1),
    "qa_f1_first_line": _best(words.qa_f1, first_line=True),
    "qa_f1_zh": _best(words.qa_f1_zh),
    "rouge1_recall": _best(words.rouge1_recall),
    "rouge_l": _best(words.rouge_l),
    "rouge_l_first_line": _best(words.rouge_l, first_line=True),
    "rouge_l_zh": _best(words.rouge_l_zh),
    "classification": words.classification,
    "code_similarity": _best(words.code_similarity),
    "number_share": _best(words.number_share),
    "string_match_all": _without_choices(words.string_match_all),
    "string_match_part": _without_choices(words.string_match_part),
    "babilong": words.babilong,
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
    "lines_match": _best(code.lines_match),
    "edit_similarity": _best(code.edit_similarity),
    "repeated_function": repeated_function,
    "cloze_exact": answer_parsing.cloze_exact,
    "cloze_partial": answer_parsing.cloze_partial,
    "distinct_word_recall": _best(words.distinct_word_recall),
    "rouge_l_recall": _best(words.rouge_l_recall),
    "rouge_l_sum": _best(words.rouge_l_sum),
    "character_f1_zh": _best(words.character_f1_zh),
}
