"""LooGLE's questions, in the layout of its files and in that of the Hub."""

import json

import pytest

from kvsurgery.errors import TextError
from kvsurgery.evaluate.sample import Reader
from kvsurgery.evaluate.tasks.loogle import TASKS, LoogleTask
from kvsurgery.metrics.registry import METRICS
from tests.evaluate.limits import check_limits
from tests.helpers.json_lines import write_json_lines
from tests.helpers.vocabularies import tokenizer

DOCUMENT = "Mary {Smith} moved to Oslo in 1950. " * 9
QUESTION = {"Q": "Where did Mary move?", "A": "She moved to Oslo.", "S": ["Mary moved."]}
CLOZE = {"Q": "<mask-0> moved to <mask-1>.", "A": {"<mask-0>": "Mary Smith", "<mask-1>": "Oslo"}, "S": "Mary moved."}
ROWS = {
    "shortdep_qa": {"qa_pairs": str([QUESTION, QUESTION]), "output": "none"},
    "longdep_qa": {"qa_pairs": str([{**QUESTION, "type": "timeline_reorder"}]), "output": "None"},
    "longdep_summarization": {"qa_pairs": "none", "question": "none", "output": "We study how Mary moved."},
    "shortdep_cloze": {"qa_pairs": str([CLOZE]), "output": "None"},
}
# the Hub's rows have one question each
ON_HUB = {
    "shortdep_qa": {"question": QUESTION["Q"], "answer": QUESTION["A"]},
    "longdep_qa": {"question": QUESTION["Q"], "answer": QUESTION["A"]},
    "longdep_summarization": {"question": "", "answer": "We study how Mary moved."},
    "shortdep_cloze": {"question": CLOZE["Q"], "answer": ["Mary Smith", "Oslo"]},
}
SPELT = tokenizer("bytes", [DOCUMENT, *(asked["prompt"] for asked in TASKS.values())])
READER = Reader(SPELT, 4000, len(SPELT))


def write(folder, task, *rows):
    return write_json_lines(folder / f"{task}.jsonl", rows)


def samples(source, reader=READER, **options):
    return list(LoogleTask(str(source), **options).samples(reader))


@pytest.mark.parametrize("task", ROWS)
def test_files_and_the_hub_ask_the_same(tmp_path, task):
    assert ROWS.keys() == TASKS.keys()
    first, *_ = samples(write(tmp_path, task, {"input": DOCUMENT, "title": "Mary", **ROWS[task]}))
    [other] = samples(write(tmp_path, task, {"context": DOCUMENT, "doc_id": "1", **ON_HUB[task]}))
    assert first.tokens.tolist() == other.tokens.tolist()
    assert (first.task, first.limit) == (f"loogle/{task}", TASKS[task]["limit"])
    assert (first.metrics, first.answers, first.choices) == (other.metrics, other.answers, other.choices)
    said = SPELT.decode(first.tokens)
    assert DOCUMENT in said
    assert ("Where did Mary move?" in said) == ("qa" in task)
    assert all(METRICS[metric]("", first.answers, first.choices) == 0 for metric in first.metrics)


def test_questions_of_a_row_are_asked_one_by_one(tmp_path):
    for task in ROWS:
        write(tmp_path, task, {"input": DOCUMENT, **ROWS[task]})
    made = samples(tmp_path)
    assert [sample.task for sample in made] == ["loogle/shortdep_qa"] * 2 + [f"loogle/{task}" for task in [*TASKS][1:]]
    assert [sample.name for sample in made[:2]] == ["0/0", "0/1"]
    assert made[2].facts == {"type": "timeline_reorder"}
    assert [METRICS[metric]("She moved to Bergen.", made[0].answers, ()) for metric in made[0].metrics] == [0.75, 0.75]


@pytest.mark.parametrize(
    ("said", "exact", "partial"),
    [
        ('{"<mask-0>": "Mary Smith", "<mask-1>": "Oslo"}', 1, 1),
        ("{'<mask-0>': 'Mary', '<mask-1>': 'Oslo'}", 0.5, 1),
        ("{'<mask-1>': 'Bergen'}", 0, 0),
        ("{'<mask-0>': 3, 4: []}", 0, 0),
        ("Mary Smith, Oslo", 0, 0),
        ("['Oslo']", 0, 0),
        ("(" * 5000, 0, 0),
    ],
)
def test_clozes_are_measured_mask_by_mask(said, exact, partial):
    right = tuple(CLOZE["A"].values()), tuple(CLOZE["A"])
    assert (METRICS["cloze_exact"](said, *right), METRICS["cloze_partial"](said, *right)) == (exact, partial)


def test_recall_is_that_of_the_package():
    scorer = pytest.importorskip("rouge").Rouge()
    pairs = [("she moved to Oslo. In 1950", "Mary moved to Oslo. That was in 1950 or so"), ("a b a. c", "c a b. a a")]
    for said, right in pairs:
        [expected] = scorer.get_scores(said, right)
        for metric, name in (("distinct_word_recall", "rouge-1"), ("rouge_l_recall", "rouge-l")):
            assert METRICS[metric](said, [right], ()) == pytest.approx(expected[name]["r"])


def test_the_benchmarks_own_prompts_can_be_used(tmp_path):
    prompts = tmp_path / "task2prompt.json"
    prompts.write_text(json.dumps({"shortdep_cloze": "{{'<mask-0>'}} {input} Q: {Q}"}))
    path = write(tmp_path, "shortdep_cloze", {"input": "{Q}", **ROWS["shortdep_cloze"]})
    [sample] = samples(path, prompts=str(prompts))
    assert SPELT.decode(sample.tokens) == "<s>{'<mask-0>'} {Q} Q: <mask-0> moved to <mask-1>."


def test_a_limit_is_of_each_task(tmp_path):
    for task in ("shortdep_qa", "longdep_qa"):
        write(tmp_path, task, *[{"input": DOCUMENT, **ROWS[task]}] * 4)
    check_limits(LoogleTask(str(tmp_path)), READER)


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("longdep_qa", {"input": 3}, 'longdep_qa.jsonl, row 2: "input" or "context" must be text, the document'),
        ("longdep_qa", {"qa_pairs": [{"Q": "", "A": "x"}]}, 'row 2: a question, "Q" or "question", must be text, got'),
        ("longdep_qa", {"qa_pairs": "[{"}, 'longdep_qa.jsonl, row 2: "qa_pairs" must be a list of questions'),
        ("longdep_qa", {"qa_pairs": "open('x')"}, 'longdep_qa.jsonl, row 2: "qa_pairs" must be a list of questions'),
        (
            "longdep_qa",
            {"qa_pairs": [{"Q": "?"}]},
            'row 2: an answer, "A", "answer" or "output", must be text, got None',
        ),
        ("shortdep_cloze", {"qa_pairs": [QUESTION]}, 'row 2: the answer to a cloze, "A" or "answer", must give a name'),
    ],
)
def test_malformed_rows_are_named(tmp_path, task, row, message):
    good = {"input": DOCUMENT, **ROWS[task]}
    write(tmp_path, task, good, {**good, **row})
    with pytest.raises(TextError) as raised:
        samples(tmp_path)
    assert message in str(raised.value)
