"""An evaluation from samples to results: what is compared, what is kept, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvsurgery.errors import Interrupted, KVSurgeryError, OutputError
from kvsurgery.evaluate import decoding, runner
from kvsurgery.evaluate.checkpoint import fingerprint, reader_of
from kvsurgery.evaluate.records import read_lines
from kvsurgery.evaluate.results import Results
from kvsurgery.evaluate.runner import Evaluation, Options, evaluate
from kvsurgery.evaluate.sample import Sample
from kvsurgery.system.processes import Processes
from tests.distributed.start import start
from tests.evaluate.limits import check_limits
from tests.evaluate.recall import MODEL, tasks
from tests.helpers.command import done
from tests.helpers.families import make
from tests.helpers.shards import tree

BATCH = Options(batch=4)
# the command in a process that is killed once its first answers are written
KILLED = """
import os, signal
from kvsurgery.cli import main
from kvsurgery.evaluate import runner

def append_and_die(path, records):
    append(path, records)
    os.kill(os.getpid(), signal.SIGKILL)

append, runner.append_lines = runner.append_lines, append_and_die
main()
"""


@dataclass(frozen=True)
class Plain:
    """Prompts of some lengths, which ask for nothing in particular."""

    lengths: tuple[int, ...] = (20, 24, 30)
    limit: int = 4

    def samples(self, reader, limit=None):
        for length in self.lengths[:limit]:
            tokens = np.full(length, 20, dtype=np.int64)
            yield Sample("plain", str(length), tokens, "exact_match", answers=("a",), limit=self.limit)


@pytest.fixture(scope="module")
def whole(full, language, tmp_path_factory):
    """One run through, of the bundled model and of it converted with every head full: folder and results."""
    folder = tmp_path_factory.mktemp("whole") / "report"
    return folder, evaluate({"original": MODEL, "converted": full}, tasks(language), folder, BATCH, device="cpu")


def test_a_converted_model_with_all_heads_full_scores_what_the_original_scores(whole):
    """The same answers, token by token; losses to what float32 sums in another order leave."""
    folder, results = whole
    original, converted = (read_lines(folder / f"answers-{name}.jsonl") for name in ("original", "converted"))
    assert [record.get("tokens") for record in original] == [record.get("tokens") for record in converted]
    assert {result.metric for result in results.tasks} == {
        *("rouge1_recall", "string_match_all", "token_accuracy", "perplexity")
    }
    for result in results.tasks:
        one, other = result.scores["original"], result.scores["converted"]
        if result.metric == "perplexity":
            assert one.mean == pytest.approx(other.mean, rel=1e-5)
            assert 1 < one.mean < 100
        else:
            assert one == other
            assert (result.difference.mean, result.difference.low, result.difference.high) == (0, 0, 0)
    needle = results.tasks[0]
    assert needle.scores["original"].mean == 1
    assert [cell.facts for cell in needle.cells] == [
        {"tokens": tokens, "depth": depth} for tokens in (96, 160) for depth in (0.0, 0.6)
    ]


def test_results_and_prompts_are_written(whole):
    folder, results = whole
    assert Results.load(folder) == results
    prompts = read_lines(folder / "samples.jsonl")
    assert [(prompt["task"], prompt["sample"]) for prompt in prompts][:2] == [
        ("needle", "96/0.0/0"),
        ("needle", "96/0.6/0"),
    ]
    for prompt in prompts:
        if prompt["task"] == "needle":
            assert prompt["answers"][0] in prompt["prompt"]
    said = {record["sample"]: record for record in read_lines(folder / "answers-original.jsonl")}
    assert prompts[0]["answers"][0] in said["96/0.0/0"]["answer"]
    assert results.settings["tasks"]["needle"]["lengths"] == [96, 160]
    assert results.versions["torch"] == torch.__version__
    assert results.checkpoint["surgery"]["full_heads"] == [4, 4, 4]


@pytest.mark.parametrize("share", [0.0, 0.31, 0.77])
def test_a_run_that_was_cut_off_anywhere_goes_on_to_the_same_files(share, whole, full, language, tmp_path):
    """A file of answers that ends anywhere, within a batch or within a line, is what a kill leaves."""
    folder, results = whole
    (tmp_path / "settings.json").write_bytes((folder / "settings.json").read_bytes())
    if share:  # without the prompts too, which somebody may have removed, or with a part of them
        prompts = (folder / "samples.jsonl").read_bytes()
        (tmp_path / "samples.jsonl").write_bytes(prompts[: int(share * len(prompts))])
    content = (folder / "answers-converted.jsonl").read_bytes()
    (tmp_path / "answers-original.jsonl").write_bytes((folder / "answers-original.jsonl").read_bytes())
    (tmp_path / "answers-converted.jsonl").write_bytes(content[: int(share * len(content))])
    resumed = evaluate({"original": MODEL, "converted": full}, tasks(language), tmp_path, BATCH, device="cpu")
    assert resumed == results
    assert tree(tmp_path) == tree(folder)


def test_the_original_answers_once_for_many_models(whole, full, budgeted, language, tmp_path, monkeypatch):
    loaded = []
    load = runner.load
    monkeypatch.setattr(runner, "load", lambda folder, **options: loaded.append(folder) or load(folder, **options))
    evaluation = Evaluation.open(tmp_path, MODEL, {"needle": tasks(language)["needle"]}, BATCH)
    for name, folder in (("original", MODEL), ("full", full), ("budgeted", budgeted), ("original", MODEL)):
        evaluation.answer(name, folder)
    assert loaded == [MODEL, full, budgeted]
    for name in ("full", "budgeted"):
        results = evaluation.results({"original": "original", "converted": name})
        assert results.models == {"original": str(MODEL), "converted": str(full if name == "full" else budgeted)}
        assert results.tasks[0].scores["converted"].mean == 1
    with pytest.raises(OutputError, match="holds answers of another full model"):
        evaluation.answer("full", budgeted)
    with pytest.raises(KVSurgeryError, match="other has not answered 8 of 8 samples"):
        evaluation.results({"converted": "other"})


@pytest.mark.parametrize(
    ("options", "lengths", "words"),
    [
        (Options(batch=3), (96, 160), "`batch` is 4 there and 3 here"),
        (Options(batch=4, seed=1), (96, 160), "`seed` is 0 there and 1 here"),
        (BATCH, (96, 170), "`lengths` of needle is 96,160 there and 96,170 here"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(whole, language, options, lengths, words):
    before = tree(whole[0])
    with pytest.raises(OutputError, match=words):
        evaluate({"original": MODEL}, tasks(language, lengths), whole[0], options, device="cpu")
    assert tree(whole[0]) == before


def test_a_text_that_has_changed_is_noticed(language, tmp_path):
    task = tasks(language)["perplexity"]
    text = tmp_path / "text.txt"
    text.write_bytes((language / "text.txt").read_bytes())
    Evaluation.open(tmp_path / "report", MODEL, {"perplexity": replace(task, text=str(text))})
    text.write_text(" ".join(text.read_text().split()[7:]))
    with pytest.raises(OutputError, match="a file that samples are made from, has changed"):
        Evaluation.open(tmp_path / "report", MODEL, {"perplexity": replace(task, text=str(text))})


def out_of_memory_from(length, monkeypatch):
    """Let every batch with a prompt of this many tokens run out of memory."""
    answers = decoding.answers

    def failing(model, tokenizer, prompts, limit, **options):
        if max(map(len, prompts)) >= length:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return answers(model, tokenizer, prompts, limit, **options)

    monkeypatch.setattr(decoding, "answers", failing)


def test_what_runs_out_of_memory_is_left_out_and_the_rest_kept(tmp_path, monkeypatch):
    out_of_memory_from(30, monkeypatch)
    [result] = evaluate({"original": MODEL}, {"plain": Plain()}, tmp_path, BATCH, device="cpu").tasks
    assert (result.count, result.skipped) == (2, {"original: out of memory": 1})
    by_name = {record["sample"]: record for record in read_lines(tmp_path / "answers-original.jsonl")}
    assert by_name["30"]["skipped"] == "out of memory"
    assert len(by_name["24"]["tokens"]) == 4
    # what was left out stays so: the same command gives the same results
    monkeypatch.undo()
    assert evaluate({"original": MODEL}, {"plain": Plain()}, tmp_path, BATCH, device="cpu").tasks == (result,)


def test_another_failure_is_not_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "answers", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate({"original": MODEL}, {"plain": Plain()}, tmp_path, BATCH, device="cpu")


def test_what_is_beyond_the_context_is_left_out(tmp_path):
    small = shutil.copytree(MODEL, tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 33}))
    task = Plain(lengths=(20, 30, 31), limit=3)
    [result] = evaluate({"original": small}, {"plain": task}, tmp_path / "report", BATCH, device="cpu").tasks
    assert (result.count, result.skipped) == (2, {"original: prompt and answer are beyond 33 positions": 1})


@pytest.mark.parametrize("batch", [1, 4])
def test_what_has_no_two_tokens_is_left_out(batch, full, tmp_path):
    """A prompt of one token would be read twice, for the cache and for the answer."""
    models, options = {"original": MODEL, "converted": full}, Options(batch=batch)
    task = Plain(lengths=(0, 1, 2, 20), limit=4)
    [result] = evaluate(models, {"plain": task}, tmp_path, options, device="cpu").tasks
    assert (result.count, result.skipped) == (2, {"original: the prompt has fewer than 2 tokens": 2})


@dataclass(frozen=True)
class Later:
    """Three questions about each of two contexts."""

    def samples(self, reader, limit=None):
        for context in (30, 40):
            for asked in (3, 1, 2):
                tokens = np.concatenate([np.arange(20, 20 + context), np.full(asked, 60 + asked)])
                facts = {"question": asked}
                name = f"{context}/{asked}"
                yield Sample(
                    "later", name, tokens, "exact_match", answers=("a",), limit=3 + asked, context=context, facts=facts
                )


def test_a_context_is_read_once_for_all_its_questions(full, tmp_path, monkeypatch):
    read = []
    later = decoding.later_answers
    monkeypatch.setattr(
        decoding, "later_answers", lambda *given, **options: read.append(given[4]) or later(*given, **options)
    )
    # batches are of prompts, and a context is one however many are asked
    evaluate({"original": MODEL}, {"later": Later()}, tmp_path / "one", Options(batch=2), device="cpu")
    assert read == [30, 40]
    records = read_lines(tmp_path / "one" / "answers-original.jsonl")
    assert sorted(record["sample"] for record in records) == ["30/1", "30/2", "30/3", "40/1", "40/2", "40/3"]
    assert {prompt["context"] for prompt in read_lines(tmp_path / "one" / "samples.jsonl")} == {30, 40}
    out_of_memory_later(monkeypatch)
    evaluate({"converted": full}, {"later": Later()}, tmp_path / "alone", BATCH, device="cpu")
    alone = {
        record["sample"]: record["answer"] for record in read_lines(tmp_path / "alone" / "answers-converted.jsonl")
    }
    assert alone == {record["sample"]: record["answer"] for record in records}


def out_of_memory_later(monkeypatch):
    """Let several questions on one cache run out of memory."""
    later = decoding.later_answers

    def failing(model, tokenizer, prompts, *given, **options):
        if len(prompts) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return later(model, tokenizer, prompts, *given, **options)

    monkeypatch.setattr(decoding, "later_answers", failing)


@dataclass(frozen=True)
class Uneven:
    """Prompts whose answers may be of different lengths."""

    def samples(self, reader, limit=None):
        for number in range(4):
            tokens = np.arange(20, 50, dtype=np.int64)
            yield Sample("uneven", str(number), tokens, "exact_match", answers=("a",), limit=1 + 2 * number)


def test_samples_of_a_batch_have_their_own_limits(tmp_path):
    evaluate({"original": MODEL}, {"uneven": Uneven()}, tmp_path, BATCH, device="cpu")
    said = [record["tokens"] for record in read_lines(tmp_path / "answers-original.jsonl")]
    assert [len(tokens) for tokens in said] == [1, 3, 5, 7]
    assert all(tokens == said[-1][: len(tokens)] for tokens in said)


@dataclass(frozen=True)
class Stopped:
    """Prompts that the bundled model goes on with in words, the second of which ends the answer."""

    stop: str

    def samples(self, reader, limit=None):
        tokens = np.arange(20, 50, dtype=np.int64)
        yield Sample("stopped", "0", tokens, "exact_match", answers=("nothing",), limit=6, stops=(self.stop,))


def test_an_answer_is_what_is_before_the_text_that_stops_it(tmp_path):
    evaluate({"original": MODEL}, {"uneven": Uneven()}, tmp_path / "free", device="cpu")
    words = read_lines(tmp_path / "free" / "answers-original.jsonl")[-1]["answer"].split()
    evaluate({"original": MODEL}, {"stopped": Stopped(words[2])}, tmp_path / "stopped", device="cpu")
    [record] = read_lines(tmp_path / "stopped" / "answers-original.jsonl")
    assert record["answer"].split() == words[:2]
    assert len(record["tokens"]) == 3


def test_a_limit_takes_the_first_samples_of_each_task(language):
    reader = reader_of(MODEL)
    keys = [sample.key for sample in runner.limited_samples({**tasks(language), "plain": Plain()}, reader, 2)]
    assert [task for task, _ in keys] == ["needle"] * 2 + ["passkey"] * 2 + ["perplexity"] * 2 + ["plain"] * 2
    assert keys[0] == ("needle", "96/0.0/0")


@pytest.mark.parametrize("name", ["needle", "passkey", "perplexity"])
def test_no_more_samples_are_made_than_the_limit(name, language):
    check_limits(tasks(language)[name], reader_of(MODEL))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "there is no task to run"),
        ({"plain": Plain(lengths=())}, "plain has no samples"),
        ({"plain": Plain(lengths=(8, 8))}, "plain has two samples of the name 8"),
    ],
)
def test_what_asks_nothing_is_refused(asked, words, tmp_path):
    with pytest.raises(KVSurgeryError, match=words):
        evaluate({"original": MODEL}, asked, tmp_path / "report", device="cpu")
    assert not (tmp_path / "report").exists()


def test_other_weights_are_another_model(tmp_path):
    one, other = make("llama", tmp_path / "one"), make("llama", tmp_path / "other", seed=1)
    assert fingerprint(one) == fingerprint(shutil.copytree(one, tmp_path / "copy"))
    assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()
    assert fingerprint(one) != fingerprint(other)


def test_another_vocabulary_is_refused(tmp_path):
    other = make("llama", tmp_path / "llama")
    with pytest.raises(KVSurgeryError, match="has a vocabulary of 101 tokens, the samples are made for 295"):
        evaluate({"original": MODEL, "converted": other}, {"plain": Plain()}, tmp_path / "report", device="cpu")


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(KVSurgeryError, match="has no tokenizer that can be loaded"):
        evaluate({"original": make("llama", tmp_path / "llama")}, {"plain": Plain()}, tmp_path / "report")


@pytest.mark.parametrize("change", [{"batch": 0}, {"limit": 0}, {"chunk": 0}, {"seed": -1}])
def test_numbers_out_of_range_are_refused(change):
    with pytest.raises(KVSurgeryError, match=f"`{next(iter(change))}` must be"):
        Options(**change)


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(decoding, "answers", interrupted)
    with pytest.raises(Interrupted, match="rerun the same command to resume"):
        evaluate({"original": MODEL}, {"plain": Plain()}, tmp_path, device="cpu")


def command(full: Path, language: Path, out: Path) -> list[str]:
    """What is typed for the run of `whole`."""
    asked = {
        **{"tasks": "needle,passkey,perplexity", "lengths": "96,160", "depths": "0,0.6", "samples": 4, "passkeys": 2},
        **{"text": language / "text.txt", "needles": language / "needles.jsonl", "continuation": 12, "batch": 4},
        **{"passkey-tokens": 4, "passkey-hidden": "remember {key} .", "passkey-asked": "recall {cue}", "out": out},
    }
    flags = [str(part) for name, value in asked.items() for part in (f"--{name}", value)]
    return ["eval", str(full), "--source", str(MODEL), "--device", "cpu", *flags]


@pytest.fixture
def environment(tmp_path):
    """Of other processes: without what earlier ones have copied."""
    return {**os.environ, "HF_HOME": str(tmp_path / "hf")}


@pytest.mark.slow
def test_a_killed_command_goes_on_to_what_one_run_gives(whole, full, language, environment, tmp_path):
    out = tmp_path / "report"
    arguments = command(full, language, out)
    run = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=environment, stderr=subprocess.DEVNULL)
    assert run.returncode == -signal.SIGKILL
    assert 0 < len(read_lines(out / "answers-original.jsonl")) < len(read_lines(out / "samples.jsonl"))
    resumed = evaluate({"original": MODEL, "converted": full}, tasks(language), out, BATCH, device="cpu")
    assert resumed == whole[1]
    assert tree(out) == tree(whole[0])


def type_command(processes: Processes, words: list[str]) -> None:
    """What each of several processes does."""
    done(*words)


@pytest.mark.slow
def test_two_processes_give_what_one_gives(whole, full, language, tmp_path):
    out = tmp_path / "report"
    start(2, type_command, tmp_path, command(full, language, out))
    assert replace(Results.load(out), command="") == whole[1]
    for name in ("samples.jsonl", "settings.json", "answers-original.jsonl", "answers-converted.jsonl"):
        assert (out / name).read_bytes() == (whole[0] / name).read_bytes()
