"""LongBench's questions, in prompts of our own or of a file."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from kvsurgery.errors import KVSurgeryError, TextError
from kvsurgery.evaluate.sample import Reader
from kvsurgery.evaluate.tasks.longbench import DATASETS, EXTENDED, LongBenchTask
from kvsurgery.metrics.registry import METRICS
from tests.evaluate.limits import check_limits
from tests.helpers.json_lines import write_json_lines
from tests.helpers.vocabularies import KINDS, TURN, tokenizer

SHARED = Path(os.environ.get("KVSURGERY_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "longbench"
ROW = {
    "input": "Where is it?",
    "context": "It is {here}. " * 20,
    "answers": ["here"],
    "length": 60,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "1",
}
CLASSES = ["Place", "Other place"]
TEXTS = [ROW["context"], ROW["input"], *(asked["prompt"] for asked in DATASETS.values())]
SPELT = tokenizer("bytes", TEXTS)
READER = Reader(SPELT, 4000, len(SPELT))


def write(folder, *rows, name="hotpotqa.jsonl"):
    return write_json_lines(folder / name, ({**ROW, "dataset": name.split(".")[0], **row} for row in rows))


def samples(source, reader=READER, **options):
    return list(LongBenchTask(str(source), **options).samples(reader))


def test_a_prompt_has_the_context_and_then_the_question(tmp_path):
    write(tmp_path, {}, {"answers": ["here", "there"]})
    first, second = samples(tmp_path)
    assert SPELT.decode(first.tokens) == (
        "<s>Here are several passages. It takes more than one of them to answer the question at the end.\n\n"
        f"{ROW['context']}\n\nWrite the answer alone, in a few words.\n\nQuestion: Where is it?\nAnswer:"
    )
    assert (first.task, first.name, first.metric, first.limit) == ("longbench/hotpotqa", "0", "qa_f1", 32)
    assert (first.facts, second.name, second.answers) == ({}, "1", ("here", "there"))


def test_every_dataset_has_a_prompt_a_metric_and_a_limit(tmp_path):
    assert len(DATASETS) == 21
    assert set(EXTENDED) <= set(DATASETS)
    limits = {32: 7, 64: 6, 128: 4, 512: 4}
    assert {limit: [one["limit"] for one in DATASETS.values()].count(limit) for limit in limits} == limits
    chinese = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
    for name, asked in DATASETS.items():
        assert asked["metric"] in METRICS
        assert asked["prompt"].count("{context}") == 1
        # what is asked comes after what it is about; what is to be summed up is asked the same in every row
        after = asked["prompt"].partition("{context}")[2]
        assert ("{input}" in after) == (name not in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc"))
        assert bool(re.search(r"[\u4e00-\u9fff]", asked["prompt"])) == (name in chinese)
        if not asked["metric"].endswith("_zh"):
            write(tmp_path, {"all_classes": CLASSES}, name=f"{name}.jsonl")
    made = samples(tmp_path)
    assert [sample.task for sample in made] == [
        f"longbench/{name}" for name, asked in DATASETS.items() if not asked["metric"].endswith("_zh")
    ]


@pytest.mark.parametrize("dataset", ["qasper", "trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"])
def test_examples_and_code_are_no_turns(tmp_path, dataset):
    spelt = tokenizer("bytes", TEXTS, chat=True)
    write(tmp_path, {"all_classes": CLASSES}, name=f"{dataset}.jsonl")
    [sample] = samples(tmp_path, Reader(spelt, 4000, len(spelt)))
    said = spelt.decode(sample.tokens)
    assert said.endswith(f"{TURN}assistant\n") == (dataset == "qasper") == (TURN in said)
    assert said.count("<s>") == 1


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longest", [200, 201, 333])
def test_long_prompts_lose_their_middle(tmp_path, kind, chat, longest):
    words = " ".join(f"w{number}" for number in range(1000))
    spelt = tokenizer(kind, [*TEXTS, words], chat=chat)
    write(tmp_path, {"context": words})
    [sample] = samples(tmp_path, Reader(spelt, longest, len(spelt)))
    said = spelt.decode(sample.tokens)
    whole = [int(number) for number in re.findall(r"\bw(\d+)", said)]
    assert longest - sample.limit - 4 <= len(sample.tokens) <= longest - sample.limit
    assert said.index("Here are several passages") < said.index("w0 w1 w2")
    assert "Where is it?" in said[said.index("w999") :]
    # as many of the first words as of the last, about, but for what the prompt takes
    gap = next(place for place, number in enumerate(whole) if number != place)
    assert whole[gap + 1 :] == list(range(1000 - len(whole[gap + 1 :]), 1000))


def test_a_limit_is_of_each_dataset(tmp_path):
    mixed = [{"dataset": name} for name in ("qasper", "hotpotqa", "hotpotqa", "qasper", "lcc", "qasper", "qasper")]
    check_limits(LongBenchTask(str(write(tmp_path, *mixed))), READER)
    assert len(samples(tmp_path / "hotpotqa.jsonl", datasets=("qasper",))) == 4


def test_the_context_is_the_models(tmp_path):
    write(tmp_path, {"context": "It is here. " * 3000})
    [sample] = samples(tmp_path)
    assert READER.max_context - 4 <= len(sample.tokens) + sample.limit <= READER.max_context
    with pytest.raises(TextError, match="a prompt does not fit into 0 tokens"):
        samples(tmp_path, Reader(SPELT, 32, len(SPELT)))


def test_longbench_e_is_shown_by_length(tmp_path):
    rows = [{"length": length} for length in (3999, 4000, 7999, 8000)]
    write(tmp_path, *rows, name="hotpotqa_e.jsonl")
    write(tmp_path, {})
    made = samples(tmp_path, extended=True)
    assert [sample.facts for sample in made] == [{"words": name} for name in ("0-4k", "4-8k", "4-8k", "8k+")]
    assert {sample.task for sample in made} == {"longbench-e/hotpotqa"}


def test_one_file_of_several_datasets(tmp_path):
    path = write(tmp_path, {"dataset": "qasper"}, {"dataset": "lcc"}, {"dataset": "qasper"}, name="all.jsonl")
    made = [(sample.task, sample.name) for sample in samples(path)]
    assert made == [("longbench/qasper", "0"), ("longbench/lcc", "0"), ("longbench/qasper", "1")]
    assert len(samples(path, datasets=("lcc",))) == 1


def test_classes_are_what_there_is_to_choose_from(tmp_path):
    write(tmp_path, {"all_classes": CLASSES, "answers": ["Place"]}, name="trec.jsonl")
    [sample] = samples(tmp_path)
    assert METRICS[sample.metric]("Place\nQuestion: Other place", sample.answers, sample.choices) == 1
    assert METRICS[sample.metric]("Other place", sample.answers, sample.choices) == 0


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({}, {"datasets": ("squad", "lcc")}, "LongBench has no squad; it has narrativeqa, qasper, "),
        ({}, {"datasets": ("lcc",)}, r"has no file of LongBench that is called lcc.jsonl"),
        ({}, {"extended": True}, r"has no file of LongBench that is called qasper_e.jsonl"),
        ({"dataset": "squad"}, {}, "\"dataset\" 'squad' is none of narrativeqa, "),
        ({"context": None}, {}, r'hotpotqa.jsonl, line 1: "context" must be text, got None'),
        ({"answers": "here"}, {}, "line 1: \"answers\" must be a list of texts, got 'here'"),
        ({"answers": []}, {}, r'row 1 of hotpotqa needs "answers", and classes "all_classes"'),
        ({"dataset": "trec"}, {}, r'row 1 of trec needs "answers", and classes "all_classes"'),
    ],
)
def test_what_cannot_be_asked(tmp_path, row, options, message):
    write(tmp_path, row)
    with pytest.raises(TextError, match=message):
        samples(tmp_path, **options)


def test_chinese_needs_jieba_before_a_model_answers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    write(tmp_path, {}, name="vcsum.jsonl")
    with pytest.raises(KVSurgeryError, match="answers in Chinese need jieba"):
        samples(tmp_path)


class TestPromptsOfAFile:
    """Such as LongBench publishes."""

    def test_they_are_filled_in_as_they_are(self, tmp_path):
        path = tmp_path / "prompts.json"
        path.write_text(json.dumps({"hotpotqa": "{{Q}} {input}\nT {context}\n{input}", "other": "{context}"}))
        write(tmp_path, {"input": "{context} {x}?"})
        [sample] = samples(tmp_path, prompts=str(path))
        asked = "{context} {x}?"
        assert SPELT.decode(sample.tokens) == f"<s>{{Q}} {asked}\nT {ROW['context']}\n{asked}"
        assert (sample.metric, sample.limit) == ("qa_f1", 32)

    def test_metrics_and_limits_are_the_same(self, tmp_path):
        path = tmp_path / "prompts.json"
        path.write_text(json.dumps({name: asked["prompt"] for name, asked in DATASETS.items()}))
        for name in ("qasper", "trec", "samsum", "lcc"):
            write(tmp_path, {"all_classes": CLASSES}, name=f"{name}.jsonl")
        for one, other in zip(samples(tmp_path), samples(tmp_path, prompts=str(path)), strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert (one.task, one.metric, one.limit) == (other.task, other.metric, other.limit)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "cannot read .*prompts.json: No such file"),
            ("{", "prompts.json is not JSON: "),
            ("[]", "must be a JSON object of prompts by dataset, such as LongBench's dataset2prompt.json"),
            ('{"hotpotqa": 3}', "must be a JSON object of prompts by dataset"),
            ('{"qasper": "{context}"}', "prompts.json has no prompt for hotpotqa"),
            ('{"lcc": "{context"}', "the braces of lcc are not fields: "),
            ('{"lcc": "{input}"}', r"the prompt for lcc must have \{context\}, and no field but that and \{input\}"),
            ('{"lcc": "{context} {answers}"}', "the prompt for lcc must have "),
            ('{"lcc": "{context} {}"}', "the prompt for lcc must have "),
            ('{"lcc": "{context} {context:>999999999}"}', "the prompt for lcc must have "),
            ('{"lcc": "{context} {input!r}"}', "the prompt for lcc must have "),
            ('{"lcc": "{context} {input.__class__}"}', "the prompt for lcc must have "),
        ],
    )
    def test_what_is_no_such_file(self, tmp_path, content, message):
        path = tmp_path / "prompts.json"
        if content is not None:
            path.write_text(content)
        write(tmp_path, {})
        with pytest.raises(TextError, match=message) as raised:
            samples(tmp_path, prompts=str(path))
        assert "\n" not in str(raised.value)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no {SHARED}: set KVSURGERY_SHARED to a folder with LongBench's rows")
def test_published_rows():
    for sample in samples(SHARED):
        assert sample.task == "longbench/multi_news"
        assert len(sample.tokens) + sample.limit <= READER.max_context
        assert METRICS[sample.metric](sample.answers[0], sample.answers, ()) == pytest.approx(1)
