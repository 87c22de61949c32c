"""The needle sets that ship, and which of them a trial chooses."""

import re
from pathlib import Path

import pytest

from kvsurgery.errors import TextError
from kvsurgery.metrics.words import qa_f1
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.needle_sets import FOLDER, SETS, TRIALS, NeedleChoice, choose_set, read_set, trial_places
from tests.helpers.vocabularies import tokenizer

NAMES = [name for names in SETS.values() for name in names]
ALL = [needle for name in NAMES for needle in read_set(name)]


class TestShipped:
    def test_every_file_is_a_set(self):
        assert {path.stem for path in FOLDER.iterdir()} == set(NAMES)

    @pytest.mark.parametrize("kind", SETS)
    def test_each_has_a_needle_of_its_kind_for_every_trial(self, kind):
        for name in SETS[kind]:
            needles = read_set(name)
            assert {needle.kind for needle in needles} == {kind}
            assert len(needles) >= 10 >= TRIALS

    def test_the_answer_is_in_the_needle_only(self):
        spelt = tokenizer("bytes", ["The lamp was out."])
        haystack = spelt.decode(Haystack.read(None, spelt, 50_000).tokens)
        for needle in ALL:
            assert qa_f1(needle.real_needle, needle.answer) == 1
            assert qa_f1(needle.question, needle.answer) <= 0.5
            assert not re.search(rf"\b{re.escape(needle.answer)}\b", needle.cue)
            others = [other for other in ALL if other is not needle]
            assert not any(needle.question == other.question for other in others)
            assert not any(re.search(rf"\b{re.escape(needle.real_needle)}\b", other.needle) for other in others)
            assert not re.search(rf"\b{re.escape(needle.real_needle)}\b", haystack)

    @pytest.mark.parametrize("name", ["word", "choice"])
    def test_the_easiest_set_of_a_kind_asks_for_one_word_after_a_cue(self, name):
        for needle in read_set(name):
            assert re.fullmatch(r"[A-Za-z]+", needle.answer)
            assert needle.cue
        assert name in {names[-1] for names in SETS.values()}

    @pytest.mark.parametrize("name", SETS["reasoning"])
    def test_a_reason_and_answers_to_choose_from(self, name):
        for needle in read_set(name):
            sentences = re.findall(r"[^.]+\.", needle.needle)
            [choice] = [sentence for sentence in sentences if needle.real_needle in sentence]
            assert len(sentences) >= 2
            assert re.search(r"\b(or|and)\b", choice)

    def test_a_file_of_a_set_name_is_read_by_its_path(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("word").write_bytes((FOLDER / "fact.jsonl").read_bytes())
        assert read_set("word") == read_set(str(FOLDER / "word.jsonl"))
        assert read_set("./word") == read_set("fact")


class TestChoice:
    @pytest.mark.parametrize(
        ("right", "chosen", "tried"),
        [
            ({"phrase": 8}, "phrase", ["phrase"]),
            ({"phrase": 4}, "phrase", ["phrase"]),
            ({"phrase": 3, "fact": 4}, "fact", ["phrase", "fact"]),
            ({"phrase": 0, "fact": 3, "word": 8}, "word", ["phrase", "fact", "word"]),
        ],
    )
    def test_the_hardest_set_with_at_least_half_of_its_trials_right(self, right, chosen, tried):
        choice = choose_set("retrieval", right.__getitem__, 512, "or not")
        assert choice == NeedleChoice(chosen, right, 8, 512, "original")
        assert [*choice.right] == tried

    def test_what_is_said(self):
        right = {"phrase": 1, "fact": 6}
        assert str(choose_set("retrieval", right.__getitem__, 1024, "")) == (
            "needles: fact, the hardest set of which the original model answers at least half at 1,024 tokens "
            "(phrase 1 of 8, fact 6 of 8)"
        )
        said = str(choose_set("retrieval", right.__getitem__, 1024, "", "converted"))
        assert "the converted model answers" in said
        assert said.endswith("; the original was not available for this choice")

    @pytest.mark.parametrize(
        ("kind", "counts", "easiest"),
        [("retrieval", "phrase 3, fact 3, word 3", "word"), ("reasoning", "reasoning 3, choice 3", "choice")],
    )
    def test_no_set_says_what_to_do(self, kind, counts, easiest):
        with pytest.raises(TextError) as raised:
            choose_set(kind, lambda name: 3, 512, "or do without")
        assert str(raised.value) == (
            f"the original model answers no set of {kind} needles in at least half of 8 trials at 512 tokens (right: "
            f"{counts}); give shorter `lengths`, another `text`, needles of your own (a file as `needles`), or "
            f"{easiest} in any case (`needles` {easiest}); or do without"
        )

    @pytest.mark.parametrize("depths", [(0.0, 0.5, 1.0), (0.3,), tuple(range(40))])
    def test_trials_go_from_the_first_depth_to_the_last(self, depths):
        numbers, places = zip(*trial_places(depths), strict=True)
        assert numbers == tuple(range(TRIALS))
        assert sorted(places) == [*places]
        assert (places[0], places[-1]) == (depths[0], depths[-1])
        assert set(places) == set(depths) or len(depths) > TRIALS
