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
        ("first_digits", "The pass key is 71432. Not 5.", ("71432",), 1),
        ("first_digits", "It is 5, or 71432", ("71432",), 0),
        ("first_digits", "none", ("71432",), 0),
        ("first_number", "88.", ("88",), 1),
        ("first_number", "88.5", ("88",), 1),
        ("first_number", "88.5 or 88", ("88.5",), 1),
        ("first_number", "89", ("88.5",), 0),
        ("first_number", "none", ("88",), 0),
    ],
)
def test_what_is_read_out_of_an_answer(metric, said, answers, expected):
    assert METRICS[metric](said, answers, ()) == expected


RIGHT = {
    "chosen_option": (BOOK, ()),
    **dict.fromkeys(["first_digits", "first_number"], (("12",), ())),
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


@pytest.mark.parametrize(
    ("said", "exact", "partial"),
    [
        ('{"<mask-0>": "Mary Smith", "<mask-1>": "Oslo"}', 1, 1),
        ("{'<mask-0>': 'Mary', '<mask-1>': 'Oslo'}", 0.5, 1),
        ("{'<mask-1>': 'Bergen'}", 0, 0),
        ("{'<mask-0>': 3, 4: []}", 0, 0),
        ("Mary Smith, Oslo", 0, 0),
        ("['Oslo']", 0, 0),
        ("(" * 5000, 0, 0),
    ],
)
def test_clozes_are_measured_mask_by_mask(said, exact, partial):
    right = ("Mary Smith", "Oslo"), ("<mask-0>", "<mask-1>")
    assert (answer_parsing.cloze_exact(said, *right), answer_parsing.cloze_partial(said, *right)) == (exact, partial)


@given(st.one_of(st.text("{}'\":ab, ", max_size=30), st.text(max_size=30)))
def test_any_answer_to_a_cloze_is_measured(said):
    for measure in (answer_parsing.cloze_exact, answer_parsing.cloze_partial):
        assert 0 <= measure(said, ("a",), ("b",)) <= 1
