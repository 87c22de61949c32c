"""Tasks of lm-eval: what is asked and scored is as lm-eval has it, and what cannot show a cache is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from kvsurgery.errors import KVSurgeryError, TextError
from kvsurgery.evaluate.checkpoint import reader_of
from kvsurgery.evaluate.runner import Options, evaluate
from kvsurgery.evaluate.sample import Reader
from kvsurgery.evaluate.tasks import lm_eval
from kvsurgery.evaluate.tasks.lm_eval import LmEvalTask, without_middle
from tests.evaluate.limits import check_limits
from tests.evaluate.recall import MODEL
from tests.helpers.json_lines import write_json_lines
from tests.helpers.tiny_recall import task as recall
from tests.helpers.vocabularies import tokenizer

HOLDS = {"metadata": {"version": 3.0, "kvsurgery_context": "context"}}
TINY = {
    "output_type": "generate_until",
    "test_split": "train",
    "doc_to_text": "{{context}} {{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": [" ."], "max_gen_toks": 4, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
TEXTS = ["It is here, said Mary. Where is it? The answer is there. "]
SPELT = tokenizer("bytes", TEXTS)
CHAT = tokenizer("bytes", TEXTS, chat=True)
READER = Reader(SPELT, 4000, len(SPELT))
ROWS = [{"context": f"It is in {place}.", "question": "Where is it?", "answer": place} for place in ("Oslo", "Rome")]


@pytest.fixture
def library() -> None:
    pytest.importorskip("lm_eval", reason="pip install 'kvsurgery[eval]'")


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., LmEvalTask]:
    """A task "local" of a folder, by its rows, with changes to its YAML."""

    def make(rows: Any = ROWS, changes: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> LmEvalTask:
        data = write_json_lines(tmp_path / "rows.jsonl", rows)
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(data), "cache_dir": str(tmp_path / "c")}}
        (tmp_path / "local.yaml").write_text(json.dumps({"task": "local", **source, **TINY, **changes}))
        return LmEvalTask(("local",), include=tmp_path, **options)

    return make


@pytest.mark.parametrize(
    ("release", "words"), [("", "it is not installed"), ("0.4.12", "0.4.12 is"), ("0.5.1", "0.5.1 is installed: pip")]
)
def test_another_release_is_refused(release: str, words: str) -> None:
    with pytest.raises(KVSurgeryError, match=words):
        LmEvalTask(("local",), release=release).check()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"names": None}, "must name tasks"),
        ({"include": Path("nowhere")}, "no such folder"),
        ({"metadata": "{"}, "is not JSON"),
        ({"metadata": "[1]"}, "must be a JSON object"),
    ],
)
def test_settings_are_checked_before_lm_eval_is_asked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TextError, match=words):
        LmEvalTask(**{"names": ("local",), **options}, release="0.4.13").check()


@pytest.mark.parametrize("room", [2, 3, 9, 10, 11])
def test_what_is_too_long_loses_its_middle(room: int) -> None:
    kept = without_middle(np.arange(10), room).tolist()
    assert len(kept) == min(room, 10)
    assert (kept[0], kept[-1]) == (0, 9)
    assert sum(np.diff(kept) != 1) == (room < 10)


def test_a_context_is_all_up_to_its_end() -> None:
    assert lm_eval._split("Read. {a} Where?", " {a}\n", "row") == ("Read. {a}", " Where?")
    for prompt, context in (("a b", "c"), ("a a b", "a"), ("b a ", "a"), ("a b", " ")):
        with pytest.raises(TextError, match="holds its context once, and a question after it"):
            lm_eval._split(prompt, context, "row")


@pytest.mark.usefixtures("library")
def test_prompts_are_those_of_lm_eval(made: Callable[..., LmEvalTask]) -> None:
    task = made(changes={"description": "Read:\n", "gen_prefix": "The answer is", "num_fewshot": 0})
    [theirs] = task._load(READER).values()
    theirs.build_all_requests()
    for sample, instance in zip(task.samples(READER), theirs.instances, strict=True):
        assert SPELT.decode(sample.tokens, skip_special_tokens=True) == instance.args[0]
    chat = next(task.samples(Reader(CHAT, 4000, len(CHAT))))
    assert CHAT.decode(chat.tokens).endswith("assistant\nThe answer is")
    assert (sample.task, sample.limit, sample.stops, sample.answers) == ("lm_eval/local", 4, (" .",), ("Rome",))
    check_limits(made(ROWS * 3), READER)


@pytest.mark.usefixtures("library")
def test_the_same_tokens_are_asked_later(made: Callable[..., LmEvalTask]) -> None:
    for spelt in (SPELT, CHAT):
        reader = Reader(spelt, 4000, len(spelt))
        known = list(made(changes=HOLDS).samples(reader))
        later = list(made(changes=HOLDS, ask_later=True).samples(reader))
        assert [spelt.decode(sample.tokens) for sample in later] == [spelt.decode(sample.tokens) for sample in known]
        for sample, row in zip(later, ROWS, strict=True):
            assert spelt.decode(sample.tokens[: sample.context]).endswith(row["context"])
            assert sample.facts == {"version": "3.0"}
    short = Reader(SPELT, 40, len(SPELT))
    long = made([{**ROWS[0], "context": "It is here. " * 40 + "Yes."}], HOLDS, ask_later=True)
    [cut] = long.samples(short)
    assert len(cut.tokens) + cut.limit == 40
    assert SPELT.decode(cut.tokens[cut.context :]) == " Where is it?"


@pytest.mark.usefixtures("library")
def test_scores_are_those_of_the_filters_and_metrics(made: Callable[..., LmEvalTask]) -> None:
    filters = [
        {"name": "strict", "filter": [{"function": "take_first"}]},
        {"name": "city", "filter": [{"function": "regex", "regex_pattern": "in (\\w+)"}, {"function": "take_first"}]},
    ]
    sample = next(made(changes={"filter_list": filters}).samples(READER))
    assert sample.grade is not None
    assert sample.metrics == ("exact_match,strict", "exact_match,city")
    assert sample.grade("in Oslo, I think") == {"exact_match,strict": 0, "exact_match,city": 1}
    assert sample.grade("Oslo") == {"exact_match,strict": 1, "exact_match,city": 0}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"output_type": "multiple_choice", "doc_to_choice": ["a", "b"], "doc_to_target": 0}, {}, "reads no cache"),
        ({}, {"ask_later": True}, "add `metadata: {kvsurgery_context: FIELD}`"),
        ({"generation_kwargs": {"do_sample": True, "temperature": 1.0}}, {}, "ours are greedy"),
        ({"unsafe_code": True}, {}, "runs the code"),
        ({"metric_list": [{**TINY["metric_list"][0], "higher_is_better": False}]}, {}, "a lower exact_match"),
        ({"metric_list": [{**TINY["metric_list"][0], "aggregation": "median"}]}, {}, "no mean over answers"),
        ({"metric_list": [{"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}]}, {}, "from 0 to 1"),
        ({"dataset_kwargs": {"data_files": "nowhere.jsonl"}}, {}, "lm-eval cannot load local: "),
    ],
)
def test_what_cannot_be_shown_is_refused(
    made: Callable[..., LmEvalTask], changes: Any, options: Any, words: str
) -> None:
    with pytest.raises(KVSurgeryError, match=words) as refused:
        list(made(changes=changes, **options).samples(READER))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_unknown_names_are_refused() -> None:
    with pytest.raises(TextError, match="lm-eval has no nothing_of_the_kind"):
        list(LmEvalTask(("nothing_of_the_kind", "longbench_v2")).samples(READER))


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_a_budget_that_is_enough_for_a_known_question_forgets_when_it_comes_later(
    made: Callable[..., LmEvalTask], budgeted: Path, tmp_path: Path
) -> None:
    """The original, which forgets nothing, answers both."""
    spelt, questions = reader_of(MODEL).tokenizer, recall.prompts(6, 8, 160)
    rows = []
    for tokens, answer in zip(questions.tokens[:, 1:].tolist(), questions.answers.tolist(), strict=True):
        context, question, right = (spelt.decode(part) for part in (tokens[:-2], tokens[-2:], answer))
        rows.append({"context": context, "question": question, "answer": right})
    models = {"original": MODEL, "converted": budgeted}
    scores = {}
    for later in (False, True):
        task = made(rows, HOLDS, ask_later=later)
        results = evaluate(models, {"lm_eval": task}, tmp_path / str(later), Options(), device="cpu")
        [result] = results.tasks
        scores[later] = {name: score.mean for name, score in result.scores.items()}
    assert scores[False]["original"] == scores[True]["original"] == 1
    assert scores[False]["converted"] == 1 > scores[True]["converted"]
    [settings] = [json.loads((tmp_path / "True" / "settings.json").read_text())]
    assert settings["tasks"]["lm_eval"]["ask_later"] is True
    assert settings["tasks"]["lm_eval"]["release"]


DOCUMENT = "Mary Smith moved to Oslo. " * 3
LOOGLE = {
    "loogle_shortdep_qa": {"question": "Where?", "answer": "She moved to Oslo."},
    "loogle_longdep_qa": {"question": "Where?", "answer": "She moved to Oslo."},
    "loogle_longdep_summarization": {"question": "", "answer": "We study how Mary moved."},
    "loogle_shortdep_cloze": {"question": "<mask-0> moved to <mask-1>.", "answer": ["Mary Smith", "Oslo"]},
}
CHOICES = {f"choice_{letter}": f"It is {letter}." for letter in "ABCD"}
SHIPPED = {
    **{name: ({"context": DOCUMENT, **row}, str(row["answer"])) for name, row in LOOGLE.items()},
    "longbench_v2": (
        {"_id": "1", "context": DOCUMENT, "question": "Which?", **CHOICES, "answer": "B"},
        "**The correct answer is (B)**.",
    ),
}
SHIPPED["loogle_shortdep_cloze"] = (
    SHIPPED["loogle_shortdep_cloze"][0],
    "{'<mask-0>': 'Mary Smith', '<mask-1>': 'Oslo'}",
)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_tasks_of_local_rows(tmp_path: Path, name: str) -> None:
    """As a user reads local files: a YAML that includes the shipped one."""
    row, right = SHIPPED[name]
    data = write_json_lines(tmp_path / "rows.jsonl", [row])
    source = {"data_files": str(data), "cache_dir": str(tmp_path / "c")}
    local = f"include: {lm_eval.SHIPPED / name}.yaml\ntask: mine\ndataset_path: json\ndataset_name: null\n"
    local += f"test_split: train\ndataset_kwargs: {json.dumps(source)}\n"
    (tmp_path / "mine.yaml").write_text(local)
    [sample] = LmEvalTask(("mine",), include=tmp_path, ask_later=True).samples(READER)
    assert SPELT.decode(sample.tokens[: sample.context]).endswith(DOCUMENT.strip())
    assert (row["question"] or "Summarization:") in SPELT.decode(sample.tokens[sample.context :])
    assert sample.grade is not None
    assert {*sample.grade(right).values()} == {1.0}
    assert {*sample.grade("Bergen").values()} == {0.0}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("name", "later"), [("kvsurgery_passkey", True), ("kvsurgery_cloze", False)])
def test_shipped_tasks_that_are_made(tmp_path: Path, name: str, later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # whose name lm-eval asks the Hub for, again and again
    monkeypatch.setattr("lm_eval.models.dummy.DummyLM.tokenizer", None)
    text = tmp_path / "text.txt"
    text.write_text("It is here, said Mary. Where is it? The answer is here, said Mary. " * 90)
    options = {"max_seq_lengths": [300, 500], "text": str(text)}
    READER.tokenizer.save_pretrained(tmp_path / "model")
    reader = Reader(SPELT, 4000, len(SPELT), checkpoint=tmp_path / "model")
    samples = list(LmEvalTask((name,), metadata=json.dumps(options), ask_later=later, rows=52).samples(reader))
    assert 150 < len(samples[0].tokens) <= 300 < len(samples[-1].tokens) <= 500
    assert _scores_in_lm_eval(name, {"pretrained": str(reader.checkpoint), **options}) == {0.0}
    for sample in samples:
        [right] = sample.answers
        prompt = SPELT.decode(sample.tokens)
        assert right in prompt
        assert sample.grade is not None
        assert {*sample.grade(f" {right}.").values()} == {1.0}
        assert {*sample.grade("9 other").values()} == {0.0}


def _scores_in_lm_eval(name: str, metadata: dict[str, Any]) -> set[float]:
    """The scores of a shipped task in a run of lm-eval itself, of a model that answers nothing of sense."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(lm_eval.SHIPPED), include_defaults=False, metadata=metadata)
    found = simple_evaluate("dummy", tasks=[name], task_manager=manager, limit=2, bootstrap_iters=0)
    return {score for key, score in found["results"][name].items() if "," in key and "stderr" not in key}
