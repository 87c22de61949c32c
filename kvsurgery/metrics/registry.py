"""`METRICS`: the metrics of answers, by the names in samples, results and pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps

from kvsurgery.metrics import answer_parsing, code, image_answers, words
from kvsurgery.metrics.functions import repeated_function

Metric = Callable[[str, Sequence[str], Sequence[str]], float]


def _best(metric: Callable[[str, str], float]) -> Metric:
    """Turn a metric into the best score over several right answers."""

    def best(answer: str, references: Sequence[str], choices: Sequence[str] = ()) -> float:
        return max((metric(answer, reference) for reference in references), default=0.0)

    return best


def _without_choices(metric: Callable[[str, Sequence[str]], float]) -> Metric:
    """Turn a metric without choices into one that ignores them."""

    @wraps(metric)
    def wrapper(answer: str, references: Sequence[str], choices: Sequence[str] = ()) -> float:
        return metric(answer, references)

    return wrapper


# an answer, the references, what there is to choose from -> 0 to 1
METRICS: Mapping[str, Metric] = {
    "exact_match": _best(words.exact_match),
    "first_words": _best(words.first_words),
    "rouge1_recall": _best(words.rouge1_recall),
    "string_match_all": _without_choices(words.string_match_all),
    "string_match_part": _without_choices(words.string_match_part),
    "chosen_option": _without_choices(answer_parsing.chosen_option),
    "first_digits": _without_choices(answer_parsing.first_digits),
    "first_number": _without_choices(answer_parsing.first_number),
    "says": _without_choices(answer_parsing.says),
    "option_index": _without_choices(image_answers.option_index),
    "counts_in_place": _without_choices(image_answers.counts_in_place),
    "vqa_words": _without_choices(image_answers.vqa_words),
    "lines_match": _best(code.lines_match),
    "edit_similarity": _best(code.edit_similarity),
    "repeated_function": repeated_function,
    "rouge_l_sum": _best(words.rouge_l_sum),
    "character_f1_zh": _best(words.character_f1_zh),
}
