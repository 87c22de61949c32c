"""The needles of retrieval scores are chosen by a trial, of the method's kind."""

import json

import pytest

from kvsurgery.errors import KVSurgeryError, TextError
from kvsurgery.measure import needle_trial
from kvsurgery.measure.model import MeasuredModel
from kvsurgery.measure.needle_trial import choose_needles
from kvsurgery.measure.retrieval import Trials, retrieval_scores
from kvsurgery.text.haystack import Haystack
from tests.evaluate.recall import write_language
from tests.helpers.tiny_recall import FOLDER


@pytest.fixture(scope="module")
def tiny():
    return MeasuredModel.load(str(FOLDER / "model"))


@pytest.fixture(scope="module")
def haystack(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    write_language(folder)
    return Haystack.read(str(folder / "text.txt"), tiny.text, 2000)


@pytest.mark.parametrize(
    ("method", "answered", "chosen"),
    [
        ("headkv-r", ["fact", "word", "choice"], "fact"),
        ("headkv-er", ["word"], "word"),
        ("headkv-r2", ["phrase", "word", "choice"], "choice"),
        ("headkv-r2", ["reasoning", "choice"], "reasoning"),
    ],
)
def test_the_hardest_answered_set_of_the_kind_at_the_shortest_length(tiny, haystack, sets, method, answered, chosen):
    sets(*answered)
    steps = []
    choice = choose_needles(tiny, haystack, method, Trials((200, 120)), progress=lambda *step: steps.append(step))
    assert (choice.name, choice.right[chosen], choice.tokens, choice.model) == (chosen, 8, 120, "original")
    assert {(0, None, f"trying needles: {chosen}, {number} of 8") for number in range(1, 9)} <= {*steps}
    made = retrieval_scores(tiny, haystack, choice, Trials((120,), (0.4,)), method=method)
    assert made.provenance["needle_choice"]["name"] == chosen
    assert json.loads(json.dumps(made.provenance)) == made.provenance


def test_reasoning_scores_do_not_fall_back_to_needles_without_a_reason(tiny, haystack, sets):
    sets("phrase", "fact", "word")
    with pytest.raises(TextError, match=r"reasoning needles .* reasoning 0, choice 0\).*use `method` headkv-er"):
        choose_needles(tiny, haystack, "headkv-r2", Trials((120,)))


def test_every_length_is_checked_before_the_trial(tiny, haystack, sets, monkeypatch):
    sets("word")
    monkeypatch.setattr(needle_trial, "answer", lambda *_, **__: pytest.fail("it began"))
    with pytest.raises(KVSurgeryError, match="beyond the 4096"):
        choose_needles(tiny, haystack, "headkv-r", Trials((120, 5000)))


@pytest.mark.parametrize("method", ["headkv-r", "headkv-er", "headkv-r2"])
def test_shipped_needles_are_unknown_to_the_bundled_model(tiny, haystack, method):
    with pytest.raises(TextError, match="the tokenizer does not know all words of"):
        choose_needles(tiny, haystack, method, Trials((200,)))
