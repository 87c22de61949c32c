"""MT-Bench's questions of two turns, and the file that a judge reads."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvsurgery.errors import TextError, UnsupportedModel
from kvsurgery.evaluate.results import Results
from kvsurgery.evaluate.runner import Options, evaluate
from kvsurgery.evaluate.sample import Conversation, Reader, Sample
from kvsurgery.evaluate.tasks.mt_bench import MTBenchTask
from kvsurgery.report import write_report
from kvsurgery.system.json_lines import read_lines
from tests.evaluate.limits import check_limits
from tests.evaluate.recall import MODEL
from tests.helpers.json_lines import write_json_lines
from tests.helpers.vocabularies import CHAT_TEMPLATE, TURN, tokenizer

ROW = {
    "question_id": 101,
    "category": "reasoning",
    "turns": ["Who is faster?", "And who is slower?"],
    "reference": ["She.", ""],
}
SPELT = tokenizer("bytes", ROW["turns"], chat=True)
READER = Reader(SPELT, 4000, len(SPELT))


def write(folder, *rows):
    return write_json_lines(folder / "question.jsonl", rows)


def samples(source, reader=READER, **options):
    return list(MTBenchTask(str(source), **options).samples(reader))


def test_turns_are_those_of_the_chat_template(tmp_path):
    [sample] = samples(write(tmp_path, ROW))
    assert (sample.task, sample.name, sample.metrics, sample.limit) == ("mt_bench", "101", (), 1024)
    turns = [{"role": "user", "content": ROW["turns"][0]}, {"role": "assistant", "content": "I am."}]
    turns.append({"role": "user", "content": ROW["turns"][1]})
    whole = SPELT.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    [later] = sample.conversation.later
    assert SPELT.decode(sample.tokens) + "I am." + SPELT.decode(later) == whole
    assert whole.count(TURN) == 4
    assert sample.positions == len(sample.tokens) + len(later) + 2 * 1024


def test_files_and_the_hub_ask_the_same(tmp_path):
    [one] = samples(write(tmp_path, ROW))
    hub = {"prompt": ROW["turns"], "prompt_id": 101, "category": "reasoning", "reference": ROW["reference"]}
    [other] = samples(write(tmp_path, hub))
    assert one.tokens.tolist() == other.tokens.tolist()
    assert (one.name, one.conversation.turns, one.facts) == (other.name, other.conversation.turns, other.facts)


def test_a_limit_is_of_the_first_rows(tmp_path):
    check_limits(MTBenchTask(str(write(tmp_path, *[{**ROW, "question_id": name} for name in range(5)]))), READER)


@pytest.mark.parametrize("row", [{"turns": []}, {"turns": "Who?"}, {"question_id": None}, {"reference": [3]}])
def test_malformed_rows_are_named(tmp_path, row):
    with pytest.raises(TextError, match=r'question.jsonl, row 2: "question_id" must be there, and "turns" and'):
        samples(write(tmp_path, ROW, {**ROW, **row}))


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE.replace("message['content']", "'-'")])
def test_a_conversation_needs_a_chat_template(tmp_path, template):
    spelt = tokenizer("bytes", ROW["turns"])
    spelt.chat_template = template
    with pytest.raises(UnsupportedModel, match="a conversation needs a chat template that shows its turns"):
        samples(write(tmp_path, ROW), Reader(spelt, 4000, len(spelt)))


@dataclass(frozen=True)
class Talk:
    """A conversation in the words of the bundled model."""

    def samples(self, reader, limit=None):
        for name in ("81", "82"):
            first, second = np.arange(20, 50, dtype=np.int64), np.arange(60, 66, dtype=np.int64)
            asked = Conversation(("Who?", "And then?"), (second,), ("She.",))
            yield Sample("talk", name, first, None, limit=3, conversation=asked, facts={"category": "writing"})


def test_answers_are_written_for_a_judge(full, tmp_path):
    noted = []
    models = {"original": MODEL, "converted": full}
    results = evaluate(models, {"talk": Talk()}, tmp_path, Options(batch=2), device="cpu", note=noted.append)
    assert results.tasks == Results.load(tmp_path).tasks == ()
    assert results.judged == {"talk": 2}
    one, other = (read_lines(tmp_path / f"talk-{name}.jsonl") for name in models)
    assert [line["choices"] for line in one] == [line["choices"] for line in other]
    assert len(one[0].pop("choices")[0]["turns"]) == 2
    asked = {"category": "writing", "questions": ["Who?", "And then?"], "reference": ["She."]}
    assert one[0] == {"question_id": 81, "model_id": "original", **asked}
    assert noted[1] == (
        f"talk has no score: answers of the original model for a judge are in {tmp_path / 'talk-original.jsonl'}"
    )
    write_report(tmp_path)


def test_questions_without_an_answer_are_counted(tmp_path):
    class Long(Talk):
        def samples(self, reader, limit=None):
            yield from (replace(sample, limit=5000) for sample in super().samples(reader, limit))

    noted = []
    results = evaluate({"original": MODEL}, {"talk": Long()}, tmp_path, Options(), device="cpu", note=noted.append)
    assert results.judged == {"talk": 0}
    assert results.left_out == {"talk": {"original: prompt and answer are beyond 4096 positions": 2}}
    assert Results.load(tmp_path) == results
    assert noted[-1].endswith("talk-original.jsonl (2 left out: prompt and answer are beyond 4096 positions)")
