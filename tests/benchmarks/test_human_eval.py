"""HumanEval through compressed caches: what counts as passed, how batches are answered, and what the table says."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.real_model import human_eval, programs
from benchmarks.real_model.batches import Batch, drafted, read, written
from benchmarks.real_model.which_cache import Contender
from kvsurgery.checkpoint.model import Model
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.text.chat import turn_tokens
from tests.docs.pages import ROOT, figures
from tests.helpers.cases import some
from tests.helpers.families import stock
from tests.helpers.losses import losses
from tests.helpers.vocabularies import tokenizer

TASKS = [
    programs.Task(
        f"HumanEval/{number}",
        f'import math\n\n\ndef round_{word}(x):\n    """Round {"and round " * number}{word} x."""\n',
        f"round_{word}",
        f"def check(candidate):\n    assert candidate(1.5) == {result}\n",
    )
    for number, (word, result) in enumerate({"up": 2, "down": 1, "away": 2, "here": 1, "there": 2}.items())
]
RIGHT = "def round_up(x):\n    return math.ceil(x)\n"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (f"{RIGHT}```", RIGHT),
        (f"{RIGHT}```\n\nThis rounds up:\n```python\nround_up(1)\n```", RIGHT),
        (RIGHT, RIGHT),
        ("```", ""),
    ],
    ids=["closed", "explained", "unclosed", "empty"],
)
def test_the_code_of_an_answer_is_its_first_block(answer: str, code: str) -> None:
    assert programs.code(answer) == code


def test_a_program_has_what_stands_before_the_function_in_the_prompt() -> None:
    assert programs.passes(TASKS[0].program(f"{RIGHT}```"))
    assert not programs.passes(TASKS[1].program(f"{RIGHT}```"))  # another function
    assert not programs.passes(TASKS[0].program("def round_up(x):\n    return 1\n"))
    assert not programs.passes(TASKS[0].program("def round_up(x):\n"))


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "print('passed')\n1 / 0",
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.remove('program.py')",
        "import socket\nsocket.socket()",
        f"memory = bytearray({2 * programs.MEMORY})",
        f"open('large', 'w').write('a' * {2 * programs.FILE_SIZE})",
        "open('passed', 'w').write('passed')\nassert False",
    ],
)
def test_a_program_that_does_not_reach_its_end_fails(program: str) -> None:
    assert not programs.passes(program)


@pytest.mark.parametrize("program", ["while True:\n    pass", "import time\ntime.sleep(100)"])
def test_a_program_that_hangs_fails(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "WAIT", 2)
    assert not programs.passes(program)


@pytest.mark.parametrize("isolated", [True, False])
def test_a_program_that_prints_passes(isolated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without `unshare`, and what a script would run is not run."""
    if not isolated:
        monkeypatch.setattr(programs, "_isolation", list)
    assert programs.passes("print('assert False')\nif __name__ == '__main__':\n    1 / 0")
    assert not programs.passes("assert False")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a chat template, head scores, losses that favor rounding by the queries, and tasks."""
    folder = tmp_path_factory.mktemp("human_eval")
    words = tokenizer("bytes", [task.request for task in TASKS], size=400, chat=True)
    model = stock("llama", vocab_size=len(words), head_dim=16, max_position_embeddings=1024)
    model.save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    shape = Model.of(model.config.to_dict()).dimensions
    losses(shape, measured=(8, 4, 3, "k3v2", 2), rounded=True).save(folder / "losses.safetensors")
    scores = np.random.default_rng(0).random((shape.layers, shape.kv_heads), dtype=np.float32)
    HeadProfile(scores, "ablation", "kv", "made up", shape).save(folder / "er.safetensors")
    with gzip.open(folder / "tasks.jsonl.gz", "wt") as lines:
        lines.writelines(json.dumps(vars(task) | {"canonical_solution": ""}) + "\n" for task in TASKS)
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict]:
    """Run the benchmark on the small model; its report."""

    def measured(*options: str) -> dict:
        command = ["human_eval.py", str(folder / "model"), "--tasks", str(folder / "tasks.jsonl.gz"), "--profile"]
        command += [str(folder / "er.safetensors"), "--json", str(tmp_path / "found.json"), "--batch", "3"]
        command += ["--measured", str(folder / "losses.safetensors"), "--new", "20"]
        command += ["--answers", str(tmp_path / "answers"), *options]
        monkeypatch.setattr(sys, "argv", command)
        human_eval.main()
        return json.loads((tmp_path / "found.json").read_text())

    return measured


def test_programs_run_only_where_that_is_asked_for(run: Callable[..., dict], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run()
    assert "--run-code" in capsys.readouterr().err


def test_results_are_complete_and_are_not_computed_again(
    run: Callable[..., dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is interrupted goes on with the batch that is missing."""
    monkeypatch.setattr(human_eval, "passes", lambda program: "round_up" in program)
    first = run("--run-code", "--only", "kvsurgery, 2 bits, measured")
    assert [*first["results"]] == ["original", "kvsurgery, 2 bits, measured"]
    original, two_bits = first["results"].values()
    assert {task: result["passed"] for task, result in original["tasks"].items()} == {
        task.task_id: int(task.entry_point == "round_up") for task in TASKS
    }
    assert two_bits["kv_bytes"] < original["kv_bytes"]
    assert len([*(tmp_path / "answers").iterdir()]) == 2 * len(TASKS)
    one_batch = dict([*original["tasks"].items()][:3])
    half = {**first, "results": {"original": {**original, "tasks": one_batch}}}
    (tmp_path / "found.json").write_text(json.dumps(half))
    written, answers = human_eval.written, []
    monkeypatch.setattr(human_eval, "written", lambda *arguments: answers.append(1) or written(*arguments))
    again = run("--run-code", "--only", "original")
    assert again["results"]["original"]["tasks"] == original["tasks"]
    assert len(answers) == 1
    with pytest.raises(SystemExit):
        run("--run-code", "--new", "21")


KINDS = [
    "kvsurgery, 4 bits, measured",
    "original",
    "QuantizedCache, quanto, 4 bits",
    "kvsurgery, rolling budgets of 120, blocks of 32",
    "kvsurgery, 50% of heads full, window 16 + 64",
]


def contenders(folder: Path, *names: str) -> list[Contender]:
    """Caches of the benchmark, by name."""
    if any(name.startswith("QuantizedCache") for name in names):
        pytest.importorskip("optimum.quanto")
    profile, measured = HeadProfile.load(folder / "er.safetensors"), str(folder / "losses.safetensors")
    by_name = {each.name: each for each in human_eval.contenders(profile, measured)}
    return [by_name[name] for name in names]


@pytest.mark.parametrize("name", some(KINDS))
def test_a_batch_has_the_answers_of_each_prompt_alone(folder: Path, name: str) -> None:
    """Also where a cache begins with the original's states. Answers end after different numbers of tokens."""
    original, contender = contenders(folder, "original", name)
    model = contender.load(folder / "model", torch.float32, "cpu")
    words = AutoTokenizer.from_pretrained(folder / "model")
    assert words is not None

    def answers(batch: Batch) -> list[list[int]]:
        return written(contender, model, batch, lambda answer: len(answer) > answer[0] % 7 + 130)

    prompts = [turn_tokens(words, task.request) for task in TASKS]
    batch = Batch.of(prompts)
    assert batch.mask.sum(1).unique().numel() > 1
    alone = [answers(Batch.of([prompt]))[0] for prompt in prompts]
    assert len({len(answer) for answer in alone}) > 1
    assert answers(batch) == alone
    read(original, original.load(folder / "model", torch.float32, "cpu"), batch)
    assert batch.states
    assert answers(batch) == alone


@pytest.mark.parametrize("name", KINDS)
def test_an_answer_from_drafts_is_the_one_without(folder: Path, name: str) -> None:
    """Drafts of nine tokens, of which every fifth is wrong, while tokens roll out of windows and quanto quantizes.

    Our codes are compared up to the first tile that is packed later.
    """
    count = 100 if name == KINDS[0] else 300
    [contender] = contenders(folder, name)
    model = contender.load(folder / "model", torch.float32, "cpu")
    words = AutoTokenizer.from_pretrained(folder / "model")
    assert words is not None
    batch = Batch.of([turn_tokens(words, TASKS[0].request)])
    [answer] = written(contender, model, batch, lambda answer: len(answer) == count)
    forwards = []

    def draft(begun: list[int]) -> list[int]:
        forwards.append(begun)
        return [(token + (place % 5 == 0)) % len(words) for place, token in enumerate(answer)][len(begun) :][:9]

    assert drafted(contender, model, batch, draft, lambda answer: len(answer) == count) == answer
    assert len(forwards) < count / 3


def test_the_table() -> None:
    """A cache that has not answered all tasks yet is left out."""

    def result(passed: list[int], size: int, different: int) -> dict:
        tasks = {
            str(number): {"passed": right, "tokens": 1, "sha256": "b" if number < different else "a"}
            for number, right in enumerate(passed)
        }
        return {"tasks": tasks, "kv_bytes": size}

    results = {
        "original": result([1, 1, 1, 0], 200, 0),
        "2 bits": result([0, 0, 0, 0], 30, 3),
        "4 bits": result([1, 1, 1, 1], 60, 1),
        "3 bits": result([1, 1], 50, 0),
    }
    assert human_eval.table({"results": results})[2:] == [
        "| original | 100% | 75.0% [25.0%, 100.0%] |  |  |  |  |",
        "| 4 bits | 30% | 100.0% [100.0%, 100.0%] | +25.0 [+0.0, +75.0] | 0 | 1 | 75% |",
        "| 2 bits | 15% | 0.0% [0.0%, 0.0%] | -75.0 [-100.0, -25.0] | 3 | 0 | 25% |",
    ]


def test_what_the_docs_say() -> None:
    """Every row of the committed results has all tasks that its settings name."""
    report = json.loads((ROOT / "benchmarks" / "results" / "human-eval.json").read_text())
    tasks = {f"HumanEval/{number}" for number in range(164)}
    assert all(result["tasks"].keys() == tasks for result in report["results"].values())
    assert str(len(tasks)) in figures("docs/results/qwen.md", "HumanEval's 164 tasks")
