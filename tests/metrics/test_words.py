"""Whether an answer is right: by hand, and as the packages that benchmarks count with, where they are at hand."""

import random
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.errors import KVSurgeryError
from kvsurgery.metrics.registry import METRICS
from kvsurgery.metrics.words import code_similarity, qa_f1, qa_f1_zh, rouge1_recall, rouge_l, rouge_l_zh

CLASSES = ("Entity", "Other entity", "Number", "Date of a number", "Number of something")
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen")
COUNTS = ("none", "one", "two", "three")


@pytest.fixture
def jieba(monkeypatch):
    """A stand-in for jieba, to which every character is a word."""
    monkeypatch.setitem(sys.modules, "jieba", SimpleNamespace(lcut=list, setLogLevel=lambda level: None))


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
        ("qa_f1", "third room", ["kitchen", "a room", "third room"], [], 1),
        # the longest common subsequence is "police the gunman" or "police killed gunman", of 4 words each
        ("rouge_l", "police kill the gunman", ["police killed the gunman"], [], 3 / 4),
        ("rouge_l", "the gunman kill police", ["police killed the gunman"], [], 2 / 4),
        # w1 w2 with one sentence and w1 w3 w5 with the other: 4 of 5 words and of the 8 that are said (Lin 2004)
        ("rouge_l", "w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", ["w1 w2 w3 w4 w5"], [], 2 * 4 / (5 + 8)),
        # a word counts once, however often it is there
        ("rouge_l", "room room room", ["room"], [], 1),
        ("rouge_l", "", ["room"], [], 0),
        ("rouge_l", "...", ["room"], [], 0),
        ("qa_f1_first_line", "\n\nthird room\nQuestion: and then", ["third room"], [], 1),
        ("rouge_l_first_line", "\nthird room\nDialogue: and then", ["third room"], [], 1),
        ("classification", "\nNumber\nQuestion: Entity", ["Number"], CLASSES, 1),
        ("classification", "Entity or Number", ["Number"], CLASSES, 1 / 2),
        ("classification", "Entity", ["Number"], CLASSES, 0),
        # "Number" is there as a part of the right name only, "Entity" is a name of its own
        ("classification", "Number of something", ["Number of something"], CLASSES, 1),
        ("classification", "Other entity, Entity, Number", ["Entity"], CLASSES, 1 / 3),
        ("code_similarity", "\n\nreturn x\nreturn y", ["return x"], [], 1),
        ("code_similarity", "```python\n# a comment\n// another\nreturn x", ["return x"], [], 1),
        # 7 of 8 characters are common: 2 * 7 / 16 is 0.875
        ("code_similarity", "return y", ["return x"], [], 0.88),
        ("code_similarity", "# nothing else", ["return x"], [], 0),
        ("number_share", "Paragraph 12, or 3, or 12", ["Paragraph 12"], [], 2 / 3),
        ("number_share", "段落3", ["段落3"], [], 1),
        ("number_share", "12", ["2"], [], 0),
        ("number_share", "none", ["2"], [], 0),
        ("string_match_all", "It is ABC and def.", ["abc", "DEF", "ghi", "jkl"], [], 1 / 2),
        ("string_match_part", "It is ABC.", ["ghi", "abc"], [], 1),
        ("string_match_part", "It is XYZ.", ["ghi", "abc"], [], 0),
        ("babilong", "Mary is in the Garden. Not in the kitchen.", ["garden"], ROOMS, 1),
        ("babilong", "the garden or the kitchen", ["garden"], ROOMS, 0),
        ("babilong", "kitchen", ["garden"], ROOMS, 0),
        ("babilong", "garden\n<example>\nthe kitchen", ["garden"], ROOMS, 1),
        ("babilong", "milk, apple", ["apple", "milk"], ["apple", "football", "milk", "nothing"], 1),
        ("babilong", "apple", ["apple", "milk"], ["apple", "football", "milk", "nothing"], 0),
        # as the benchmark has it: "none" says "one" too
        ("babilong", "none", ["none"], COUNTS, 0),
    ],
)  # fmt: skip
def test_metrics_by_hand(metric, said, answers, choices, expected):
    assert METRICS[metric](said, answers, choices) == pytest.approx(expected)


@pytest.mark.usefixtures("jieba")
def test_chinese_by_hand():
    # 3 of the 4 characters said are 3 of the 5 right ones; punctuation is none
    assert METRICS["qa_f1_zh"]("今天，很好。", ["今天天气好！"], ()) == pytest.approx(2 * 3 / (4 + 5))
    # 今, 天 and 好 of the 5 and 4 different ones
    assert METRICS["rouge_l_zh"]("今天很好啊", ["今天气好"], ()) == pytest.approx(2 * 3 / (5 + 4))


# the others read a letter, a number or a word out of what is said
PARSING = {f"kvsurgery.metrics.{name}" for name in ("answer_parsing", "functions", "image_answers")}
WHOLE = [name for name, metric in METRICS.items() if metric.__module__ not in PARSING]


@pytest.mark.usefixtures("jieba")
@pytest.mark.parametrize("metric", WHOLE)
@given(said=st.text("ab1. \n", max_size=20), right=st.text("ab1. ", min_size=1, max_size=10))
def test_every_metric_lies_between_0_and_1_and_takes_any_text(metric, said, right):
    assert 0 <= METRICS[metric](said, [right], [right, "a", "b"]) <= 1


@pytest.mark.usefixtures("jieba")
@pytest.mark.parametrize("metric", WHOLE)
def test_the_right_answer_is_right(metric):
    assert METRICS[metric]("paragraph 12", ["paragraph 12"], ["paragraph 12", "other"]) == 1


def test_chinese_needs_jieba(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(KVSurgeryError, match=r"answers in Chinese need jieba: pip install 'kvsurgery\[eval\]'"):
        METRICS["qa_f1_zh"]("a", ["b"], ())


class TestAgainstThePackages:
    """That LongBench counts with."""

    WORDS = ("the", "a", "cat", "Dog", "dog.", "ran", ".", " ", "\n", "New York", "code();", "今天", "天气", "很好。")

    def texts(self, count):
        rng = random.Random(0)
        for _ in range(count):
            yield [" ".join(rng.choices(self.WORDS, k=rng.randrange(size))) or "x" for size in (25, 12)]

    def test_rouge(self):
        package = pytest.importorskip("rouge").Rouge()
        for said, right in self.texts(300):
            try:
                expected = package.get_scores([said], [right], avg=True)["rouge-l"]["f"]
            except ValueError:  # nothing is said but periods
                expected = 0
            assert rouge_l(said, right) == pytest.approx(expected, abs=1e-6)

    def test_code_similarity(self):
        package = pytest.importorskip("fuzzywuzzy.fuzz")
        for said, right in self.texts(300):
            line = said.lstrip("\n").split("\n")[0]
            assert code_similarity(said, right) == package.ratio(line, right) / 100

    def test_jieba(self):
        pytest.importorskip("jieba")
        # 我 来到 北京 清华大学, and 他 来到 清华大学
        assert qa_f1_zh("我来到北京清华大学", "他来到清华大学。") == pytest.approx(2 * 2 / (4 + 3))
        assert rouge_l_zh("我来到北京清华大学", "他来到清华大学") == pytest.approx(2 * 2 / (4 + 3))
