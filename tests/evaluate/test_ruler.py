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
from kvsurgery.evaluate.tasks.ruler import puzzles
from kvsurgery.evaluate.tasks.ruler import task as ruler
from kvsurgery.evaluate.tasks.ruler.puzzles import NOISE, WORDS, frequent_words
from kvsurgery.evaluate.tasks.ruler.task import NIAH, RulerTask
from kvsurgery.metrics.registry import METRICS
from tests.evaluate.limits import check_limits
from tests.evaluate.ruler_samples import MADE, MANY, reader, samples, texts
from tests.helpers.vocabularies import KINDS, TURN, tokenizer

SHARED = Path(os.environ.get("KVSURGERY_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "ruler"
PAIR = re.compile(r"One of the special magic (\w+)s for (\S+) is: (\S+)\.")
ASKED = re.compile(r"\nWhat (is|are all) the special magic (\w+) for (.+) mentioned in the provided text\?")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def solve(task, text):
    """The answer, as whoever reads the text finds it."""
    if task.startswith("niah"):
        found = {}
        for _, key, value in PAIR.findall(text):
            found.setdefault(key, set()).add(value)
        asked = ASKED.search(text)[3]
        return {value for key in re.split(", and |, ", asked) for value in found[key]}
    begin = {"vt": "Memorize and track", "cwe": "Below is a numbered list", "fwe": "Read the following coded text"}[
        task
    ]
    context, _, asked = text[text.rindex(begin) :].partition("\nQuestion: ")
    if task == "vt":
        value, assigned = re.search(r"assigned the value (\d+) in", asked)[1], {}
        for name, origin in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", context):
            assigned[name] = assigned.get(origin, origin)
        return {name for name, origin in assigned.items() if origin == value}
    if task == "cwe":
        counts = Counter(re.findall(r"\d+\. (\S+)", context))
    else:
        counts = Counter(word for word in context.partition("coded words. ")[2].split() if word != "...")
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
        keys = len({key for _, key, _ in found})
        assert keys == (1 if task == "niah_multivalue" else len(found))
        assert {said for said, _, _ in found} == {kind}
        shape = {"number": r"\d{7}", "uuid": UUID.pattern}[kind]
        assert all(re.fullmatch(shape, value) for _, _, value in found)
        kinds = f"{kind}s" if answers > 1 else kind
        many, said, asked = ASKED.search(text).groups()
        verb = "are" if answers > 1 else "is"
        assert (many.partition(" ")[0], said) == (verb, kinds)
        assert text.endswith(f"? The special magic {kinds} for {asked} mentioned in the provided text {verb}")
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
        left = PAIR.sub("", text.split("\n")[1])
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
            assert solve("niah_multikey_3", text) == set(answers)
            sizes.append(len(PAIR.findall(text)))
        assert 0.7 < sizes[0] / sizes[1] < 1.3
        # but for the ids, every line and the answer's beginning
        lines, published = ({*UUID.sub("ID", text.removeprefix("<s>")).split("\n")} for text in (ours, row["input"]))
        assert published <= lines
        assert {*" ".join(lines - published).split()} <= {*NOISE.split()}  # which fills up what is left


def test_templates_are_those_of_another_implementation():
    """lm-eval's copies of NVIDIA's; the fields have other names."""
    pytest.importorskip("lm_eval.tasks.ruler.vt_utils", reason="pip install 'kvsurgery[eval]'", exc_type=ImportError)
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, qa_utils, vt_utils

    tracking = vt_utils.CONFIG["variable_tracking"]
    fields = {"context": "A", "query": "B", "num_v": 5}
    for theirs, ours in (
        (vt_utils.TEMPLATE, puzzles.TRACKING_CONTEXT + puzzles.TRACKING_QUESTION + puzzles.TRACKING_LEAD),
        (cwe_utils.TEMPLATE, puzzles.COMMON_CONTEXT + puzzles.COMMON_QUESTION + puzzles.COMMON_LEAD),
        (fwe_utils.TEMPLATE, puzzles.FREQUENT_CONTEXT + puzzles.FREQUENT_QUESTION + puzzles.FREQUENT_LEAD),
        (qa_utils.TEMPLATE, puzzles.DOCUMENTS_CONTEXT + puzzles.DOCUMENTS_QUESTION),
    ):
        assert ours.format(context="A", value="B", question="B", count=5) == theirs.format(**fields).rstrip()
    assert tracking["tokens_to_generate"] == ruler.LIMITS["vt"]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", MADE)
def test_questions_come_after_the_text_where_they_come_later(task, chat):
    whom = reader(chat=chat)
    for length in (1300, 4200):
        [known] = samples(whom, (length,), (task,))
        [later] = samples(whom, (length,), (task,), ask_later=True)
        assert known.context == 0
        assert later.answers == known.answers
        assert 0.99 * length <= len(later.tokens) + later.limit <= length
        before, after = (whom.tokenizer.decode(part) for part in np.split(later.tokens, [later.context]))
        assert after.startswith("\nWhat " if task in NIAH else "\nQuestion: ")
        assert solve(task, before + after) == set(later.answers)
        assert len(after) < 500


def halves(text, begin):
    """An example and the question after it."""
    place = text.rindex(begin)
    return text[:place], text[place:]


def test_variables_are_tracked_after_an_example():
    [text] = texts(reader(), (5000,), ("vt",))
    example, asked = halves(text, "Memorize and track")
    assert example.count(NOISE) == 15
    assert solve("vt", example) == set(example.split("they are: ")[1].split())
    assert len(re.findall("VAR [A-Z]{3} =", example)) == len(re.findall("VAR [A-Z]{5} =", asked)) == 5
    assert re.search(r"5 variables are assgined the value \d{5}, they are:$", text)
    [short] = texts(reader(), (1000,), ("vt",))
    assert halves(short, "Memorize and track")[0].count(NOISE) == 5


@pytest.mark.parametrize(("length", "example", "often", "seldom"), [(3000, (3, 1), 6, 1), (4096, (10, 3), 30, 3)])
def test_common_words_are_common(length, example, often, seldom):
    [text] = texts(reader(), (length,), ("cwe",))
    first, second = halves(text, "Below is a numbered list")
    _, _, said = first.partition("Answer:")
    assert solve("cwe", first) == set(re.findall(r"\d+\. (\S+)", said))
    for part, (many, few) in ((first, example), (second, (often, seldom))):
        counts = Counter(re.findall(r"\d+\. (\S+)", part.partition("\nQuestion")[0])).most_common()
        assert {count for _, count in counts[:10]} == {many}
        assert {count for _, count in counts[10:-1]} == {few}
        assert counts[-1][1] <= few


def test_three_coded_words_are_more_frequent_than_the_others_at_any_size():
    puzzle = frequent_words(random.Random(0), 4096)
    for size in range(puzzle.min_units, 300):
        assert solve("fwe", puzzle.write(size, 0) + puzzle.question) == set(puzzle.answers)


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
    assert re.search(rf"\?</s>\n{re.escape(TURN)}assistant\n The special magic number for \S+ mentioned", text)


def test_words_are_no_part_of_each_other():
    words = [word for words in WORDS.values() for word in words]
    assert len(set(words)) == len(words)
    joined = "|".join(words)
    assert all(joined.count(word) == 1 for word in words)
