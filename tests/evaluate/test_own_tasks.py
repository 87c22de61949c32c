"""Needles, passkeys, perplexity and cloze: what models are asked, with every kind of tokenizer."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsurgery.errors import TextError
from kvsurgery.evaluate.checkpoint import reader_of
from kvsurgery.evaluate.sample import Reader
from kvsurgery.evaluate.tasks.cloze import ClozeTask
from kvsurgery.evaluate.tasks.needle import NeedleTask
from kvsurgery.evaluate.tasks.passkey import PasskeyTask
from kvsurgery.evaluate.tasks.perplexity import PerplexityTask
from kvsurgery.text import haystack
from kvsurgery.text.needle_sets import read_set
from kvsurgery.text.needles import CHAT_QUESTION, PLAIN_QUESTION
from kvsurgery.text.passkeys import ASKED, HIDDEN, KEY, OPENING, ORDINALS
from kvsurgery.text.tokens import special_ids
from tests.evaluate.recall import MODEL, tasks
from tests.helpers.vocabularies import KINDS, TURN, tokenizer

NEEDLES = read_set("phrase")
KNOWN = [
    *islice(haystack._generated_texts(0), 60),
    *(part for needle in NEEDLES for part in (needle.needle, needle.real_needle, needle.answer)),
    *(form.format(question=needle.question) for needle in NEEDLES for form in (PLAIN_QUESTION, CHAT_QUESTION)),
    *(OPENING, "user", "assistant", " ".join(f"word{number}" for number in range(400))),
    *(f"{HIDDEN} {ASKED}".format(ordinal=ordinal, key=" ") for ordinal in ORDINALS),
]
SPELLINGS = {(kind, chat): tokenizer(kind, KNOWN, size=1500, chat=chat) for kind in KINDS for chat in (False, True)}
SPELLING_IDS = [f"{kind}-{'chat' if chat else 'plain'}" for kind, chat in SPELLINGS]


def reader(spelling, seed=0):
    return Reader(spelling, max_context=4096, vocabulary=len(spelling), seed=seed)


def decode(spelling, tokens):
    return spelling.decode(tokens, clean_up_tokenization_spaces=False)


def words(text):
    return re.findall(r"\w+", text)


def place_of(part, tokens):
    """Where a sequence is in another, once."""
    places = [start for start in range(len(tokens)) if np.array_equal(tokens[start : start + len(part)], part)]
    assert len(places) == 1
    return places[0]


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLING_IDS)
class TestNeedle:
    def test_every_needle_is_at_its_depth_and_asked_for_at_the_end(self, spelling):
        asked = list(NeedleTask((400, 300), (0.0, 0.4, 1.0), needles="phrase").samples(reader(spelling)))
        assert len(asked) == len(NEEDLES) * 6
        assert len({sample.key for sample in asked}) == len(asked)
        for sample in asked:
            length, depth, number = sample.name.split("/")
            needle, text = NEEDLES[int(number)], decode(spelling, sample.tokens)
            assert len(sample.tokens) == int(length) == sample.facts["tokens"]
            assert sample.answers == (needle.answer,)
            before, _, after = text.partition(needle.needle)
            assert needle.question in after[-250:]
            share = len(before) / (len(before) + len(after))
            assert share == pytest.approx(float(depth), abs=0.35)
            assert text.strip().endswith("assistant" if spelling.chat_template else "Answer:")

    def test_the_first_ones_are_of_the_whole_grid(self, spelling):
        first = [
            sample.facts
            for sample in islice(NeedleTask((300, 400), (0.0, 1.0), needles="phrase").samples(reader(spelling)), 4)
        ]
        assert first == [{"tokens": tokens, "depth": depth} for tokens in (300, 400) for depth in (0.0, 1.0)]


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLING_IDS)
class TestPasskey:
    def test_passkeys_stand_in_the_text_once_and_are_asked_for_in_turn(self, spelling):
        asked = list(PasskeyTask((500, 420), count=3, size=8, prompts=2).samples(reader(spelling)))
        assert len(asked) == 3 * 2 * 2
        special = special_ids(spelling)
        for number, sample in enumerate(asked):
            assert len(sample.tokens) == int(sample.name.split("/")[0])
            assert len(sample.answer_tokens) == sample.limit == 8
            assert not np.isin(sample.answer_tokens, special).any()
            start = place_of(sample.answer_tokens, sample.tokens)
            ordinal = ORDINALS[number % 3]
            assert (
                decode(spelling, sample.tokens[:start])
                .strip()
                .endswith(HIDDEN.format(ordinal=ordinal, key=KEY).partition(KEY)[0].strip())
            )
            end = decode(spelling, sample.tokens)
            assert end.endswith(f"The {ordinal} passkey is:")
            question = f"What is the {ordinal} passkey?"
            assert question in end
            if spelling.chat_template:
                turns = "".join(end.split())
                assert turns.startswith(f"<s>{TURN}user")
                assert f"</s>{TURN}assistant" in turns.partition("".join(question.split()))[2]

    def test_the_samples_of_a_prompt_share_its_text(self, spelling):
        one, other = islice(PasskeyTask((420,), count=2, size=8).samples(reader(spelling)), 2)
        same = (one.tokens[:300] == other.tokens[:300]).all()
        assert same
        assert not np.array_equal(one.tokens, other.tokens)


class TestOwnWords:
    def test_a_cue_is_the_first_token_and_the_others_are_asked_for(self, language):
        spelling = reader_of(MODEL).tokenizer
        for sample in tasks(language)["passkey"].samples(reader_of(MODEL)):
            text = decode(spelling, sample.tokens).split()
            right = decode(spelling, sample.answer_tokens).split()
            assert len(right) == 3
            assert text[-2] == "recall"
            told = text.index(text[-1])
            assert text[told - 1 : told + 5] == ["remember", text[-1], *right, "."]
            assert text[0] == "<bos>"

    def test_without_words_the_passkey_is_its_own_question(self, language):
        bare = {"count": 2, "size": 5, "prompts": 1, "text": str(language / "text.txt")}
        for sample in PasskeyTask((60,), **bare).samples(reader_of(MODEL)):
            start = place_of(sample.answer_tokens, sample.tokens)
            assert sample.tokens[start - 1] == sample.tokens[-1]
            assert len(sample.answer_tokens) == 4

    def test_passkeys_are_of_tokens_that_the_text_does_not_have(self, language):
        spelling = reader_of(MODEL).tokenizer
        text = set((language / "text.txt").read_text().split())
        for sample in tasks(language)["passkey"].samples(reader_of(MODEL)):
            assert not text & set(decode(spelling, sample.answer_tokens).split())


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLING_IDS)
def test_pieces_for_perplexity_end_alike_and_begin_as_texts_do(spelling):
    asked = list(PerplexityTask((90, 200, 120), continuation=30, pieces=3).samples(reader(spelling)))
    assert [sample.name for sample in asked[:3]] == ["90/0", "200/0", "120/0"]
    for one, two, three in zip(asked[::3], asked[1::3], asked[2::3], strict=True):
        assert (len(one.tokens), len(two.tokens), len(three.tokens)) == (90, 200, 120)
        assert {one.continuation, two.continuation, three.continuation} == {30}
        assert one.tokens[0] == two.tokens[0] == spelling.bos_token_id
        assert np.array_equal(one.tokens[1:], two.tokens[-89:])
        assert np.array_equal(one.tokens[1:], three.tokens[-89:])
    assert not np.array_equal(asked[0].tokens, asked[3].tokens)


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLING_IDS)
def test_passages_end_before_a_word_that_they_hold(spelling):
    asked = list(ClozeTask((120, 60), 3).samples(reader(spelling)))
    whole = " ".join(words(decode(spelling, haystack.Haystack.read(None, spelling, 8 * (120 + 256)).tokens)))
    assert [sample.name for sample in asked] == ["120/0", "60/0", "120/1", "60/1", "120/2", "60/2"]
    for longer, shorter in zip(asked[::2], asked[1::2], strict=True):
        assert (len(longer.tokens), len(shorter.tokens)) == (120, 60)
        assert longer.tokens[0] == shorter.tokens[0] == spelling.bos_token_id
        assert np.array_equal(shorter.tokens[1:], longer.tokens[-59:])
        assert longer.answers == shorter.answers
        [word] = shorter.answers
        assert re.search(rf"\b{word}\b", decode(spelling, shorter.tokens), re.IGNORECASE)
        assert " ".join([*words(decode(spelling, shorter.tokens[-8:]))[-4:], word]) in whole


@settings(max_examples=12)
@given(
    st.sampled_from(
        [
            NeedleTask((300,), (0.5,), needles="phrase"),
            PasskeyTask((420,), 2, 4),
            PerplexityTask((99,), 9),
            ClozeTask((99,), 3),
        ]
    ),
    st.integers(0, 9),
)
def test_samples_follow_the_seed(task, seed):
    spelling = SPELLINGS["bytes", False]

    def first(seed):
        return next(iter(task.samples(reader(spelling, seed))))

    assert np.array_equal(first(seed).tokens, first(seed).tokens)
    assert not np.array_equal(first(seed).tokens, first(seed + 1).tokens)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (
            NeedleTask((40,), needles="phrase"),
            r"a prompt of 40 tokens has no room for text around a needle .*; give longer `lengths`",
        ),
        (NeedleTask((400,), (1.5,), needles="phrase"), r"`depths` must lie in \[0, 1\], got 1.5"),
        (PasskeyTask((60,), 3, 8), r"3 passkeys of 8 tokens take \d+ tokens more than a prompt of 60 has"),
        (PasskeyTask((600,), 40), "a prompt has 1 to 20 passkeys of 2 tokens or more"),
        (PasskeyTask((600,), 3, 1), "a prompt has 1 to 20 passkeys of 2 tokens or more"),
        (PasskeyTask((600,), hidden="no place"), "`hidden` must contain {key} once"),
        (PasskeyTask((600,), asked="{cue} first?"), "`asked` must end with {cue}"),
        (PerplexityTask((64,), 64), "measures the last 64 tokens of a piece, and 64 tokens leave none before them"),
        (PerplexityTask((64,), 0), "perplexity takes 1 token or more"),
        (ClozeTask((64,), 0), "there must be 1 passage or more, got 0"),
        (ClozeTask((64, 0)), "a passage takes 2 tokens or more, got 0; give longer `lengths`"),
        (ClozeTask((64, 2)), "a passage takes 3 tokens or more, got 2; give longer `lengths`"),
    ],
)
def test_what_cannot_be_asked_is_refused(task, says):
    with pytest.raises(TextError, match=says):
        list(task.samples(reader(SPELLINGS["bytes", False])))


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (NeedleTask((400,), needles="phrase"), r"does not know all words of .* \(`needles`\)"),
        (PasskeyTask((400,)), r"generated text is unknown to the tokenizer; .* \(`text`\)"),
        (PasskeyTask((400,), hidden="a {key}"), r"does not know all words of 'a'; .* \(`hidden`"),
        (PerplexityTask((400,)), r"generated text is unknown to the tokenizer; .* \(`text`\)"),
    ],
)
def test_a_small_vocabulary_is_told_which_option_helps(task, says):
    with pytest.raises(TextError, match=says):
        list(task.samples(reader_of(MODEL)))


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(TextError, match=r"empty.txt has 0 tokens, 400 are needed"):
        list(PerplexityTask((400,), text=str(tmp_path / "empty.txt")).samples(reader(SPELLINGS["bytes", False])))


def test_a_text_that_repeats_no_word_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("the baker carried a lantern " * 400)
    with pytest.raises(TextError, match=r"no sentence of text.txt ends with a word that stands in the 59 tokens"):
        list(ClozeTask((60,), text=str(tmp_path / "text.txt")).samples(reader(SPELLINGS["bytes", False])))


class TestSomeSamples:
    """A number of samples limits each length, and what is left is spread over needles, depths and passkeys."""

    @pytest.mark.parametrize("count", [1, 3, 7, 12, 19])
    def test_needles(self, count):
        depths = (0.0, 0.2, 0.5, 0.8, 1.0)
        whole = NeedleTask((300, 400), depths, needles="phrase")
        asked = list(replace(whole, count=count).samples(reader(SPELLINGS["bytes", False])))
        assert len({sample.name for sample in asked}) == len(asked) == 2 * count
        for length in (300, 400):
            places = [sample.name.split("/") for sample in asked if sample.facts["tokens"] == length]
            assert len(places) == count
            assert len({depth for _, depth, _ in places}) == min(count, len(depths))
            assert len({needle for _, _, needle in places}) == min(count, 10)
        # each is one of all
        by_name = {sample.name: sample for sample in whole.samples(reader(SPELLINGS["bytes", False]))}
        for sample in asked:
            assert sample.tokens.tolist() == by_name[sample.name].tokens.tolist()

    @pytest.mark.parametrize(("questions", "places"), [(1, [[1]]), (2, [[0, 2]]), (5, [[0, 1, 2], [0, 2]])])
    def test_passkeys(self, questions, places):
        task = PasskeyTask((500, 420), count=3, size=8, questions=questions)
        names = [sample.name for sample in task.samples(reader(SPELLINGS["bytes", False]))]
        assert {*names} == {
            f"{length}/{number}/{place}"
            for length in (500, 420)
            for number, asked in enumerate(places)
            for place in asked
        }
        assert len(names) == 2 * questions
