"""BABILong's questions, in prompts of our own."""

import json
import os
import re
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvsurgery.errors import TextError
from kvsurgery.evaluate.sample import Reader
from kvsurgery.evaluate.tasks.babilong import TASKS, BabilongTask
from kvsurgery.metrics.registry import METRICS
from tests.evaluate.limits import check_limits
from tests.helpers.vocabularies import TURN, tokenizer

SHARED = Path(os.environ.get("KVSURGERY_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "babilong"
ROWS = {
    "qa1": {"input": " Mary went to the garden. It rained. ", "question": "Where is Mary? ", "target": "garden"},
    "qa5": {"input": "Mary gave the milk to Fred.", "question": "What did Mary give to Fred?", "target": "milk"},
    "qa8": {"input": "John took two things.", "question": "What is John carrying?", "target": "apple,milk"},
}
WORDS = {"maybe", "no", "none", "nothing", "one", "three", "two", "yes"}
SPELT = tokenizer("bytes", [str(ROWS)])
READER = Reader(SPELT, 10_000, len(SPELT))


@pytest.fixture
def folder(tmp_path):
    for task, row in ROWS.items():
        for length in ("16k", "4k", "0k"):
            rows = [
                {**row, "input": f"{row['input']} {length} {number}"} for number in range(2 if length == "0k" else 3)
            ]
            (tmp_path / f"{task}_{length}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "notes.txt").write_text("not a task")
    return tmp_path


def samples(source, reader=READER, **options):
    return list(BabilongTask(str(source), **options).samples(reader))


def test_a_prompt_has_examples_the_text_and_the_question(folder):
    [first, *_] = samples(folder, tasks=("qa1",))
    said = SPELT.decode(first.tokens)
    assert said.startswith("<s>A few sentences of the text below are facts")
    [*examples, asked] = said.split("<example>\n")[1:]
    assert len([*examples, asked]) == 2
    assert all("</example>" in example for example in [*examples, asked])
    assert said.endswith(
        "</example>\n\n<context>\nMary went to the garden. It rained.  0k 0\n</context>\n\n"
        "Question: Where is Mary?\nAnswer:"
    )
    assert (first.metric, first.answers, first.limit) == ("babilong", ("garden",), 20)


@pytest.mark.parametrize("task", TASKS)
def test_examples_are_answered_from_their_facts_in_one_sentence(task):
    labels = {*TASKS[task]["labels"]}
    for facts, question, answer in TASKS[task]["examples"]:
        assert question.endswith("?")
        assert "." not in answer.removesuffix(".")  # where the metric ends it
        *_, last = re.findall(r"\w+", answer)
        assert last in facts or last in labels & WORDS
        # an answer that is not said to be one is never given away
        assert not any(label in facts + question for label in labels - WORDS)


def test_a_chat_model_is_asked_in_a_turn(folder):
    spelt = tokenizer("bytes", [str(ROWS)], chat=True)
    [first, *_] = samples(folder, Reader(spelt, 10_000, len(spelt)))
    said = spelt.decode(first.tokens)
    assert said.startswith(f"<s>{TURN}user\nA few sentences of the text below")
    assert said.endswith(f"Question: Where is Mary?\nAnswer:</s>\n{TURN}assistant\n")


def test_first_rows_of_all_lengths_come_first(folder):
    made = samples(folder)
    assert [sample.task for sample in made] == [f"babilong/{task}" for task in ("qa1", "qa5", "qa8") for _ in range(8)]
    names = ["0k/0", "4k/0", "16k/0", "0k/1", "4k/1", "16k/1", "4k/2", "16k/2"]
    assert [sample.name for sample in made] == names * 3
    assert [sample.facts["length"] for sample in made[:3]] == ["0k", "4k", "16k"]
    again = samples(folder)
    assert all((one.tokens == other.tokens).all() for one, other in zip(made, again, strict=True))


def test_what_a_question_names_is_no_answer(folder):
    made = {sample.task: sample for sample in samples(folder)}
    assert made["babilong/qa5"].choices == ("bill", "jeff", "apple", "football", "milk")
    assert made["babilong/qa8"].answers == ("apple", "milk")

    def score(task, said):
        sample = made[f"babilong/{task}"]
        return METRICS[sample.metric](said, sample.answers, sample.choices)

    assert score("qa5", "Mary gave Fred the Milk.") == 1
    assert score("qa5", "Mary gave Jeff the milk.") == 0
    assert score("qa8", "apple, milk") == 1
    assert score("qa8", "apple") == 0


def test_tasks_and_lengths_can_be_chosen(folder):
    made = samples(folder, tasks=("qa5", "qa1"), lengths=("4k",))
    assert [(sample.task, sample.name) for sample in made[:4]] == [
        ("babilong/qa1", "4k/0"), ("babilong/qa1", "4k/1"), ("babilong/qa1", "4k/2"), ("babilong/qa5", "4k/0"),
    ]  # fmt: skip
    assert samples(folder / "qa8_16k.jsonl")[0].facts == {"length": "16k"}


def test_a_limit_is_of_each_task(folder):
    check_limits(BabilongTask(str(folder)), READER, spare=2)  # a row of each of three lengths is made at once


def test_a_dataset_has_a_configuration_by_length_and_a_split_by_task(monkeypatch):
    asked = []

    def load_dataset(source, config, *, split, streaming):
        asked.append((config, split))
        return iter([ROWS["qa1"]])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    made = samples("owner/name", Reader(SPELT, 2500, len(SPELT)))
    lengths = ["0k", "1k", "2k"]
    assert asked == [(length, task) for task in ("qa1", "qa2", "qa3", "qa4", "qa5") for length in lengths]
    assert len(made) == len(asked)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("", {"tasks": ("qa1", "qa3")}, "has no qa3 of BABILong, such as qa1_4k.jsonl"),
        ("", {"tasks": ("qa3",)}, "has no qa3 of BABILong"),
        ("", {"tasks": ("qa1",), "lengths": ("8k",)}, "has no 8k, qa1 of BABILong"),
        ("", {"lengths": ("4000",)}, r"lengths are called 0k, 1k, 2k, \.\.\. 1M, 10M; got 4000"),
        ("notes.txt", {}, "the name must say the task and the length, as qa1_4k.jsonl does"),
        ("qa20_4k.jsonl", {}, "there are prompts for qa1, qa2, .*; got qa20"),
        ("qa2_4k.jsonl", {}, 'line 1: "target" is missing; the fields are input, question, target'),
        ("qa3_4k.jsonl", {}, "holds no rows"),
    ],
)
def test_what_cannot_be_asked(folder, name, options, message):
    if name.startswith("qa"):
        row = json.dumps({"input": "", "question": ""}) if name != "qa3_4k.jsonl" else ""
        (folder / name).write_text(row)
    with pytest.raises(TextError, match=message):
        samples(folder / name, **options)


def test_an_empty_folder(tmp_path):
    with pytest.raises(TextError, match=r"has no files of BABILong, such as qa1_4k.jsonl"):
        samples(tmp_path)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no {SHARED}: set KVSURGERY_SHARED to a folder with BABILong's rows")
def test_published_rows():
    made = samples(SHARED, lengths=("0k",))
    assert len(made) == 300
    made += islice(BabilongTask(str(SHARED), lengths=("1k",)).samples(READER), 20)
    for sample in made:
        assert sample.answers[0] in sample.choices
        assert set(sample.choices) <= set(TASKS["qa1"]["labels"])
        assert METRICS["babilong"](f"The answer is {sample.answers[0]}. No.", sample.answers, sample.choices) == 1
