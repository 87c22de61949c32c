"""LongBench v2's questions with four options."""

import json

import pytest

from kvsurgery.errors import TextError
from kvsurgery.evaluate.sample import Reader
from kvsurgery.evaluate.tasks.longbench_v2 import PROMPT, LongBenchV2Task
from kvsurgery.metrics.registry import METRICS
from tests.evaluate.limits import check_limits
from tests.helpers.vocabularies import tokenizer

ROW = {
    "_id": "66f36490821e116aacb2cc22",
    "domain": "Single-Document QA",
    "sub_domain": "Financial",
    "difficulty": "easy",
    "length": "short",
    "question": " Where does it cost $Q$ 5? ",
    "choice_A": "here",
    "choice_B": "there {x}",
    "choice_C": "anywhere",
    "choice_D": "nowhere",
    "answer": "B",
    "context": "\nIt costs $C_A$ 5 there. ",
}
SPELT = tokenizer("bytes", [PROMPT, *ROW.values()])
READER = Reader(SPELT, 4000, len(SPELT))


def write(folder, *rows):
    path = folder / "data.json"
    path.write_text(json.dumps([{**ROW, "_id": str(number), **row} for number, row in enumerate(rows)]))
    return path


def samples(source, reader=READER, **options):
    return list(LongBenchV2Task(str(source), **options).samples(reader))


def test_a_prompt_has_the_text_the_question_and_its_options(tmp_path):
    write(tmp_path, {}, {"difficulty": "hard", "length": "long", "answer": "D"})
    first, second = samples(tmp_path)
    said = SPELT.decode(first.tokens)
    # the fields' texts stay as they are, whatever they hold
    assert (
        "<text>\nIt costs $C_A$ 5 there.\n</text>\n\nQuestion: Where does it cost $Q$ 5?\n(A) here\n(B) there" in said
    )
    assert (first.task, first.name, first.limit, first.facts) == (
        *("longbench_v2", "0", 128),
        {"difficulty": "easy", "length": "short"},
    )
    assert (second.answers, second.facts) == (("D",), {"difficulty": "hard", "length": "long"})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("The correct answer is (B).", 1),
        ("**The correct answer is B**", 1),
        ("It is not (A). The correct answer is (B) there", 1),
        ("The correct answer is (C).", 0),
        ("B", 0),
        ("", 0),
    ],
)
def test_what_an_answer_scores(tmp_path, said, expected):
    [sample] = samples(write(tmp_path, {}))
    assert METRICS[sample.metric](said, sample.answers, sample.choices) == expected


def test_long_documents_lose_their_middle(tmp_path):
    write(tmp_path, {"context": "first " + "and so on " * 3000 + "last"})
    [sample] = samples(tmp_path)
    said = SPELT.decode(sample.tokens)
    assert READER.max_context - 4 <= len(sample.tokens) + sample.limit <= READER.max_context
    assert said.index("first") < said.index("last\n</text>") < said.index("Where does it cost")


def test_a_limit_is_of_the_first_rows(tmp_path):
    check_limits(LongBenchV2Task(str(write(tmp_path, *[{}] * 5))), READER)


def test_the_benchmarks_own_prompt_can_be_used(tmp_path):
    prompt = tmp_path / "0shot.txt"
    prompt.write_text("$DOC$ ? $Q$ $C_A$|$C_B$|$C_C$|$C_D$")
    [sample] = samples(write(tmp_path, {"context": "$Q$", "question": "?"}), prompt=str(prompt))
    assert SPELT.decode(sample.tokens) == "<s>$Q$ ? ? here|there {x}|anywhere|nowhere"
    prompt.write_text("$DOC$ $Q$ $C_A$ $C_B$")
    with pytest.raises(TextError, match=r"0shot.txt has no \$C_C\$, \$C_D\$; give a prompt such as"):
        LongBenchV2Task(str(tmp_path), prompt=str(prompt)).check()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"context": None}, 'data.json, row 2: "context" must be text, got None'),
        ({"answer": "E"}, "data.json, row 2: \"answer\" must be A, B, C or D, got 'E'"),
        ({"choice_C": ["a"]}, r'data.json, row 2: "choice_C" must be text, got ' r"\['a'\]"),
    ],
)
def test_malformed_rows_are_named(tmp_path, row, message):
    write(tmp_path, {}, row)
    with pytest.raises(TextError, match=message):
        samples(tmp_path)
