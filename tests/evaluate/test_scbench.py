"""SCBench's contexts, and the questions that are asked about each of them later."""

import json
import sys

import pytest

from kvsurgery.errors import KVSurgeryError, TextError
from kvsurgery.evaluate.sample import Reader
from kvsurgery.evaluate.tasks.scbench import TASKS, SCBenchTask
from kvsurgery.metrics.registry import METRICS
from tests.evaluate.limits import check_limits
from tests.helpers.json_lines import write_json_lines
from tests.helpers.vocabularies import KINDS, TURN, tokenizer

OPTIONS = ["parse", "read", "write", "open"]
FUNCTION = "def at(self, place):\n    return self.rows[place] if place in self.rows else self.default"
OTHER = "def put(self, place, row):\n    self.rows[place] = row\n    self.size = len(self.rows)\n    return self"
# a question as the benchmark has it, and answers that are right and wrong
TURNS = {
    "kv": ({"answer": "c14c-be"}, 'It is "c14c-be"', "C14C-BE"),
    "prefix_suffix": ({"answer": "abxyz"}, "abxyz", "ab"),
    "vt": ({"answer": ["X1", "X2"]}, "x2 and X1", "Y"),
    "qa_eng": ({"answer": "The war"}, "It was the war.", "peace"),
    "qa_chn": ({"answer": "田归农"}, "田归农。", "石"),
    "choice_eng": ({"answer": "read", "options": OPTIONS}, "B", "C"),
    "many_shot": ({"answer": "(B)"}, "(b)", "(A)"),
    "mf": ({"input": "The smallest number is", "answer": 1.5}, "1.5", "2"),
    "summary": ({"answer": "Someone writes."}, "someone writes", "nothing"),
    "summary_with_needles": ({"answer": "71432", "task": "scbench_passkey"}, "71432.", "7"),
    "repoqa": ({"answer": FUNCTION, "name": "at"}, f"```python\n{FUNCTION}\n```", OTHER),
    "repoqa_and_kv": ({"answer": FUNCTION, "name": "at", "task": "scbench_repoqa"}, FUNCTION, OTHER),
}
KINDS_OF = {"summary_with_needles": "/passkey", "repoqa_and_kv": "/repoqa"}
ROW = {"context": "It is {here}. " * 9, "repo": "a/b", "lang": "python"}
TEXTS = ["It is here. Where is it? ", json.dumps(TASKS, ensure_ascii=False)]
SPELT = tokenizer("bytes", TEXTS, size=400)
READER = Reader(SPELT, 4000, len(SPELT))


def turns(name, count=2, **changes):
    return [{"input": f"Where is it, {number}?", **TURNS[name][0], **changes} for number in range(count)]


def write(folder, task, *rows):
    whole = ({"id": number, **ROW, **row} for number, row in enumerate(rows))
    return write_json_lines(folder / f"scbench_{task}.jsonl", whole)


def samples(source, reader=READER, **options):
    return list(SCBenchTask(str(source), **options).samples(reader))


@pytest.mark.parametrize("task", TURNS)
def test_every_task_has_a_metric_and_asks_after_the_context(tmp_path, task):
    assert TURNS.keys() == TASKS.keys()
    _, right, wrong = TURNS[task]
    first, second = samples(write(tmp_path, task, {"multi_turns": turns(task)}))
    assert first.task == f"scbench/{task}{KINDS_OF.get(task, '')}"
    assert (first.name, second.name, first.facts, second.facts) == ("0/1", "0/2", {"question": 1}, {"question": 2})
    assert METRICS[first.metric](right, first.answers, first.choices) == 1
    assert METRICS[first.metric](wrong, first.answers, first.choices) == 0
    assert METRICS[first.metric]("", first.answers, first.choices) == 0
    assert first.kind == second.kind
    context, question = SPELT.decode(first.tokens[: first.context]), SPELT.decode(first.tokens[first.context :])
    assert context.endswith("It is {here}. ")
    asked = "The smallest number" if task == "mf" else "Where is it, 0?"
    assert asked in question
    assert asked not in context


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("kind", KINDS)
def test_questions_of_a_row_share_its_context(tmp_path, kind, chat):
    spelt = tokenizer(kind, TEXTS, chat=chat)
    rows = [{"context": "It is here. " * length, "multi_turns": turns("qa_eng", 3)} for length in (9, 900)]
    made = samples(write(tmp_path, "qa_eng", *rows), Reader(spelt, 500, len(spelt)))
    assert len({sample.kind for sample in made}) == 2
    for sample in made[3:]:
        assert len(sample.tokens) + sample.limit <= 500
    assert max(len(sample.tokens) + sample.limit for sample in made) > 490
    said = spelt.decode(made[0].tokens)
    assert said.count("<s>") == 1
    assert said.count(TURN) == (2 if chat else 0)


def test_contexts_may_lie_elsewhere(tmp_path):
    """Variable tracking's is called `input`, and that of numbers is a list."""
    write(tmp_path, "mf", {"context": [3, 1.5, 7], "multi_turns": turns("mf", 1)})
    path = tmp_path / "scbench_vt.jsonl"
    path.write_text(json.dumps({"input": "VAR X1 = 5", "multi_turns": turns("vt", 1)}))
    tracking, numbers = samples(tmp_path)
    assert SPELT.decode(tracking.tokens[: tracking.context]) == "<s>VAR X1 = 5"
    assert SPELT.decode(numbers.tokens[: numbers.context]).endswith("[3, 1.5, 7]")


def test_a_limit_is_of_each_task(tmp_path):
    write(tmp_path, "kv", *[{"multi_turns": turns("kv")}] * 3)
    both = [*turns("summary_with_needles", 1), *turns("summary_with_needles", 1, task="scbench_summary")]
    write(tmp_path, "summary_with_needles", *[{"multi_turns": both}] * 5)
    check_limits(SCBenchTask(str(tmp_path)), READER)
    assert len(samples(tmp_path, tasks=("kv",))) == len(samples(tmp_path, tasks=("scbench_kv",))) == 6


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("kv", {"multi_turns": []}, 'scbench_kv.jsonl, row 2: "multi_turns" must be a list of questions'),
        ("kv", {"context": None}, 'scbench_kv.jsonl, row 2: "context" or "input" must be text or a list'),
        ("kv", {"multi_turns": [{"input": 3}]}, 'scbench_kv.jsonl, row 2, question 1: "input" must be text'),
        ("kv", {"multi_turns": [{"input": "?"}]}, 'scbench_kv.jsonl, row 2, question 1: "answer" must be texts'),
        ("choice_eng", {"multi_turns": turns("kv")}, 'row 2, question 1: "options" must be four texts'),
        (
            "summary_with_needles",
            {"multi_turns": turns("kv")},
            '"task" must be one of scbench_summary, scbench_passkey',
        ),
        ("repoqa", {"repo": None}, 'line 2: "repo" must be text, got None'),
        ("repoqa", {"lang": "cobol"}, 'row 2: "lang" must be one of python, java, typescript, rust, cpp, go'),
        ("kv", {"multi_turns": turns("kv", input="? " * 5000)}, "row 2: its questions leave no room for a context in"),
    ],
)
def test_malformed_rows_are_named(tmp_path, task, row, message):
    write(tmp_path, task, {"multi_turns": turns(task)}, {"multi_turns": turns(task), **row})
    with pytest.raises(TextError, match=message) as raised:
        samples(tmp_path)
    assert "`" not in str(raised.value)  # a column is not a setting


def test_a_function_is_looked_for_among_those_of_its_repository(tmp_path):
    """Whichever row asks for them."""
    other = {"multi_turns": turns("repoqa", 1, answer=OTHER)}
    elsewhere = {"multi_turns": turns("repoqa", 1, answer="fn main() {}"), "repo": "c/d", "lang": "rust"}
    first, second, third = samples(write(tmp_path, "repoqa", {"multi_turns": turns("repoqa", 1)}, other, elsewhere))
    assert first.choices == second.choices == (FUNCTION, OTHER)
    assert (first.answers, second.answers) == ((FUNCTION, "python"), (OTHER, "python"))
    assert (third.answers, third.choices) == (("fn main() {}", "rust"), ("fn main() {}",))


def test_functions_and_values_are_asked_of_one_context(tmp_path):
    both = [*turns("repoqa_and_kv", 1), *turns("kv", 1, task="scbench_kv")]
    function, value = samples(write(tmp_path, "repoqa_and_kv", {"multi_turns": both}))
    assert (function.task, function.limit) == ("scbench/repoqa_and_kv/repoqa", 1024)
    assert (value.task, value.limit, value.answers, value.choices) == (
        *("scbench/repoqa_and_kv/kv", 80),
        *(("c14c-be",), ()),
    )
    assert function.kind == value.kind


def test_what_the_metric_needs_is_asked_for_first(tmp_path, monkeypatch):
    write(tmp_path, "kv", {"multi_turns": turns("kv")})
    write(tmp_path, "repoqa", {"multi_turns": turns("repoqa")})
    monkeypatch.setitem(sys.modules, "tree_sitter_go", None)
    with pytest.raises(KVSurgeryError, match=r"RepoQA's metric needs tree_sitter_go: pip install '\.\[eval\]'"):
        SCBenchTask(str(tmp_path)).check()
    SCBenchTask(str(tmp_path), ("kv",)).check()


def test_tasks_that_are_not_read_are_named(tmp_path):
    write(tmp_path, "kv", {"multi_turns": turns("kv")})
    with pytest.raises(TextError, match="SCBench has no scbench_hashhop; it has scbench_kv, "):
        SCBenchTask(str(tmp_path), ("hashhop",)).check()
