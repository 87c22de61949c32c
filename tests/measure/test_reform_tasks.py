"""What embedding heads are ranked by: the facts that are needed lie where the samples say, in the words they should."""

import re

import numpy as np
import pytest

from kvsurgery.errors import ProfileError, TextError
from kvsurgery.measure.reform import embedding_ranking
from kvsurgery.measure.reform_tasks import (
    LINKS,
    PAIRS,
    TRAITS,
    RankedPrompt,
    ranked_prompts,
)
from kvsurgery.profile.embedding_heads import RANKING_TASKS
from kvsurgery.text.haystack import Haystack
from tests.helpers.families import stock
from tests.helpers.measured_models import measured_model
from tests.helpers.vocabularies import tokenizer

LETTERS = "The value corresponding to the id 0123456789 is ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz ,.?:\n"
TEXT = "The ferry was late, and nobody knew why. An old man counted the lamps on the quay. "
FACT = re.compile(r"The value corresponding to the id (\w{10}) is (\w{10})\.")
TOKENIZERS = [("bytes", False), ("bytes", True), ("metaspace", False), ("metaspace", True)]


@pytest.fixture(scope="module", params=TOKENIZERS, ids=lambda value: value[0] + " chat" * value[1])
def vocabulary(request):
    kind, chat = request.param
    return tokenizer(kind, [LETTERS, TEXT], size=300, chat=chat)


@pytest.fixture(scope="module")
def haystack(vocabulary):
    return Haystack(np.array(vocabulary(TEXT * 200, add_special_tokens=False)["input_ids"]), "ferry")


def spelt(vocabulary, sample, part):
    return vocabulary.decode(sample.tokens[part.start : part.stop], clean_up_tokenization_spaces=False).strip()


def test_the_gold_sentence_pairs_what_is_asked_for(vocabulary, haystack):
    made = ranked_prompts("pattern", vocabulary, haystack, count=4, length=1500, seed=0)
    answers = []
    for sample in made:
        [gold] = sample.gold
        [key, value] = FACT.fullmatch(spelt(vocabulary, sample, gold)).groups()
        assert spelt(vocabulary, sample, sample.question) == f"What is the value corresponding to the id {key}?"
        pairs = dict(FACT.findall(spelt(vocabulary, sample, sample.context)))
        assert len(pairs) == PAIRS
        assert pairs[key] == value
        answers.append(value)
    assert len(set(answers)) == 4


def test_both_facts_are_gold_and_the_question_names_neither_end(vocabulary, haystack):
    for sample in ranked_prompts("multihop", vocabulary, haystack, count=6, length=1500, seed=1):
        context, question = (spelt(vocabulary, sample, part) for part in (sample.context, sample.question))
        told = [spelt(vocabulary, sample, part) for part in sample.gold]
        [(link, who)] = [
            (re.fullmatch(_pattern(link), fact), who) for link, who in LINKS for fact in told if _matches(link, fact)
        ]
        [(trait, ask)] = [
            (re.fullmatch(_pattern(trait), fact), ask)
            for trait, ask, _ in TRAITS
            for fact in told
            if _matches(trait, fact)
        ]
        assert link["b"] == trait["b"]
        assert question == ask.format(who=who.format(a=link["a"]))
        assert link["b"] not in question
        assert trait["c"] not in question
        assert context.count(link["a"]) == 1
        assert context.count(link["b"]) == 2


def _pattern(fact):
    return re.sub(r"\\{([abc])\\}", r"(?P<\1>.+)", re.escape(fact))


def _matches(pattern, fact):
    return re.fullmatch(_pattern(pattern), fact) is not None


@pytest.mark.parametrize("task", RANKING_TASKS)
class TestEveryTask:
    def test_it_is_text_of_the_length_asked_for(self, task, vocabulary, haystack):
        for sample in ranked_prompts(task, vocabulary, haystack, count=2, length=1500, seed=2):
            assert isinstance(sample, RankedPrompt)
            assert sample.tokens.shape == (1500,)
            inside = sample.tokens[sample.context.start : sample.context.stop]
            assert not np.isin(inside, vocabulary.all_special_ids).any()
            around = spelt(vocabulary, sample, sample.context)
            for part in sample.gold:
                # after a whole sentence, before another
                assert re.search(r"\.\s+" + re.escape(spelt(vocabulary, sample, part)) + r"\s+[A-Z]", around)
            assert sample.tokens[0] == vocabulary.bos_token_id
            assert (sample.context.start > 1) == (vocabulary.chat_template is not None)

    def test_a_seed_gives_the_same_and_fewer_are_the_first_of_more(self, task, vocabulary, haystack):
        many, few, other = (
            ranked_prompts(task, vocabulary, haystack, count=count, length=1500, seed=seed)
            for count, seed in ((3, 0), (2, 0), (2, 1))
        )
        for one, two in zip(many, few, strict=False):
            np.testing.assert_array_equal(one.tokens, two.tokens)
            assert (one.context, one.question, one.gold) == (two.context, two.question, two.gold)
        assert not np.array_equal(few[0].tokens, other[0].tokens)
        assert not np.array_equal(many[0].tokens, many[1].tokens)

    def test_facts_that_do_not_fit(self, task, vocabulary, haystack):
        with pytest.raises(ProfileError, match=r"8 facts and a question take \d+ tokens of 100; give more context"):
            ranked_prompts(task, vocabulary, haystack, count=1, length=100, seed=0)

    def test_a_text_that_is_too_short(self, task, vocabulary):
        short = Haystack(np.array(vocabulary(TEXT)["input_ids"]), "ferry")
        with pytest.raises(TextError, match=r"ferry has \d+ tokens, \d+ are needed"):
            ranked_prompts(task, vocabulary, short, count=1, length=1500, seed=0)

    def test_words_that_the_tokenizer_does_not_know(self, task, haystack):
        words = tokenizer("words", [TEXT])
        with pytest.raises(ProfileError, match=r"does not know all words of .*; this task needs one that spells any"):
            ranked_prompts(task, words, haystack, count=1, length=1500, seed=0)


def test_tasks_differ_for_one_seed(vocabulary, haystack):
    one, other = (ranked_prompts(task, vocabulary, haystack, count=1, length=1500, seed=0)[0] for task in RANKING_TASKS)
    assert not np.array_equal(one.tokens[:100], other.tokens[:100])


def test_a_random_model_is_ranked_on_both(vocabulary, haystack):
    model = stock("qwen2", vocab_size=400, num_hidden_layers=3, max_position_embeddings=2000)
    samples = {task: ranked_prompts(task, vocabulary, haystack, count=1, length=1500, seed=0) for task in RANKING_TASKS}
    made = embedding_ranking(measured_model(model, vocabulary), samples)
    assert len(made.embedding_heads) == 4
