"""RULER's questions: asked of documents, whose files are SQuAD's and HotpotQA's."""

import json
import random
import re

import pytest

from kvsurgery.errors import TextError
from kvsurgery.evaluate.tasks.ruler.puzzles import WORDS, question
from kvsurgery.evaluate.tasks.ruler.questions import read_hotpot, read_squad
from kvsurgery.evaluate.tasks.ruler.task import TASKS, RulerTask
from tests.evaluate.ruler_samples import MADE, reader, samples, texts


@pytest.fixture
def files(tmp_path):
    """Questions as SQuAD and HotpotQA publish them."""
    rng = random.Random(0)

    def story(count):
        return " ".join(rng.choices(WORDS["nouns"], k=count))

    articles = [
        {
            "title": f"article {article}",
            "paragraphs": [
                {
                    "context": f"{story(40)} fact{article}x{place} {story(40)}",
                    "qas": [
                        {"question": f"Which fact {article} {place}?", "answers": [{"text": f"fact{article}x{place}"}]},
                        {"question": "None?", "is_impossible": True, "answers": []},
                    ],
                }
                for place in range(3)
            ],
        }
        for article in range(20)
    ]
    entries = [
        {
            "question": f"Which truth {number}?",
            "answer": f"truth{number}",
            "context": [[f"title {number} {place}", [story(20), f" truth{number}. "]] for place in range(2)],
        }
        for number in range(30)
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
    (tmp_path / "hotpot.json").write_text(json.dumps(entries))
    return {"squad": str(tmp_path / "squad.json"), "hotpot": str(tmp_path / "hotpot.json")}


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
@pytest.mark.parametrize("length", [700, 6000])
def test_the_answer_is_in_a_document(files, task, length):
    whom = reader()
    for number, sample in enumerate(samples(whom, (length,), (task,), count=3, **files)):
        text = whom.tokenizer.decode(sample.tokens)
        assert 0.99 * length <= len(sample.tokens) + sample.limit <= length
        context, _, asked = text.rpartition("\n\nQuestion: ")
        documents = re.split(r"Document \d+:\n", context)[1:]
        assert re.findall(r"Document (\d+):\n", context) == [str(place + 1) for place in range(len(documents))]
        holding = [document for document in documents if sample.answers[0] in document]
        assert len(holding) >= (1 if task == "qa_1" else 2)
        question = f"Which fact 0 {number}?" if task == "qa_1" else f"Which truth {number}?"
        assert asked == f"{question} Answer:"
        assert (sample.limit, sample.metric) == (32, "string_match_part")


def test_the_smallest_prompt_has_the_answer(files):
    for read, path in ((read_squad, files["squad"]), (read_hotpot, files["hotpot"])):
        for seed in range(5):
            puzzle = question(random.Random(seed), read(path), seed)
            assert puzzle.answers[0] in puzzle.write(puzzle.min_units, 0)


def test_paragraphs_of_the_same_article_come_first(files):
    [text] = texts(reader(), (1300,), ("qa_1",), **files)
    assert set(re.findall(r"fact(\d+)x", text)) > {"0"}
    assert {"fact0x0", "fact0x1", "fact0x2"} <= set(re.findall(r"fact\d+x\d+", text))


def test_questions_are_asked_again_where_there_are_fewer(tmp_path):
    context = [[f"title {place}", ["A passage. "]] for place in range(9)]
    (tmp_path / "one.json").write_text(json.dumps([{"question": "What?", "answer": "A", "context": context}]))
    first, again = samples(reader(), (700,), ("qa_2",), count=2, hotpot=str(tmp_path / "one.json"))
    assert first.answers == again.answers == ("A",)
    assert first.tokens.tolist() != again.tokens.tolist()


def test_without_a_file_they_are_left_out(files):
    reason = "there are no questions without a file of SQuAD (`squad`)"
    assert RulerTask().left_out["qa_1"] == reason
    assert RulerTask(squad=files["squad"]).left_out.keys() == {"qa_2"}
    assert RulerTask(**files).left_out == {}
    assert [sample.task for sample in samples(reader(), (1300,))] == [f"ruler/{task}" for task in MADE]
    assert [sample.task for sample in samples(reader(), (1300,), **files)] == [f"ruler/{task}" for task in TASKS]
    with pytest.raises(TextError, match=re.escape(f"RULER's qa_1 cannot be made: {reason}")):
        samples(reader(), (2000,), ("qa_1",))


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("qa_1", "{", "is not JSON: "),
        ("qa_1", "[]", "is not in SQuAD's layout: "),
        ("qa_1", '{"data": [{"paragraphs": [{"context": "a"}]}]}', "is not in SQuAD's layout: 'qas' is missing"),
        (
            "qa_1",
            '{"data": [{"paragraphs": [{"context": 3}]}]}',
            "is not in SQuAD's layout: a text is empty, or is int",
        ),
        ("qa_1", '{"data": []}', "holds no questions with an answer"),
        ("qa_2", '{"data": []}', "is not in HotpotQA's layout: "),
        ("qa_2", '[{"context": [["a"]]}]', "is not in HotpotQA's layout: not enough values"),
        ("qa_2", '[{"question": "a", "answer": "", "context": []}]', "HotpotQA's layout: a text is empty"),
        ("qa_2", "[]", "holds no questions with an answer"),
    ],
)
def test_files_of_another_layout(tmp_path, task, content, message):
    (tmp_path / "questions.json").write_text(content)
    option = {"qa_1": "squad", "qa_2": "hotpot"}[task]
    with pytest.raises(TextError, match=message) as raised:
        samples(reader(), (2000,), (task,), **{option: str(tmp_path / "questions.json")})
    assert "\n" not in str(raised.value)
