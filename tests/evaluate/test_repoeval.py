"""RepoEval's unfinished files, and what completes them."""

import pytest

from kvsurgery.errors import KVSurgeryError, TextError
from kvsurgery.evaluate.sample import Reader
from kvsurgery.evaluate.tasks.repoeval import RepoEvalTask
from kvsurgery.metrics.registry import METRICS
from tests.evaluate.limits import check_limits
from tests.helpers.json_lines import write_json_lines
from tests.helpers.vocabularies import TURN, tokenizer

LINE, API = (f"{level}_level_completion_2k_context_codex.test.jsonl" for level in ("line", "api"))
ROW = {
    "prompt": "def read(path):\n    with open(path) as file:\n",
    "metadata": {
        "task_id": "huggingface_diffusers/0",
        "ground_truth": "        return file.read()\n",
        "fpath_tuple": ["huggingface_diffusers", "read.py"],
        "context_start_lineno": 0,
        "line_no": 2,
    },
}
SPELT = tokenizer("bytes", [ROW["prompt"]], chat=True)
READER = Reader(SPELT, 4000, len(SPELT))


def write(folder, *rows, name=LINE):
    return write_json_lines(folder / name, ({**ROW, **row} for row in rows))


def samples(source, reader=READER, **options):
    return list(RepoEvalTask(str(source), **options).samples(reader))


def test_prompts_are_read_as_they_are(tmp_path):
    write(tmp_path, {}, {})
    write(tmp_path, {}, name=API)
    made = samples(tmp_path)
    assert [(sample.task, sample.name) for sample in made] == [
        *(("repoeval/line_2k_codex", "0"), ("repoeval/line_2k_codex", "1"), ("repoeval/api_2k_codex", "0")),
    ]
    said = SPELT.decode(made[0].tokens)
    assert said == "<s>" + ROW["prompt"]
    assert TURN not in said
    assert made[0].facts == {"repository": "huggingface_diffusers"}


def test_prompts_of_a_pipeline_are_read_too(tmp_path):
    [sample] = samples(write(tmp_path, {}, name="rg-one-gram-ws-20-ss-2.jsonl"))
    assert sample.task == "repoeval/rg-one-gram-ws-20-ss-2"


@pytest.mark.parametrize(
    ("said", "right", "match", "similarity"),
    [
        ("return file.read()", "    return file.read()\n", 1, 1),
        ("\n  return file.read()\n\nx = 3\n", "return file.read()", 1, 1),
        ("a = 1\nb = 2", "a = 1\n\n    b = 2", 1, 1),
        ("b = 2", "a = 1\nb = 2", 0, 5 / 11),
        ("retrun x", "return x", 0, 6 / 8),
        ("", "return x", 0, 0),
        ("kitten", "sitting", 0, 4 / 7),
    ],
)
def test_as_many_lines_are_measured_as_are_right(said, right, match, similarity):
    assert METRICS["lines_match"](said, [right], ()) == match
    assert METRICS["edit_similarity"](said, [right], ()) == pytest.approx(similarity)


def test_a_limit_is_of_each_file(tmp_path):
    write(tmp_path, *[{}] * 4)
    write(tmp_path, *[{}] * 4, name=API)
    check_limits(RepoEvalTask(str(tmp_path)), READER)


def test_long_prompts_keep_their_end(tmp_path):
    [sample] = samples(write(tmp_path, {"prompt": "x = 1\n" * 5000 + ROW["prompt"]}))
    assert len(sample.tokens) + sample.limit <= READER.max_context
    assert SPELT.decode(sample.tokens).endswith(ROW["prompt"])


@pytest.mark.parametrize(
    "row", [{"metadata": None}, {"metadata": {"task_id": "a/0"}}, {"metadata": {"task_id": 1, "ground_truth": "x"}}]
)
def test_malformed_rows_are_named(tmp_path, row):
    with pytest.raises(TextError, match=r'jsonl, row 2: "metadata" must have texts "task_id" and "ground_truth"'):
        samples(write(tmp_path, {}, row))


def test_files_are_asked_for(tmp_path):
    with pytest.raises(TextError, match=r"`repoeval` must name a file or folder; the benchmark's are in"):
        RepoEvalTask().check()
    with pytest.raises(TextError, match="has no file of RepoEval that is called line_level_completion_1k"):
        RepoEvalTask(str(tmp_path)).check()
    with pytest.raises(KVSurgeryError, match=r"cannot read .*none.jsonl"):
        RepoEvalTask(str(tmp_path / "none.jsonl")).check()
