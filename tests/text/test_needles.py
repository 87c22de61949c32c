"""Needles in their file, hidden in text and asked for."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.errors import TextError, UnsupportedModel
from kvsurgery.text.needles import KEYS, Needle, Prompt, needle_place, read_needles
from kvsurgery.text.tokens import special_ids
from tests.helpers.vocabularies import CHAT_TEMPLATE, KINDS, SPECIAL, TURN, tokenizer

TEXT = "The lamp was out. Nobody came. The lamp stayed out until morning, and then the road was open again. "
NEEDLE = Needle("The key of the old mill hangs under the third step.", "under the third step", "Where is it?", "a step")
AROUND = (
    "Question: Where is it?\nAnswer: user assistant\nAnswer from the text above, in as few words as possible. Where "
)
FIELDS = {"answer": "blue", "needle": "Her coat is blue.", "real_needle": "blue", "question": "Of what colour?"}
WORDS = tokenizer("words", [TEXT])


def spelling(kind, chat=False):
    return tokenizer(kind, [TEXT, *(getattr(NEEDLE, key) for key in KEYS), AROUND], size=400, chat=chat)


def jsonl(folder, *lines):
    path = folder / "needles.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines),
        encoding="utf-8",
    )
    return path


def decode(spelt, tokens):
    return spelt.decode(tokens, clean_up_tokenization_spaces=False)


class TestFile:
    def test_the_published_layout(self, tmp_path):
        other = {**FIELDS, "needle": "Lines\u2028do not end here: blue!\n", "source": "ours", "kind": "reasoning"}
        other["cue"] = " Her coat is "
        plain, reasoning = read_needles(jsonl(tmp_path, FIELDS, "", other, ""))
        assert plain == Needle("Her coat is blue.", "blue", "Of what colour?", "blue")
        assert (reasoning.needle, reasoning.kind) == ("Lines\u2028do not end here: blue!", "reasoning")
        assert reasoning.cue == "Her coat is"

    def test_a_byte_order_mark_is_no_part_of_it(self, tmp_path):
        path = jsonl(tmp_path, FIELDS)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert len(read_needles(path)) == 1

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "not JSON: "),
            ("[" * 200_000, "not JSON: "),
            (json.dumps({**FIELDS, "answer": "blue \ud83d"}), r"not JSON: \\ud83d is half of a character"),
            ("[1]", "not a JSON object with the keys answer, needle, real_needle, question"),
            *[({key: FIELDS[key] for key in KEYS if key != left}, f'"{left}" is missing') for left in KEYS],
            *[({**FIELDS, key: " \n"}, f'"{key}" is empty') for key in KEYS],
            ({**FIELDS, "answer": 3}, '"answer" must be text, got 3'),
            ({**FIELDS, "real_needle": "red"}, '"real_needle" \'red\' is not a part of "needle"; it must be once'),
            ({**FIELDS, "real_needle": "e"}, '"real_needle" \'e\' is 2 times a part of "needle"; it must be once'),
            ({**FIELDS, "cue": 3}, '"cue" must be text, got 3'),
            ({**FIELDS, "kind": "plain"}, "\"kind\" is retrieval or reasoning, got 'plain'"),
            ({**FIELDS, "kind": ["retrieval"]}, r"\"kind\" is retrieval or reasoning, got \['retrieval'\]"),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path, line, message):
        path = jsonl(tmp_path, FIELDS, "", line)
        with pytest.raises(TextError, match=f"^{re.escape(str(path))}, line 3: {message}") as raised:
            read_needles(path)
        assert "\n" not in str(raised.value)

    def test_files_that_are_none(self, tmp_path):
        with pytest.raises(TextError, match=r"cannot read needles .*none.jsonl: No such file"):
            read_needles(tmp_path / "none.jsonl")
        with pytest.raises(TextError, match="holds no needles"):
            read_needles(jsonl(tmp_path, "", " "))
        (tmp_path / "needles.jsonl").write_bytes(b"\x89PNG\r\n\0\0")
        with pytest.raises(TextError, match="is not UTF-8 text"):
            read_needles(tmp_path / "needles.jsonl")
        with open(tmp_path / "needles.jsonl", "wb") as file:
            file.truncate(1 << 30)
        with pytest.raises(TextError, match="is over 16 MiB; this is not a file of needles"):
            read_needles(tmp_path / "needles.jsonl")


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("kind", KINDS)
class TestPrompt:
    def test_text_around_the_needle_around_its_real_part(self, kind, chat):
        spelt = spelling(kind, chat)
        prompt = Prompt.of(NEEDLE, spelt)
        text = np.array(spelt(TEXT * 5, add_special_tokens=False)["input_ids"])
        place = needle_place(text, 0.5, spelt)
        tokens, real = prompt.around(text, place)
        assert len(tokens) == len(text) + prompt.overhead
        assert decode(spelt, tokens[real.start : real.stop]).strip().rstrip(".") == NEEDLE.real_needle
        start = len(prompt.opening) + place
        stop = start + len(prompt.needle)
        assert decode(spelt, tokens[start:stop]).strip() == NEEDLE.needle
        left = [*tokens[len(prompt.opening) : start], *tokens[stop : len(tokens) - len(prompt.request)]]
        assert left == text.tolist()

    def test_it_reads_as_if_written_in_one_piece(self, kind, chat):
        spelt = spelling(kind, chat)
        prompt = Prompt.of(NEEDLE, spelt)
        text = np.array(spelt((TEXT * 20).strip(), add_special_tokens=False)["input_ids"])
        place = needle_place(text, 0.6, spelt)
        tokens, _ = prompt.around(text, place)
        told = f"{decode(spelt, text[:place])} {NEEDLE.needle} {decode(spelt, text[place:]).strip()}"
        if chat:
            asked = f"Answer from the text above, in as few words as possible. {NEEDLE.question}"
            said = [{"role": "user", "content": f"{told}\n\n{asked}"}]
            expected = spelt.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        else:
            expected = spelt(f"{told}\n\nQuestion: {NEEDLE.question}\nAnswer:")["input_ids"]
        assert decode(spelt, tokens).split() == decode(spelt, expected).split()
        if kind != "metaspace" or not chat:  # which marks a beginning after the template's words too
            assert tokens.tolist() == expected

    def test_a_cue_begins_the_answer(self, kind, chat):
        """After the generation prompt of a template, or after "Answer:", a space apart."""
        spelt = spelling(kind, chat)
        request = Prompt.of(NEEDLE, spelt).request
        cued = Prompt.of(replace(NEEDLE, cue="The key of the old mill hangs"), spelt).request
        assert cued[: len(request) - 1].tolist() == request[:-1].tolist()
        assert decode(spelt, cued).split() == [
            *decode(spelt, request).split(),
            *["The", "key", "of", "the", "old", "mill", "hangs"],
        ]
        before = decode(spelt, cued).removesuffix("The key of the old mill hangs")
        assert before[-1].isspace()

    @pytest.mark.parametrize("depth", [0, 0.3, 1])
    def test_special_tokens_are_where_the_template_puts_them(self, kind, chat, depth):
        spelt = spelling(kind, chat)
        prompt = Prompt.of(NEEDLE, spelt)
        text = np.array(spelt(TEXT * 3, add_special_tokens=False)["input_ids"])
        tokens, _ = prompt.around(text, needle_place(text, depth, spelt))
        special = [spelt.convert_ids_to_tokens(token) for token in tokens.tolist() if token in special_ids(spelt)]
        assert special == (["<s>", TURN, "</s>", TURN] if chat else ["<s>"])
        context = tokens[len(prompt.opening) : len(tokens) - len(prompt.request)]
        assert not np.isin(context, special_ids(spelt)).any()


def test_words_around_the_question_are_left_out_where_they_are_unknown():
    known = tokenizer("words", [TEXT, *(getattr(NEEDLE, key) for key in KEYS)])
    assert decode(known, Prompt.of(NEEDLE, known).request) == NEEDLE.question
    cued = replace(NEEDLE, cue="The key hangs")
    assert decode(known, Prompt.of(cued, known).request) == f"{NEEDLE.question} The key hangs"
    known.chat_template = "{{ messages[0]['content'] }}"
    assert decode(known, Prompt.of(NEEDLE, known).request) == NEEDLE.question


def test_a_tokenizer_that_puts_nothing_first():
    spelt = spelling("bytes")
    spelt.backend_tokenizer.post_processor = None
    prompt = Prompt.of(NEEDLE, spelt)
    assert len(prompt.opening) == 0
    assert prompt.around(np.arange(5, 9), 0)[0][0] == prompt.needle[0]


def test_templates_are_told_the_date_and_not_to_think():
    spelt = spelling("bytes")
    spelt.chat_template = "{{ date_string }}/{{ enable_thinking }}/" + CHAT_TEMPLATE
    assert decode(spelt, Prompt.of(NEEDLE, spelt).opening) == f"26 Jul 2024/False/<s>{TURN}user\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no\nuser') }}", "the chat template cannot be filled in: no$"),
        ("{{ undefined_thing.part }}", "the chat template cannot be filled in: 'undefined_thing' is undefined"),
        ("{% for", "the chat template cannot be filled in: "),
        ("hello", "the chat template does not contain"),
        ("{{ messages[0]['content'] * 2 }}", "the chat template does not contain"),
    ],
    ids=["refuses", "undefined", "syntax", "drops", "doubles"],
)
def test_chat_templates_that_cannot_be_used(template, message):
    spelt = spelling("bytes")
    spelt.chat_template = template
    with pytest.raises(UnsupportedModel, match=message):
        Prompt.of(NEEDLE, spelt)


def test_words_that_the_tokenizer_does_not_know():
    with pytest.raises(TextError, match=r"know all words of 'a step'; give needles in words that it .*\(`needles`\)"):
        Prompt.of(NEEDLE, WORDS)
    with pytest.raises(TextError, match=r"does not know all words of 'Which one\?'; give needles in words"):
        Prompt.of(Needle("Nobody came.", "came.", "Which one?", "came."), WORDS)
    with pytest.raises(TextError, match="does not know all words of 'Who came'; give needles in words"):
        Prompt.of(Needle("Nobody came.", "came.", "Nobody", "came.", cue="Who came"), WORDS)


@pytest.mark.parametrize("token", SPECIAL[:2] + SPECIAL[3:])
def test_a_needle_spells_no_special_token(token):
    needle = Needle(f"The lamp{token} was out.", "was out", "And the lamp?", "out")
    with pytest.raises(TextError, match=re.escape(f"was out.' spells the special token {token}; reword it")):
        Prompt.of(needle, tokenizer("bytes", [TEXT]))


def test_a_tokenizer_without_offsets():
    class Slow:
        is_fast = False

    with pytest.raises(UnsupportedModel, match=r"the model needs a tokenizer.json"):
        Prompt.of(NEEDLE, Slow())


class TestPlace:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("depth", np.linspace(0, 1, 11).tolist())
    def test_the_nearest_end_of_a_sentence(self, kind, depth):
        spelt = tokenizer(kind, [TEXT])
        text = np.array(spelt((TEXT * 20).strip(), add_special_tokens=False)["input_ids"])
        place = needle_place(text, depth, spelt)
        before, after = decode(spelt, text[:place]), decode(spelt, text[place:])
        assert before.endswith(".")
        assert after.strip()[0].isupper()
        ends = np.flatnonzero([decode(spelt, [token]).endswith(".") for token in text[:-1].tolist()]) + 1
        assert abs(place - depth * len(text)) == np.abs(ends - depth * len(text)).min()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("text", "before"),
        [
            ("It cost 3.14 in all. But then", "It cost 3.14 in all."),
            ('He said: "It is late." But then', 'He said: "It is late."'),
            ("Has it gone? But then", "Has it gone?"),
            ("See kv.surgery (it is short.) But then", "See kv.surgery (it is short.)"),
            ("Da kam niemand.\nBut then", "Da kam niemand."),
        ],
        ids=["number", "quote", "question", "bracket", "line"],
    )
    def test_periods_that_end_a_sentence(self, kind, text, before):
        spelt = tokenizer(kind, [text], size=1)
        # in the middle of text without any other end, so that this one is near
        around = np.array(spelt("But then " * 50, add_special_tokens=False)["input_ids"])
        tokens = np.array(spelt(text, add_special_tokens=False)["input_ids"])
        whole = np.concatenate([around, tokens, around])
        place = needle_place(whole, 0.5, spelt)
        assert decode(spelt, whole[len(around) : place]).strip() == before

    def test_periods_of_scripts_without_spaces(self):
        spelt = tokenizer("metaspace", ["天気がいい。散歩に行く。"], size=10)
        text = np.array(spelt("天気がいい。散歩に行く。" * 10, add_special_tokens=False)["input_ids"])
        assert decode(spelt, text[: needle_place(text, 0.52, spelt)]).endswith("。")

    @given(st.integers(0, 30), st.floats(0, 1))
    def test_where_the_depth_says_in_text_without_sentences(self, size, depth):
        lamp = WORDS.convert_tokens_to_ids("lamp")
        assert needle_place(np.full(size, lamp), depth, WORDS) == round(depth * size)

    def test_a_sentence_far_away_does_not_draw_the_needle(self):
        lamp, end = WORDS.convert_tokens_to_ids(["lamp", "out."])
        text = np.full(1000, lamp)
        text[299] = end
        assert needle_place(text, 0.34, WORDS) == 300
        assert needle_place(text, 0.36, WORDS) == 360
