"""RULER's tasks: solved from their texts alone, as long as asked for, and the same for a seed."""

import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsurgery.errors import TextError
from kvsurgery.evaluate.sample import Reader
from kvsurgery.evaluate.tasks.ruler import task as ruler
from kvsurgery.evaluate.tasks.ruler.puzzles import NOISE, WORDS, frequent_words
from kvsurgery.evaluate.tasks.ruler.task import NIAH, RulerTask
from kvsurgery.metrics.registry import METRICS
from tests.evaluate.limits import check_limits
from tests.evaluate.ruler_samples import MADE, MANY, reader, samples, texts
from tests.helpers.vocabularies import KINDS, TURN, tokenizer

SHARED = Path(os.environ.get("KVSURGERY_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "ruler"
PAIR = re.compile(r"Register: (\S+) has the (\w+) (\S+)\.")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def solve(task, text):
    """The answer, as whoever reads the text finds it."""
    if task.startswith("niah"):
        found = {}
        for key, _, value in PAIR.findall(text):
            found.setdefault(key, set()).add(value)
        asked = re.search(r"does the register have for (.+)\?", text)[1]
        return {value for key in re.split(", and |, ", asked) for value in found[key]}
    *_, context, asked = text.split("\n\n")
    if task == "vt":
        value, assigned = re.search(r"have the value (\d+) after", asked)[1], {}
        for name, origin in re.findall(r"LET (\w+) = (\w+)", context):
            assigned[name] = assigned.get(origin, origin)
        return {name for name, origin in assigned.items() if origin == value}
    if task == "cwe":
        counts = Counter(re.findall(r"\d+\. (\S+)", context))
    else:
        counts = Counter(word for word in context.split() if word != "...")
    common = counts.most_common()
    place = 10 if task == "cwe" else 3
    assert common[place - 1][1] > common[place][1]
    return {word for word, _ in common[:place]}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(
    task=st.sampled_from(MADE), length=st.integers(512, 4500), seed=st.integers(0, 99), chat=st.booleans()
)  # fmt: skip
def test_prompt_and_answer_are_as_long_as_asked_for(kind, task, length, seed, chat):
    whom = reader(kind, seed, chat=chat)
    try:
        [sample] = samples(whom, (length,), (task,))
    except TextError as error:
        match = re.fullmatch(
            rf"RULER's {task} takes (\d+) tokens or more, not {length}; give longer `lengths`", str(error)
        )
        assert int(match[1]) > length
        assert task in ("vt", "cwe")
    else:
        assert 0.99 * length <= len(sample.tokens) + sample.limit <= length


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_3", "cwe", "fwe"])
def test_long_prompts_too(kind, task):
    whom = reader(kind)
    [sample] = samples(whom, (65536,), (task,))
    assert 0.99 * 65536 <= len(sample.tokens) + sample.limit <= 65536
    if kind != "words":
        assert solve(task, whom.tokenizer.decode(sample.tokens)) == set(sample.answers)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("task", MADE)
@pytest.mark.parametrize("length", [1200, 4200])
def test_the_text_has_the_answer(kind, task, length):
    whom = reader(kind)
    for sample in samples(whom, (length,), (task,)):
        text = whom.tokenizer.decode(sample.tokens)
        assert solve(task, text) == set(sample.answers)
        assert len(set(sample.answers)) == len(sample.answers)
        assert METRICS[sample.metric](" ".join(sample.answers), sample.answers, ()) == 1
        assert METRICS[sample.metric]("something else", sample.answers, ()) == 0


def test_words_spelt_as_they_are(monkeypatch):
    """With a vocabulary of words, all of them known: the texts are the same whether they are or not."""
    whom, said, turn_tokens = reader("words"), [], ruler.turn_tokens
    monkeypatch.setattr(
        ruler, "turn_tokens", lambda spelt, text, lead: said.append(text + lead) or turn_tokens(spelt, text, lead)
    )
    lengths = samples(whom, (1200,))
    known = tokenizer("words", said)
    made = samples(Reader(known, MANY, len(known)), (1200,))
    for sample, before in zip(made, lengths, strict=True):
        assert len(sample.tokens) == len(before.tokens)
        text = known.decode(sample.tokens)
        assert all(answer in text for answer in sample.answers)
        assert "<unk>" not in text


@pytest.mark.parametrize("task", MADE)
def test_a_seed_gives_it_again_and_another_gives_another(task):
    first, second = (samples(reader(seed=seed), (1300, 1500), (task,), count=2) for seed in (0, 1))
    assert [sample.name for sample in first] == ["1300/0", "1500/0", "1300/1", "1500/1"]
    assert [sample.facts for sample in first[:2]] == [{"tokens": 1300}, {"tokens": 1500}]
    again = samples(reader(), (1500,), (task,), count=2)
    for one, other in zip(first[1::2], again, strict=True):
        assert (one.tokens == other.tokens).all()
        assert one.answers == other.answers
    assert len({sample.answers for sample in first + second}) == 8


def test_a_limit_is_of_each_task():
    check_limits(RulerTask((600, 700), ("niah_single_1", "fwe"), count=3), reader())


class TestNiah:
    @pytest.mark.parametrize(
        ("task", "pairs", "answers", "kind"),
        [
            ("niah_single_1", 1, 1, "number"), ("niah_single_2", 1, 1, "number"), ("niah_single_3", 1, 1, "uuid"),
            ("niah_multikey_1", 4, 1, "number"), ("niah_multivalue", 4, 4, "number"),
            ("niah_multiquery", 4, 4, "number"), ("niah_multikey_2", None, 1, "number"),
            ("niah_multikey_3", None, 1, "uuid"),
        ],
    )  # fmt: skip
    def test_the_published_settings(self, task, pairs, answers, kind):
        whom = reader()
        [sample] = samples(whom, (2000,), (task,))
        text = whom.tokenizer.decode(sample.tokens)
        found = PAIR.findall(text)
        assert len(found) == pairs if pairs else len(found) > 10
        assert len(sample.answers) == answers
        keys = len({key for key, _, _ in found})
        assert keys == (1 if task == "niah_multivalue" else len(found))
        assert {said for _, said, _ in found} == {kind}
        shape = {"number": r"\d{7}", "uuid": UUID.pattern}[kind]
        assert all(re.fullmatch(shape, value) for _, _, value in found)
        kinds = f"{kind}s" if answers > 1 else kind
        asked = re.search(rf"Which {kinds} does the register have for (.+)\?", text)[1]
        assert text.endswith(f"? For {asked} the register has the {kinds}")
        assert (sample.limit, sample.metric) == (128, "string_match_all")

    @pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
    def test_needles_lie_anywhere(self, task):
        essay = ["Every", "road", "leads", "home."]
        depths = []
        for seed in range(60):
            puzzle = NIAH[task].puzzle(random.Random(seed), essay)
            text = puzzle.write(400, 0)
            depths.append(text.index(puzzle.answers[0]) / len(text))
        assert min(depths) < 0.25
        assert max(depths) > 0.75
        assert 0.35 < np.mean(depths) < 0.65

    def test_the_essay_is_the_users(self, tmp_path):
        (tmp_path / "essay.txt").write_text("Every road leads home. " * 300)
        [text] = texts(reader(), (1000,), ("niah_single_2",), text=str(tmp_path / "essay.txt"))
        assert text.count("Every road leads home.") > 50
        left = PAIR.sub("", text.split("\n\n")[1])
        assert set(re.sub(r"[^\w ]", " ", left).split()) == {"Every", "road", "leads", "home"}
        with pytest.raises(TextError, match=r"essay.txt has .* tokens, 9000 are needed; give a longer text"):
            texts(reader(), (9000,), ("niah_single_2",), text=str(tmp_path / "essay.txt"))

    def test_a_published_row_is_alike(self):
        path = SHARED / "niah_multikey_3_4096.jsonl"
        if not path.is_file():
            pytest.skip(f"no {path}: set KVSURGERY_SHARED to a folder with RULER's rows")
        row = json.loads(path.read_text().splitlines()[0])
        [ours] = texts(reader(), (4096,), ("niah_multikey_3",))
        sizes = []
        for text, answers in ((row["input"], row["outputs"]), (ours, solve("niah_multikey_3", ours))):
            *lines, question = text.split("\n")
            needles = dict(pair for line in lines if len(pair := UUID.findall(line)) == 2)
            [key] = {*UUID.findall(question)}
            assert [needles[key]] == [*answers]
            sizes.append(len(needles))
        # what is said around a key and its value takes a few tokens more or less
        assert 0.7 < sizes[0] / sizes[1] < 1.3


def halves(text):
    """An example and the question after it, which have three parts each."""
    parts = text.split("\n\n")
    assert len(parts) == 6
    return "\n\n".join(parts[:3]), "\n\n".join(parts[3:])


def test_variables_are_tracked_after_an_example():
    [text] = texts(reader(), (5000,), ("vt",))
    example, asked = halves(text)
    assert example.count(NOISE) == 15
    assert solve("vt", example) == set(example.split("5 variables: ")[1].split())
    assert len(re.findall("LET [A-Z]{3} =", example)) == len(re.findall("LET [A-Z]{5} =", asked)) == 5
    assert re.search(r"The value \d{5} is that of 5 variables:$", text)
    [short] = texts(reader(), (1000,), ("vt",))
    assert halves(short)[0].count(NOISE) == 5


@pytest.mark.parametrize(("length", "example", "often", "seldom"), [(3000, (3, 1), 6, 1), (4096, (10, 3), 30, 3)])
def test_common_words_are_common(length, example, often, seldom):
    [text] = texts(reader(), (length,), ("cwe",))
    first, second = halves(text)
    _, _, said = first.partition("Answer:")
    assert solve("cwe", first) == set(re.findall(r"\d+\. (\S+)", said))
    for part, (many, few) in ((first, example), (second, (often, seldom))):
        counts = Counter(re.findall(r"\d+\. (\S+)", part.split("\n\n")[1])).most_common()
        assert {count for _, count in counts[:10]} == {many}
        assert {count for _, count in counts[10:-1]} == {few}
        assert counts[-1][1] <= few


def test_three_coded_words_are_more_frequent_than_the_others_at_any_size():
    puzzle = frequent_words(random.Random(0), 4096)
    for size in range(puzzle.min_units, 300):
        assert solve("fwe", puzzle.write(size, 0)) == set(puzzle.answers)


def test_lists_that_there_are_not_words_enough_for():
    [text] = texts(reader(), (12_000,), ("cwe",))
    assert all("-" in word for word in re.findall(r"\d+\. (\S+)", text))


@pytest.mark.parametrize(
    ("lengths", "tasks", "message"),
    [
        ((2000,), ("vt", "niah"), "RULER has no niah; it has niah_single_1, "),
        (
            (2000, 8193),
            None,
            "RULER at 8193 tokens does not fit into 8192 positions; give shorter `lengths`",
        ),
        ((2000, 300), ("cwe", "fwe"), r"RULER's cwe takes \d+ tokens or more, not 300; give longer `lengths`"),
        ((100,), ("niah_single_1",), r"RULER's niah_single_1 takes \d+ tokens or more, not 100"),
    ],
)
def test_what_cannot_be_made(lengths, tasks, message):
    with pytest.raises(TextError, match=message):
        next(RulerTask(lengths, tasks).samples(reader(max_context=8192)))


def test_a_model_that_does_not_know_the_words():
    small = tokenizer("words", ["a few words"])
    with pytest.raises(TextError, match=r"\d+% of RULER's vt is unknown to the tokenizer; leave the task out"):
        samples(Reader(small, 9000, len(small)), (2000,), ("vt",))


def test_a_chat_model_begins_its_answer():
    [text] = texts(reader(chat=True), (1000,), ("niah_single_1",))
    assert re.search(rf"\?</s>\n{re.escape(TURN)}assistant\n For \S+ the register has the number$", text)


def test_words_are_no_part_of_each_other():
    words = [word for words in WORDS.values() for word in words]
    assert len(set(words)) == len(words)
    joined = "|".join(words)
    assert all(joined.count(word) == 1 for word in words)
