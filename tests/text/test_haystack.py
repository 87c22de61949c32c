"""Text to hide things in: whatever it is from, tokens that spell text and nothing else, and enough of them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsurgery.errors import TextError
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.tokens import first_tokens, special_ids
from tests.helpers.vocabularies import KINDS, tokenizer

TEXT = "The lamp was out. Nobody came. The lamp stayed out until morning, and then the road was open again. "
WORDS = tokenizer("words", [TEXT])
BYTES = tokenizer("bytes", [TEXT])


@pytest.fixture
def rows(monkeypatch):
    """A stand-in for `datasets`, which has these rows, and records what was asked for and how far it was read."""
    rows, read, asked = [], [], []

    def load_dataset(dataset, config, *, split, streaming):
        asked.append((dataset, config, split))
        for row in rows:
            read.append(row)
            yield row

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return SimpleNamespace(rows=rows, read=read, asked=asked)


def write(folder, content):
    path = folder / "book.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize("kind", KINDS[:2])
@settings(max_examples=10)
@given(length=st.integers(1, 5000), seed=st.integers(0, 9))
def test_generated_text_is_long_enough_and_a_seed_gives_it_again(kind, length, seed):
    spelt = tokenizer(kind, [chr(code) for code in range(32, 127)] + ["\n"])
    made = Haystack.read(None, spelt, length, seed)
    assert len(made.tokens) >= length
    assert (made.tokens == Haystack.read(None, spelt, length, seed).tokens).all()
    assert not np.isin(made.tokens, special_ids(spelt)).any()


def test_generated_text_is_plain_sentences():
    text = BYTES.decode(Haystack.read(None, BYTES, 3000).tokens)
    assert all(paragraph[0].isupper() and paragraph.endswith(".") for paragraph in text.split("\n\n") if paragraph)
    assert not any(character.isdigit() for character in text)
    sentences = text.replace("\n\n", " ").split(". ")
    assert len(set(sentences)) == len(sentences)
    assert text != BYTES.decode(Haystack.read(None, BYTES, 3000, seed=1).tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_as_it_is(tmp_path, kind):
    spelt = tokenizer(kind, [TEXT])
    made = Haystack.read(write(tmp_path, TEXT), spelt, 10)
    assert made.tokens.tolist() == spelt(TEXT, add_special_tokens=False)["input_ids"]
    assert made.name == "book.txt"


def test_special_tokens_that_a_text_spells_are_left_out(tmp_path):
    made = Haystack.read(write(tmp_path, "The lamp</s> was<|turn|> out.<s>"), BYTES, 1)
    assert BYTES.decode(made.tokens) == "The lamp was out."


def test_few_unknown_words_are_left_out_and_many_are_an_error(tmp_path):
    made = Haystack.read(write(tmp_path, TEXT + "hapax " + TEXT), WORDS, 1)
    assert WORDS.decode(made.tokens) == (TEXT + TEXT).strip()
    with pytest.raises(TextError, match=r"83% of book.txt is unknown to the tokenizer; give a text that"):
        Haystack.read(write(tmp_path, "The hapax legomena of this book"), WORDS, 1)
    with pytest.raises(TextError, match=r"\d+% of generated text is unknown to the tokenizer"):
        Haystack.read(None, WORDS, 100)


def test_a_dataset_is_read_as_far_as_needed(rows):
    rows.rows += [{"text": TEXT, "id": number} for number in range(50)]
    for source, asked in (("org/texts", ("org/texts", None)), ("texts:en.2023", ("texts", "en.2023"))):
        rows.read.clear()
        made = Haystack.read(source, WORDS, 45)
        assert len(rows.read) == 3
        assert rows.asked[-1] == (*asked, "train")
        assert WORDS.decode(made.tokens) == (TEXT * 3).strip()
        assert made.name == source


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"content": TEXT, "id": 1}, 'dataset org/texts has no text in a column "text"; its columns: content, id'),
        ({"text": None}, 'dataset org/texts has no text in a column "text"; its columns: text'),
    ],
    ids=["column", "null"],
)
def test_a_dataset_without_text(rows, row, message):
    rows.rows += [{"text": TEXT}, row]
    with pytest.raises(TextError, match=message) as raised:
        Haystack.read("org/texts", WORDS, 100)
    assert "`" not in str(raised.value)  # a column is not a setting


@pytest.mark.parametrize("content", ["", TEXT], ids=["empty", "short"])
def test_too_little_text(tmp_path, rows, content):
    message = r"has \d+ tokens, 100 are needed; give a longer text, or less context"
    with pytest.raises(TextError, match="book.txt " + message):
        Haystack.read(write(tmp_path, content), WORDS, 100)
    rows.rows.append({"text": content})
    with pytest.raises(TextError, match="org/texts " + message):
        Haystack.read("org/texts", WORDS, 100)


def test_files_that_are_no_text(tmp_path):
    with pytest.raises(TextError, match=r"book.txt is not UTF-8 text: invalid"):
        Haystack.read(write(tmp_path, b"\xff\xfe\x00"), WORDS, 1)
    with pytest.raises(TextError, match=r"cannot read text .*: Is a directory"):
        Haystack.read(str(tmp_path), WORDS, 1)
    for source in ("./missing.txt", "x" * 5000 + "/y/z", "a\0b", "org/texts:", "C:\\texts", "https://org/texts"):
        with pytest.raises(TextError, match="there is no such file, and it is not the Hub id of a dataset"):
            Haystack.read(source, WORDS, 1)


@settings(max_examples=50)
@given(size=st.integers(1, 40), length=st.integers(0, 40), seed=st.integers(0, 99))
def test_a_piece_is_a_part_of_the_text(size, length, seed):
    haystack = Haystack(np.arange(size), "numbers")
    if length > size:
        with pytest.raises(TextError, match=f"numbers has {size} tokens, {length} are needed"):
            haystack.piece(np.random.default_rng(seed), length)
    else:
        piece = haystack.piece(np.random.default_rng(seed), length)
        assert piece.tolist() == list(range(piece[0], piece[0] + length)) if length else not len(piece)


def test_a_piece_may_begin_and_end_anywhere():
    haystack = Haystack(np.arange(5), "numbers")
    drawn = {haystack.piece(np.random.default_rng(seed), 3)[0] for seed in range(50)}
    assert drawn == {0, 1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_tokenizer_puts_first(kind):
    spelt = tokenizer(kind, [TEXT])
    assert first_tokens(spelt) == [spelt.bos_token_id]
    spelt.backend_tokenizer.post_processor = None
    assert first_tokens(spelt) == []
