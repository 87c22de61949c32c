"""A model's own long answers: what is generated, kept, read again, and which tokens gates are trained on."""

import json

import pytest
import torch

from kvsurgery.errors import OutputError, ProfileError
from kvsurgery.measure.own_answers import Answer, OwnAnswers, read_answers
from kvsurgery.measure.prompts import Contexts
from kvsurgery.text.chat import turn_tokens
from kvsurgery.text.long_tasks import LIST_TASK, SUM_TASK, long_task
from tests.helpers.families import stock
from tests.helpers.measured_models import measured_model
from tests.helpers.vocabularies import tokenizer

CONTEXTS = Contexts(460, 480, seed=3)


@pytest.fixture(scope="module")
def measured():
    model = stock("llama", num_hidden_layers=1, vocab_size=600, max_position_embeddings=512)
    return measured_model(
        model.eval(), tokenizer("bytes", [SUM_TASK, LIST_TASK, *map(task, range(4))], size=600, chat=True)
    )


def task(number):
    return long_task(number, 3)


@pytest.fixture(scope="module")
def kept(measured, tmp_path_factory):
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    counts = []
    made = OwnAnswers.of(measured, CONTEXTS, 3, path, lambda done, *_: counts.append(done))
    assert counts == [1, 2, 3]
    return path, made


def test_answers_fill_the_contexts(measured, kept):
    _, made = kept
    assert [each.prompt for each in made.answers] == [turn_tokens(measured.text, task(i)).tolist() for i in range(3)]
    for each in made.answers:
        assert CONTEXTS.shortest <= len(each.prompt + each.answer) <= CONTEXTS.longest
        assert measured.model.generation_config.eos_token_id not in each.answer


def test_the_seed_decides_the_answers(measured, kept):
    _, made = kept
    again = OwnAnswers.of(measured, CONTEXTS, 3)
    assert again.answers == made.answers
    other = OwnAnswers.of(measured, Contexts(460, 480, seed=4), 3)
    assert [each.answer for each in other.answers] != [each.answer for each in made.answers]


def test_a_file_is_read_again(measured, kept):
    path, made = kept
    again = OwnAnswers.of(measured, CONTEXTS, 99, path)
    assert again == made
    assert again.facts == made.facts
    assert again.facts["answers"] == 3


def test_targets_are_the_answer(kept):
    _, made = kept
    for step in range(4):
        tokens, targets = made(step, 0)
        assert tokens.shape == targets.shape
        assert tokens.shape[1] <= CONTEXTS.length(step)
        whole = next(each for each in made.answers if each.prompt == tokens[0, ~targets[0]].tolist())
        told = tokens[0, targets[0]].tolist()
        assert told == whole.answer[: len(told)]
        assert torch.equal(tokens, made(step, 0)[0])


def test_tasks_alternate_and_repeat():
    assert long_task(0, 1) == long_task(0, 1) != long_task(2, 1)
    assert long_task(0, 1).startswith("Add these numbers")
    assert long_task(1, 1).startswith("These people")
    assert long_task(1, 1) != long_task(1, 2)


def test_contexts_without_room(measured):
    with pytest.raises(ProfileError, match="tokens, without an answer; give a larger `min_context`"):
        OwnAnswers.of(measured, Contexts(20, 30), 2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: expected"),
        ('{"prompt": [1]}', "line 2: expected"),
        ('{"prompt": [1], "answer": [-1]}', "line 2: expected"),
        ('{"prompt": [1], "answer": ["a"]}', "line 2: expected"),
        ('{"prompt": 1, "answer": [1]}', "line 2: expected"),
        ("[" * 100_000, "line 2: expected"),
    ],
)
def test_files_that_hold_no_answers(tmp_path, line, words):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt": [1], "answer": [2]}\n' + line)
    with pytest.raises(ProfileError, match=words):
        read_answers(path)


def test_answers_of_another_model(measured, tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(Answer([5], [600] * 470)._asdict()))
    with pytest.raises(ProfileError, match="has tokens that random does not have"):
        OwnAnswers.of(measured, CONTEXTS, 1, path)
    path.write_text(json.dumps(Answer([5], [6] * 20)._asdict()))
    with pytest.raises(ProfileError, match="no answer has 460 tokens"):
        OwnAnswers.of(measured, CONTEXTS, 1, path)


def test_a_file_that_cannot_be_written(measured, tmp_path):
    with pytest.raises(OutputError):
        OwnAnswers.of(measured, CONTEXTS, 1, tmp_path / "nowhere" / "answers.jsonl")
