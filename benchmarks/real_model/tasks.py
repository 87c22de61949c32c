"""RULER, BABILong and cloze on a real language model, by which heads are full.

    python benchmarks/real_model/tasks.py MODEL --profile gates.safetensors --text book.txt --answers answers \\
        --json tasks.json

Each choice of heads, as `which_heads.py` makes them, converts MODEL, and the converted model answers what `kvsurgery
eval` asks. A run continues from its folder of answers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from benchmarks.provenance import record_versions
from benchmarks.real_model.which_heads import ORIGINAL, choices
from kvsurgery.api import convert
from kvsurgery.display import console
from kvsurgery.display.progress import silent
from kvsurgery.evaluate.options import Options
from kvsurgery.evaluate.results import Interval
from kvsurgery.evaluate.runner import started_evaluation
from kvsurgery.evaluate.sample import Task
from kvsurgery.evaluate.statistics import interval, resampled_means
from kvsurgery.evaluate.tasks.cloze import ClozeTask
from kvsurgery.evaluate.tasks.lm_eval import LmEvalTask
from kvsurgery.evaluate.tasks.ruler import RulerTask
from kvsurgery.profile.loading import load_scores
from kvsurgery.system.json_lines import read_lines

RULER_TASKS = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1")  # those that SmolLM2 can do
BABILONG_TASKS = ("babilong_qa1", "babilong_qa2", "babilong_qa3")


@dataclass(frozen=True)
class Group:
    """Questions whose scores are shown as one number.

    Attributes:
        heading: of its column.
        name, task: as `kvsurgery eval` calls it, and what it asks.
        limit: questions of each of its parts.
    """

    heading: str
    name: str
    task: Task
    limit: int


@dataclass(frozen=True)
class Lengths:
    """Of the prompts: tokens, or as BABILong calls its lengths."""

    cloze: list[int]
    ruler: list[int]
    babilong: list[str]


def groups(text: str, lengths: Lengths) -> list[Group]:
    """About a hundred questions each."""
    return [
        *(
            Group(f"cloze, {length:,} tokens", "cloze", ClozeTask((length,), 100, text), 100)
            for length in lengths.cloze
        ),
        *(
            Group(f"RULER, {length:,} tokens", "ruler", RulerTask((length,), RULER_TASKS, 25, text), 25)
            for length in lengths.ruler
        ),
        *(
            Group(f"BABILong, {length}", "lm_eval", LmEvalTask(BABILONG_TASKS, metadata=metadata), 34)
            for length in lengths.babilong
            for metadata in [json.dumps({"max_seq_lengths": length})]
        ),
    ]


def ask(
    groups: list[Group], folder: Path, checkpoint: Path, name: str, original: Path, device: str = "cpu"
) -> dict[str, dict[str, float]]:
    """The scores of a model by group and sample; answers that are in the folder are not computed again."""
    scores = {}
    for group in groups:
        answers_folder = folder / group.heading
        options = Options(limit=group.limit, batch=8, dtype="float32")
        print_note = partial(console.stderr.print, f"{name}: {group.heading}")
        with started_evaluation(
            answers_folder, original, {group.name: group.task}, options, device, silent, print_note
        ) as evaluation:
            evaluation.answer(name, checkpoint)
        scores[group.heading] = {
            f"{record['task']}/{record['sample']}": next(iter(record["scores"].values()))
            for record in read_lines(answers_folder / f"answers-{name}.jsonl")
            if "scores" in record
        }
        print_note(f"{np.mean([*scores[group.heading].values()]):.0%}")
    return scores


def difference(scores: Mapping[str, float], original: Mapping[str, float]) -> tuple[Interval, Interval]:
    """The mean score, and how much it is above the original's; paired by sample."""
    values = np.array([[scores[sample], original[sample]] for sample in sorted(original)]).T
    resampled, original_resampled = resampled_means(values, 0)
    means = values.mean(1)
    return interval(means[0], resampled), interval(means[0] - means[1], resampled - original_resampled)


def table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table: of each group the mean score, and the difference to the original in points."""
    base = report["results"][ORIGINAL]
    lines = [f"| heads | {' | '.join(base)} |", "|---" * (1 + len(base)) + "|"]
    for name, result in report["results"].items():
        cells = []
        for heading, original in base.items():
            mean, difference_interval = difference(result[heading], original)
            if name == ORIGINAL:
                cells.append(f"{mean.mean:.0%} [{mean.low:.0%}, {mean.high:.0%}]")
            else:
                points = " [".join(
                    [
                        f"{100 * difference_interval.mean:+.0f}",
                        f"{100 * difference_interval.low:+.0f}, {100 * difference_interval.high:+.0f}]",
                    ]
                )
                cells.append(f"{mean.mean:.0%} ({points})")
        lines.append(f"| {' | '.join([name, *cells])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a stock checkpoint with a tokenizer")
    parser.add_argument("--profile", type=Path, action="append", required=True, help="head scores; called by file name")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text of passages and haystacks")
    parser.add_argument("--cloze-lengths", type=int, nargs="*", default=[512], help="tokens of passages")
    parser.add_argument("--ruler-lengths", type=int, nargs="*", default=[1024], help="tokens of RULER's prompts")
    parser.add_argument("--babilong-lengths", nargs="*", default=["0k"], help="as BABILong calls its configurations")
    parser.add_argument("--share", type=float, default=0.5, help="of heads that are full")
    parser.add_argument("--size", default="64+256", help="sinks and recent tokens of the other heads")
    parser.add_argument("--draws", type=int, default=1, help="choices of random heads")
    parser.add_argument("--only", action="append", help="choices by name, such as 'gates, 50%% full, 64+256'")
    parser.add_argument("--device", default="cpu", help="where models run, such as cuda")
    parser.add_argument("--answers", type=Path, required=True, help="folder of all questions and answers")
    parser.add_argument("--json", type=Path, required=True, help="results; those there are not computed again")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    lengths = Lengths(arguments.cloze_lengths, arguments.ruler_lengths, arguments.babilong_lengths)
    task_groups = groups(str(arguments.text), lengths)
    sink, recent = map(int, arguments.size.split("+"))
    profiles = {path.stem: load_scores(path) for path in arguments.profile}
    head_choices = choices(profiles, [arguments.share], [(sink, recent)], arguments.draws)
    settings = {"text": arguments.text.name, "ruler_tasks": RULER_TASKS, "babilong_tasks": BABILONG_TASKS}
    settings["lengths"] = asdict(lengths)
    report = (
        json.loads(arguments.json.read_text()) if arguments.json.exists() else {"settings": settings, "results": {}}
    )
    if report["settings"]["lengths"] != settings["lengths"]:
        parser.error(f"{arguments.json} has prompts of other lengths: choose another file")

    def keep(name: str, checkpoint: Path) -> None:
        file_name = name.replace(" ", "-").replace("%", "").replace(",", "")
        report["results"][name] = ask(
            task_groups, arguments.answers, checkpoint, file_name, arguments.model, arguments.device
        )
        record_versions(report, name, arguments.device)
        arguments.json.write_text(json.dumps(report) + "\n")

    if ORIGINAL not in report["results"]:
        keep(ORIGINAL, arguments.model)
    for choice in head_choices:
        if choice.name in (arguments.only or [choice.name]) and choice.name not in report["results"]:
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / "converted"
                convert(arguments.model, folder, choice.profile, choice.recipe)
                keep(choice.name, folder)
    print("\n".join(table(report)))


if __name__ == "__main__":
    main()
