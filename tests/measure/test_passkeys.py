"""Every passkey stands in the text once, is asked for at the end, and nothing special is inside."""

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsurgery.errors import ProfileError, TextError, UnsupportedModel
from kvsurgery.measure.passkeys import Passkeys, most_passkeys
from kvsurgery.measure.prompts import Contexts, Passages
from kvsurgery.text import haystack
from kvsurgery.text.passkeys import ASKED, HIDDEN, KEY, OPENING, ORDINALS
from tests.helpers.families import stock
from tests.helpers.measured_models import measured_model
from tests.helpers.vocabularies import KINDS, tokenizer

WORDS = [*islice(haystack._generated_texts(1), 200), OPENING]
WORDS += [f"{HIDDEN} {ASKED}".format(ordinal=ordinal, key=" ") for ordinal in ORDINALS]


@pytest.fixture(scope="module")
def measured():
    made = tokenizer("bytes", WORDS)
    made.add_tokens(["<added>"])
    return measured_model(stock("llama", vocab_size=len(made) + 7, max_position_embeddings=2048), made)


@pytest.fixture(scope="module")
def passkeys(measured):
    return Passkeys.of(measured, Contexts(700, 1200, seed=3), count=6, size=9)


def runs(mask):
    """[start, stop) of every stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return edges.reshape(-1, 2).tolist()


@settings(max_examples=40)
@given(st.integers(0, 2000), st.integers(0, 8))
def test_every_passkey_is_hidden_once_and_recalled_at_the_end(passkeys, measured, step, place):
    tokens, targets, labels = (part[0].numpy() for part in passkeys(step, place))
    assert len(tokens) == passkeys.contexts.length(step)
    assert 700 <= len(tokens) <= 1200
    assert tokens[0] == measured.tokenizer.bos_token_id
    hidden, recalled = runs((labels > 0) & ~targets), runs(targets)
    assert len(hidden) == len(recalled) == 6
    assert hidden[-1][1] < recalled[0][0]
    for number, (there, here) in enumerate(zip(hidden, recalled, strict=True), 1):
        assert there[1] - there[0] == 9
        assert tokens[slice(*there)].tolist() == tokens[slice(*here)].tolist()
        assert set(labels[slice(*there)]) == set(labels[slice(*here)]) == {number}
        for start, introduction in ((there[0], HIDDEN.partition(KEY)[0]), (here[0], ASKED)):
            words = introduction.format(ordinal=ORDINALS[number - 1])
            assert measured.tokenizer.decode(tokens[max(start - 40, 0) : start]).endswith(words)
    special = {*measured.tokenizer.all_special_ids, *measured.tokenizer.added_tokens_decoder}
    assert not special.intersection(tokens[1:].tolist())
    assert tokens.max() < len(measured.tokenizer)


def test_fixed_seeds_give_fixed_prompts(passkeys, measured):
    again = Passkeys.of(measured, Contexts(700, 1200, seed=3), count=6, size=9)
    other = Passkeys.of(measured, Contexts(700, 1200, seed=4), count=6, size=9)
    assert again.facts == passkeys.facts
    assert other.facts != passkeys.facts
    first = [passkeys(0, 0).tokens.tolist(), passkeys(0, 1).tokens.tolist(), passkeys(1, 0).tokens.tolist()]
    assert first == [again(0, 0).tokens.tolist(), again(0, 1).tokens.tolist(), again(1, 0).tokens.tolist()]
    assert all(one != two for one, two in pairwise(first))
    assert first[0] != other(0, 0).tokens.tolist()


def test_depths_and_lengths_cover_their_range(passkeys):
    lengths, depths = [], []
    for step in range(150):
        prompt = passkeys(step, 0)
        lengths.append(prompt.tokens.shape[1])
        start = (prompt.passkeys[0] > 0).nonzero()[:, 0]
        depths.append(start.numpy()[:54:9] / int(prompt.targets[0].nonzero()[0, 0]))
    for drawn, ends in ((lengths, (700, 1201)), (np.ravel(depths), (0, 1))):
        quarters, _ = np.histogram(drawn, 4, ends)
        assert quarters.min() > len(drawn) / 8


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokenizer(kind):
    made = tokenizer(kind, WORDS)
    measured = measured_model(stock("llama", vocab_size=len(made), max_position_embeddings=4096), made)
    prompt = Passkeys.of(measured, Contexts.of(measured))(0, 0)
    assert 1000 <= prompt.tokens.shape[1] <= 4096
    assert prompt.targets.sum() == 320
    assert len(set(prompt.tokens[prompt.targets].tolist())) > 100


def test_the_shortest_context_that_holds_the_passkeys(measured, passkeys):
    exact = Passkeys.of(measured, Contexts(passkeys.min_tokens, passkeys.min_tokens), count=6, size=9)
    assert exact(0, 0).tokens.shape[1] == passkeys.min_tokens
    with pytest.raises(
        ProfileError, match=f"6 passkeys of 9 tokens take a context of {passkeys.min_tokens} tokens or more"
    ):
        Passkeys.of(measured, Contexts(passkeys.min_tokens - 1, 1000), count=6, size=9)
    assert most_passkeys(measured, 10, 9, passkeys.min_tokens) == 6
    assert most_passkeys(measured, 10, 9, passkeys.min_tokens - 1) == 5
    assert most_passkeys(measured, 4, 9, 2000) == 4
    assert most_passkeys(measured, 4, 900, 100) == 1


@pytest.mark.parametrize(
    ("contexts", "message"),
    [
        ({"longest": 2049}, "2049 tokens exceeds the 2048 positions of random"),
        ({"shortest": 900, "longest": 800}, "from 900 to 800"),
        ({"shortest": 3000}, "from 3000 to 2048"),
        ({"shortest": 0}, "from 0 to 2048"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_contexts_that_cannot_be(measured, contexts, message):
    with pytest.raises(ProfileError, match=message):
        Contexts.of(measured, **contexts)


def test_contexts_reach_to_the_models_maximum(measured):
    assert Contexts.of(measured) == Contexts(1000, 2048)
    long = measured_model(stock("llama", max_position_embeddings=100_000))
    assert Contexts.of(long) == Contexts(1000, 32_000)


@pytest.mark.parametrize("options", [{"count": 0}, {"count": 21}, {"size": 0}])
def test_passkeys_that_cannot_be(measured, options):
    with pytest.raises(ProfileError, match="a prompt has 1 to 20 passkeys of 1 token or more"):
        Passkeys.of(measured, Contexts(1000, 2000), **options)


def test_text_that_is_too_short(measured, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("The baker found two lanterns by the river. " * 20)
    with pytest.raises(TextError, match=r"short.txt has \d+ tokens, 2000 are needed"):
        Passkeys.of(measured, Contexts(1000, 2000), str(text))


def test_words_that_the_model_does_not_know(tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("bako dimi " * 1000)
    measured = measured_model(stock("llama"), tokenizer("words", [text.read_text()]))
    with pytest.raises(
        ProfileError, match=r"does not know all words of 'Passkeys are hidden.*; train the gates of random"
    ):
        Passkeys.of(measured, Contexts(100, 500), str(text), count=1, size=2)


def test_no_tokenizer():
    measured = measured_model(stock("llama"))
    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        Passkeys.of(measured, Contexts(100, 500))


def test_passages_are_pieces_of_the_text(measured):
    contexts = Contexts(300, 400)
    passages = Passages(contexts, contexts.read(None, measured.tokenizer))
    for step in range(5):
        tokens, targets = passages(step, 0)
        assert tokens.shape == targets.shape == (1, contexts.length(step))
        assert targets.all()
        assert measured.tokenizer.decode(tokens[0]) in measured.tokenizer.decode(passages.haystack.tokens)
    assert passages(0, 0)[0].tolist() != passages(0, 1)[0].tolist()
