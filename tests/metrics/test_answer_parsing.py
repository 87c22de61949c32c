"""Letters, numbers and words that are read out of answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.metrics import answer_parsing
from kvsurgery.metrics.registry import METRICS

BOOK = ("the green house", "B")


@pytest.mark.parametrize(
    ("metric", "said", "answers", "expected"),
    [
        ("chosen_option", "B. the green house", BOOK, 1),
        ("chosen_option", "A", BOOK, 0),
        ("chosen_option", "the green house", BOOK, 1),
        ("chosen_option", "I think the answer is: B", BOOK, 1),
        ("chosen_option", "I think the answer is the green house", BOOK, 1),
        ("chosen_option", "the answer is", BOOK, 0),
        ("chosen_option", "It must be B or C", BOOK, 1),
        ("chosen_option", "It must be C or B", BOOK, 0),
        ("chosen_option", "", BOOK, 0),
        ("broken_function", "B. parse", ("parse", "B"), 1),
        ("broken_function", "The function with the error is: `parse`", ("parse", "B"), 1),
        ("broken_function", "The correct option is: C", ("parse", "B"), 0),
        ("broken_function", "B", ("parse", "B"), 0),
        ("first_digits", "The pass key is 71432. Not 5.", ("71432",), 1),
        ("first_digits", "It is 5, or 71432", ("71432",), 0),
        ("first_digits", "none", ("71432",), 0),
        ("first_number", "88.", ("88",), 1),
        ("first_number", "88.5", ("88",), 1),
        ("first_number", "88.5 or 88", ("88.5",), 1),
        ("first_number", "89", ("88.5",), 0),
        ("first_number", "none", ("88",), 0),
        ("last_number", "func_1(3) is 7, so it returns -4.", ("-4",), 1),
        ("last_number", "-4 it is", ("-4",), 0),
        ("last_number", "", ("-4",), 0),
        ("number_prefix", "[1, 4, 9]", ("1", "4", "8", "2"), 0.5),
        ("number_prefix", "1 4 8 2 7", ("1", "4", "8", "2"), 1),
        ("number_prefix", "4", ("1", "4"), 0),
        ("number_prefix", "", ("1",), 0),
        ("among_words", 'The value is "ab-1".', ("ab-1",), 1),
        ("among_words", "ab-12", ("ab-1",), 0),
        ("among_names", "It is Ace, I guess", ("ACE", "ACE ROTHSTEIN"), 1),
        ("among_names", "Rothstein", ("ACE", "ACE ROTHSTEIN"), 0),
    ],
)
def test_what_is_read_out_of_an_answer(metric, said, answers, expected):
    assert METRICS[metric](said, answers, ()) == expected


RIGHT = {
    **dict.fromkeys(["chosen_option", "broken_function"], (BOOK, ())),
    **dict.fromkeys(["first_digits", "first_number", "last_number", "number_prefix"], (("12",), ())),
    **dict.fromkeys(["cloze_exact", "cloze_partial"], (("a",), ("b",))),
}


@pytest.mark.parametrize("metric", [name for name in METRICS if METRICS[name].__module__ == answer_parsing.__name__])
@given(said=st.one_of(st.text("AB: is.12-{}'", max_size=30), st.text(max_size=30)), times=st.sampled_from([1, 9999]))
def test_any_answer_is_measured(metric, said, times):
    assert 0 <= METRICS[metric](said * times, *RIGHT.get(metric, (("A",), ()))) <= 1


@pytest.mark.parametrize(
    ("said", "right", "expected"),
    [
        ("a b c", "a b c", 1),
        ("A, b!\nC", "a b c", 1),
        ("c b a", "a b c", 1 / 3),
        # words of either line count, but none twice
        ("a b\nc d", "a b c d", 1),
        ("a b\na b", "a b", 2 * 2 / 6),
        ("", "a b", 0),
        ("é", "é", 0),
    ],
)
def test_rouge_of_summaries(said, right, expected):
    assert METRICS["rouge_l_sum"](said, [right], ()) == pytest.approx(expected)


@given(st.text("ab \n", max_size=30), st.text("ab \n", max_size=30))
def test_rouge_of_summaries_is_that_of_the_package(said, right):
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeLsum"])
    expected = scorer.score(right, said)["rougeLsum"].fmeasure
    assert METRICS["rouge_l_sum"](said, [right], ()) == pytest.approx(expected)


def test_chinese_is_measured_by_characters():
    assert METRICS["character_f1_zh"]("田归农。", ["田 归农", "别人"], ()) == 1
    assert METRICS["character_f1_zh"]("农", ["田归农"], ()) == pytest.approx(2 * 1 / 4)
