"""What is shown of cells: means by hand."""

from dataclasses import replace

import pytest

from kvsurgery.evaluate.results import Cell, Interval
from kvsurgery.report.findings import against_original, change, curves, grids, verdict
from kvsurgery.report.headlines import conclusion, tiles
from tests.report.builders import interval, needle, results, task
from tests.report.reading import numbers


def test_a_grid_averages_samples_and_not_cells():
    facts = {"tokens": 100, "depth": 0.5}
    cells = (
        Cell({**facts, "needle": 0}, 3, {"original": 1.0}),
        Cell({**facts, "needle": 1}, 1, {"original": 0.0, "converted": 0.25}),
        Cell({"tokens": 100, "depth": 0.0}, 1, {"converted": 1.0}),
    )
    original, converted = grids(results(tasks=(task("needle", 1, 1, cells=cells),)))
    assert original.scores == {(0.5, 100): 0.75}
    assert converted.scores == {(0.5, 100): 0.25, (0.0, 100): 1.0}
    assert (converted.depths, converted.tokens) == ((0.0, 0.5), (100,))


def test_a_curve_averages_tasks_and_not_samples():
    def cells(count, *scores):
        return tuple(Cell({"tokens": 100 * place}, count, {"original": score}) for place, score in enumerate(scores, 1))

    tasks = (task("ruler/vt", 1, 1, cells=cells(90, 1.0, 0.5)), task("ruler/cwe", 1, 1, cells=cells(10, 0.0)))
    [curve] = curves(results(tasks=tasks))
    assert curve.scores == {"original": {100: 0.5, 200: 0.5}, "converted": {}}
    assert curve.title == "ruler, string_match_all, mean of 2 tasks"


def test_lengths_in_words_keep_their_order():
    cells = tuple(Cell({"length": length}, 1, {"original": 1.0}) for length in ("0k", "4k", "1M"))
    [curve] = curves(results(tasks=(task("babilong/qa1", 1, 1, cells=cells),)))
    assert (curve.fact, curve.lengths) == ("length", ("0k", "4k", "1M"))


def test_what_else_a_task_is_measured_by_is_a_curve_of_its_own():
    cells = tuple(Cell({"tokens": tokens}, 1, {"original": 1.0}) for tokens in (1, 2))
    tasks = [task("qa/one", 1, 1, metric, cells=cells) for metric in ("qa_f1", "exact_match")]
    assert [curve.title for curve in curves(results(tasks=tuple(tasks)))] == ["qa, qa_f1", "qa, exact_match"]


def test_what_has_a_grid_or_a_single_length_has_no_curve():
    single = task("passkey", 1, 1, cells=(Cell({"tokens": 1}, 1, {"original": 1.0}),))
    assert curves(results(tasks=(needle(), single, task("longbench/hotpotqa", 1, 1)))) == ()


@pytest.mark.parametrize(
    ("metric", "low", "high", "found"),
    [
        ("qa_f1", 0.1, 0.2, "better"),
        ("qa_f1", -0.2, -0.1, "worse"),
        ("qa_f1", -0.1, 0.1, "no clear difference"),
        ("qa_f1", 0.0, 0.0, "no clear difference"),
        ("perplexity", 0.1, 0.2, "worse"),
        ("perplexity", -0.2, -0.1, "better"),
        ("perplexity", float("nan"), float("nan"), "no clear difference"),
    ],
)
def test_verdicts(metric, low, high, found):
    difference = Interval((low + high) / 2, low, high)
    assert verdict(replace(task("any", 1, 1, metric), difference=difference)) == found
    assert verdict(replace(task("any", 1, 1, metric, count=8), difference=difference)) == found
    assert verdict(replace(task("any", 1, 1, metric, count=7), difference=difference)) == "too few samples"


def test_no_loss_of_what_the_original_cannot_do_says_nothing():
    assert verdict(task("any", 0, 0, "qa_f1", difference=Interval(0, 0, 0))) == "original scores 0"
    assert verdict(task("any", 0, 0.3, "qa_f1")) == "better"
    vague = [task("few", 0.9, 0.1, count=7), task("hard", 0, 0, difference=Interval(0, 0, 0))]
    found = [*vague, task("clear", 0.9, 0.1), task("alike", 0.9, 0.9)]
    assert [tile.figure for tile in tiles({"surgery": None}, results(tasks=tuple(found)), None)] == ["1 of 2"]
    assert tiles({"surgery": None}, results(tasks=tuple(vague)), None) == []


@pytest.mark.parametrize(
    ("value", "metric", "shown"),
    [
        (1.2345, "perplexity", "+1.234"),
        (-0.012, "perplexity", "−0.012"),
        (-1.7e-7, "perplexity", "+0.000"),
        (0.051, "qa_f1", "+5.1"),
        (-0.0001, "qa_f1", "+0.0"),
    ],
)
def test_differences_have_as_many_decimals_as_scores(value, metric, shown):
    assert change(value, metric) == shown


@pytest.mark.parametrize(
    ("metric", "low", "high", "count", "text"),
    [
        ("qa_f1", -0.2, -0.03, 8, "worse by 11.5 points [3.0, 20.0]"),
        ("qa_f1", 0.01, 0.03, 8, "better by 2.0 points [1.0, 3.0]"),
        ("qa_f1", -0.125, 0.1, 8, "no clear difference [-12.5, +10.0]"),
        ("qa_f1", 0.0, 0.0, 8, "same"),
        ("qa_f1", -0.2, -0.1, 7, "too few samples to tell"),
        ("perplexity", 0.1, 0.3, 8, "worse by 0.200 [0.100, 0.300]"),
        ("perplexity", float("nan"), float("nan"), 8, "not a number"),
    ],
)
def test_a_table_says_how_a_score_compares_with_the_original(metric, low, high, count, text):
    difference = Interval((low + high) / 2, low, high)
    assert against_original(task("any", 1, 1, metric, count=count, difference=difference)) == text


class TestConclusion:
    """Whether a model is still good, in a sentence that its samples bear out."""

    def said(self, *tasks, **changes):
        sizes = {"tokens": 4096, "kv_bytes": 35, "dense_bytes": 100}
        return conclusion(results(tasks=tasks, **sizes | changes))

    def test_still_good(self):
        alike = task("alike", 0.9, 0.9)
        few = task("few", 0.9, 0.1, count=7)
        assert self.said(alike).startswith("Still good: ")
        assert numbers(self.said(alike)) == ["0", "1", "35%"]
        # and one is inconclusive
        assert numbers(self.said(alike, few)) == ["0", "1", "35%", "1"]

    def test_a_loss_is_named(self):
        sentence = self.said(task("alike", 0.9, 0.9), task("lost", 0.9, 0.1), task("less", 0.9, 0.8))
        assert sentence.startswith("Not as good: ")
        assert "lost: " in sentence
        assert numbers(sentence)[:3] == ["2", "3", "80.0"]
        nan = {"original": interval(8), "converted": interval(float("nan"))}
        broken = task("text", 0, 0, "perplexity", scores=nan, difference=interval(float("nan")))
        assert "text: not a number" in self.said(broken)

    def test_a_loss_that_so_few_samples_would_not_show_is_not_called_good(self):
        open_loss = task("needle", 1, 0.9, difference=Interval(-0.1, -0.375, 0))
        assert "37.5" in numbers(self.said(open_loss))
        assert self.said(open_loss).startswith("No clear loss: ")
        assert self.said(task("few", 0.9, 0.1, count=7)).startswith("Cannot tell: ")
        hard = task("hard", 0, 0, difference=Interval(0, 0, 0))
        assert self.said(hard).startswith("Cannot tell: ")

    def test_a_cache_that_is_no_smaller_is_said(self):
        assert "`lengths`" in self.said(task("alike", 0.9, 0.9), kv_bytes=100)
        assert "`lengths`" not in self.said(task("alike", 0.9, 0.9))

    def test_one_model_has_none(self):
        alone = task("alike", 0.9, 0.9, scores={"converted": interval(0.9)}, difference=None)
        assert self.said(alone) == ""
