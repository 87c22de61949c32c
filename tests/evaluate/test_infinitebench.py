"""InfiniteBench's tasks: prompts, what is right, and rows that are not of its layout."""

import json

import pytest

from kvsurgery.errors import TextError
from kvsurgery.evaluate.sample import Reader
from kvsurgery.evaluate.tasks.infinitebench import TASKS, InfiniteBenchTask
from kvsurgery.metrics.registry import METRICS
from tests.evaluate.limits import check_limits
from tests.helpers.json_lines import write_json_lines
from tests.helpers.vocabularies import tokenizer

ROW = {"id": 0, "context": "A long {text}. " * 9, "input": "What is it?", "answer": ["a text"], "options": []}
OPTIONS = ["parse", "read", "write", "open"]
# rows as the benchmark has them, and answers that are right and wrong
ROWS = {
    "passkey": ({"answer": ["71432"]}, "71432.", "71433"),
    "number_string": ({"answer": "3000077442"}, "The digits are 3000077442", "30"),
    "kv_retrieval": ({"answer": "c14c-be"}, 'It is "c14c-be".', "c14c"),
    "longbook_sum_eng": ({"input": "", "answer": ["Someone writes a book."]}, "Someone writes a book", "Nothing"),
    "longbook_choice_eng": ({"options": OPTIONS, "answer": ["read"]}, "B", "C"),
    "longbook_qa_eng": ({"answer": ["in a war", '"war"']}, "War!", "peace"),
    "longbook_qa_chn": ({"answer": ["田归农"]}, "田归农。", "石"),
    "longdialogue_qa_eng": ({"input": "", "answer": ["ACE", "ACE ROTHSTEIN"]}, "Ace", "NICKY"),
    "math_find": ({"input": "The smallest number of the list is: ", "answer": [1.5]}, " 1.5", "2"),
    "math_calc": ({"input": "", "answer": [[79, 59, 73]]}, "[79, 59, 73]", "[78, 59]"),
    "code_run": ({"input": "Run func_12(-3) now.", "answer": [-4]}, "-4", "4"),
    "code_debug": ({"options": OPTIONS, "answer": ["write", "C"]}, "C. write", "A. parse"),
}
SPELT = tokenizer("bytes", [ROW["context"], *(asked["prompt"] for asked in TASKS.values())])
READER = Reader(SPELT, 4000, len(SPELT))


def write(folder, task, *rows):
    return write_json_lines(folder / f"{task}.jsonl", ({**ROW, **row} for row in rows))


def samples(source, reader=READER, **options):
    return list(InfiniteBenchTask(str(source), **options).samples(reader))


@pytest.mark.parametrize("task", ROWS)
def test_every_task_has_a_prompt_and_a_metric(tmp_path, task):
    row, right, wrong = ROWS[task]
    [sample] = samples(write(tmp_path, task, row))
    said = SPELT.decode(sample.tokens)
    assert (sample.task, sample.name, sample.limit) == (f"infinitebench/{task}", "0", min(TASKS[task]["limit"], 1000))
    assert said.index(ROW["context"][:20]) < len(said) - len(ROW["context"])
    assert METRICS[sample.metric](right, sample.answers, sample.choices) == 1
    assert METRICS[sample.metric](wrong, sample.answers, sample.choices) == 0
    assert METRICS[sample.metric]("", sample.answers, sample.choices) == 0


def test_a_folder_is_read_task_by_task(tmp_path):
    assert ROWS.keys() == TASKS.keys()
    for task in reversed(ROWS):
        write(tmp_path, task, ROWS[task][0])
    assert [sample.task for sample in samples(tmp_path)] == [f"infinitebench/{task}" for task in TASKS]
    assert len(samples(tmp_path, tasks=("passkey", "code_run"))) == 2


def test_prompts_ask_for_what_the_row_says(tmp_path):
    for task in ("math_find", "code_run", "code_debug"):
        write(tmp_path, task, ROWS[task][0])
    said = {sample.task: SPELT.decode(sample.tokens) for sample in samples(tmp_path)}
    assert "<s>What is the smallest number in this list?" in said["infinitebench/math_find"]
    assert "What does func_12(-3) return?" in said["infinitebench/code_run"]
    assert "A. parse\nB. read\nC. write\nD. open" in said["infinitebench/code_debug"]


def test_long_contexts_lose_their_middle(tmp_path):
    [sample] = samples(write(tmp_path, "passkey", {**ROWS["passkey"][0], "context": "word " * 9000}))
    assert READER.max_context - 4 <= len(sample.tokens) + sample.limit <= READER.max_context
    assert "What is it?" in SPELT.decode(sample.tokens)


def test_templates_of_a_file_are_filled_in(tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"longbook_choice_eng": "{context}|{question}|{OPTION_A}{OPTION_D}"}))
    path = write(tmp_path, "longbook_choice_eng", {**ROWS["longbook_choice_eng"][0], "context": "{func}"})
    [sample] = samples(path, prompts=str(prompts))
    assert SPELT.decode(sample.tokens) == "<s>{func}|What is it?|parseopen"
    write(tmp_path, "passkey", ROWS["passkey"][0])
    with pytest.raises(TextError, match=r"prompts.json has no prompt for passkey"):
        samples(tmp_path, tasks=("passkey",), prompts=str(prompts))


def test_a_limit_is_of_each_task(tmp_path):
    for task in ("passkey", "code_run"):
        write(tmp_path, task, *[ROWS[task][0]] * 5)
    check_limits(InfiniteBenchTask(str(tmp_path)), READER)


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("passkey", {"input": 3}, 'passkey.jsonl, line 2: "input" must be text, got 3'),
        ("passkey", {"answer": []}, 'passkey.jsonl, row 2: "answer" must be texts'),
        ("passkey", {"answer": None}, 'passkey.jsonl, row 2: "answer" must be texts'),
        ("math_calc", {"answer": ["many"]}, 'math_calc.jsonl, row 2: "answer" must be numbers'),
        (
            "math_find",
            {"input": "Which?"},
            'math_find.jsonl, row 2: "input" does not say what is asked for, got \'Which',
        ),
        ("code_debug", {"options": ["a"]}, 'code_debug.jsonl, row 2: "options" must be four texts'),
        ("code_debug", {"answer": ["close"]}, 'code_debug.jsonl, row 2: "answer" must be one of "options"'),
    ],
)
def test_malformed_rows_are_named(tmp_path, task, row, message):
    good = ROWS[task][0]
    write(tmp_path, task, good, {**good, **row})
    with pytest.raises(TextError, match=message):
        samples(tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("passkey", {"tasks": ("needle",)}, "InfiniteBench has no needle; it has passkey, number_string, "),
        ("passkey", {"tasks": ("code_run",)}, "has no file of InfiniteBench that is called code_run.jsonl"),
        ("other", {}, "has no file of InfiniteBench that is called passkey.jsonl"),
    ],
)
def test_files_that_are_not_there_are_named_first(tmp_path, name, options, message):
    write(tmp_path, name, ROWS["passkey"][0])
    for source in (tmp_path, tmp_path / f"{name}.jsonl"):
        with pytest.raises(TextError, match=message):
            InfiniteBenchTask(str(source), **options).check()
