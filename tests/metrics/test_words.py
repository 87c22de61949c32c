"""Whether an answer is right: by hand, and as the packages that benchmarks count with, where they are at hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.metrics.registry import METRICS
from kvsurgery.metrics.words import distinct_word_recall, qa_f1, rouge1_recall, rouge_l_recall


@pytest.mark.parametrize(
    ("said", "right", "f1", "recall"),
    [
        ("in the third room", "in the third room", 1, 1),
        ("The Third room!", "a third room", 1, 2 / 3),
        ("room", "third room", 2 * (1 * 1 / 2) / (1 + 1 / 2), 1 / 2),
        # 3 of 7 words are right, and all that are asked for
        ("Sir, it is in my third room", "in third room", 2 * (3 / 7 * 1) / (3 / 7 + 1), 1),
        # a word that is said once counts once
        ("room", "room room room", 2 * (1 * 1 / 3) / (1 + 1 / 3), 1 / 3),
        ("room room room", "room", 2 * (1 / 3 * 1) / (1 / 3 + 1), 1),
        ("kitchen", "third room", 0, 0),
        ("", "third room", 0, 0),
        ("the", "the", 0, 1),
        ("well-known", "wellknown", 1, 0),
    ],
)
def test_answers_are_measured_by_hand(said, right, f1, recall):
    assert qa_f1(said, right) == pytest.approx(f1)
    assert rouge1_recall(said, right) == pytest.approx(recall)


@given(st.text("abc .", max_size=30), st.text("abc .", max_size=30))
def test_f1_is_symmetric_and_both_lie_between_0_and_1(said, right):
    assert qa_f1(said, right) == pytest.approx(qa_f1(right, said))
    assert 0 <= qa_f1(said, right) <= 1
    assert 0 <= rouge1_recall(said, right) <= 1


@pytest.mark.parametrize(
    ("metric", "said", "answers", "choices", "expected"),
    [
        ("first_words", " Harbour. The", ["harbour"], [], 1),
        ("first_words", "harbours", ["harbour"], [], 0),
        ("first_words", "the harbour", ["harbour"], [], 0),
        ("first_words", "...", ["harbour"], [], 0),
        ("exact_match", "The Third room!", ["a third room"], [], 1),
        ("exact_match", "room third", ["third room"], [], 0),
        ("exact_match", "yes, the third room", ["kitchen", "third room"], [], 0),
        ("string_match_all", "It is ABC and def.", ["abc", "DEF", "ghi", "jkl"], [], 1 / 2),
        ("string_match_part", "It is ABC.", ["ghi", "abc"], [], 1),
        ("string_match_part", "It is XYZ.", ["ghi", "abc"], [], 0),
    ],
)  # fmt: skip
def test_metrics_by_hand(metric, said, answers, choices, expected):
    assert METRICS[metric](said, answers, choices) == pytest.approx(expected)


# the others read a letter, a number or a word out of what is said
PARSING = {f"kvsurgery.metrics.{name}" for name in ("answer_parsing", "functions", "image_answers")}
WHOLE = [name for name, metric in METRICS.items() if metric.__module__ not in PARSING]


@pytest.mark.parametrize("metric", WHOLE)
@given(said=st.text("ab1. \n", max_size=20), right=st.text("ab1. ", min_size=1, max_size=10))
def test_every_metric_lies_between_0_and_1_and_takes_any_text(metric, said, right):
    assert 0 <= METRICS[metric](said, [right], [right, "a", "b"]) <= 1


@pytest.mark.parametrize("metric", WHOLE)
def test_the_right_answer_is_right(metric):
    assert METRICS[metric]("paragraph 12", ["paragraph 12"], ["paragraph 12", "other"]) == 1


def test_recall_is_that_of_the_package():
    scorer = pytest.importorskip("rouge").Rouge()
    pairs = [("she moved to Oslo. In 1950", "Mary moved to Oslo. That was in 1950 or so"), ("a b a. c", "c a b. a a")]
    for said, right in pairs:
        [expected] = scorer.get_scores(said, right)
        assert distinct_word_recall(said, right) == pytest.approx(expected["rouge-1"]["r"])
        assert rouge_l_recall(said, right) == pytest.approx(expected["rouge-l"]["r"])
