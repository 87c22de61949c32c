"""Tasks of lm-eval's library, answered through the KV cache: https://github.com/EleutherAI/lm-evaluation-harness.

lm-eval makes the prompts and scores the answers; reading, decoding, skipping, resuming and intervals are those of every
other task. Only tasks that generate an answer can show what a cache does.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsurgery.errors import KVSurgeryError, TextError
from kvsurgery.evaluate.sample import Reader, Sample, fewest
from kvsurgery.setting import ask_later_setting, samples_setting, setting
from kvsurgery.system.files import parse_json
from kvsurgery.text.chat import turn_tokens, turn_with_context
from kvsurgery.version import how_to_install

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

SHIPPED = Path(__file__).parents[1] / "yaml"  # tasks that lm-eval's library lacks
CONTEXT = "kvsurgery_context"  # metadata of a task: the field of its documents that is read before the question
# the same by the beginning of a name, for tasks of lm-eval's library
CONTEXT_FIELDS = {"longbench_": "context", "infinitebench_": "context", "babilong_": "input"}
RELEASES = ("0.4.13", "0.5")  # of lm-eval, from the first to before the second
UNMEASURED = -1  # a score that RULER's tasks give for the lengths that a prompt does not have
ASKED_BEFORE = {"infinitebench_code_run", "infinitebench_math_find"}  # tasks that ask before the context too
PROBE = "no"  # an answer that shows which metrics a document has


def installed_release() -> str:
    """The release of lm-eval that is installed; empty where none is."""
    try:
        return importlib.metadata.version("lm-eval")
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class LmEvalTask:
    """Tasks of lm-eval that generate answers, with its prompts, lengths of answers, filters and metrics.

    Prompts that are too long lose their middle, as LongBench, InfiniteBench and LooGLE have it.

    Attributes:
        names: tasks, groups and tags, such as "longbench_hotpotqa". None: an error.
        include: a folder with further tasks, YAML files, as lm-eval's `--include_path`.
        metadata: JSON for tasks that take some, as lm-eval's `--metadata`.
        plain: ask without the chat template, as lm-eval does without `--apply_chat_template`.
        ask_later: read the context before the question is known.
        rows: the most samples of each task, the first ones. None: all.
        release: of lm-eval, which answers and scores depend on.
    """

    names: tuple[str, ...] | None = setting(
        None, "lm_eval", "tasks of lm-eval, such as longbench_hotpotqa,infinitebench_passkey", default="none"
    )
    include: Path | None = setting(
        None, "lm_eval_include", "a folder of further YAML tasks for lm-eval", default="none"
    )
    metadata: str | None = setting(
        None, "lm_eval_metadata", "JSON for the tasks, as lm-eval takes it, such as lengths", default="none"
    )
    plain: bool = setting(False, "lm_eval_plain", "ask without the chat template")
    ask_later: bool = ask_later_setting()
    rows: int | None = samples_setting()
    release: str = field(default_factory=installed_release)

    def check(self) -> None:
        """Check that lm-eval is there, and the folder and the metadata; tasks are looked up when samples are made."""
        first, end = RELEASES
        if not _version(first) <= _version(self.release) < _version(end):
            there = f"{self.release} is installed" if self.release else "it is not installed"
            raise KVSurgeryError(
                f"the task lm_eval needs lm-eval>={first},<{end}, and {there}: {how_to_install('eval')}"
            )
        if not self.names:
            raise TextError("`lm_eval` must name tasks, such as longbench_hotpotqa; `lm-eval ls tasks` lists them")
        if self.include is not None and not self.include.is_dir():
            raise TextError(f"cannot read tasks of {self.include}: there is no such folder")
        self._metadata()

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """Task by task, in the order of lm-eval's documents.

        Raises:
            KVSurgeryError: lm-eval is missing, or cannot load a task.
            TextError: a task is unknown, or cannot show what a cache does; or its context cannot be told from the
                question that comes later.
        """
        self.check()
        limit = fewest(limit, self.rows)
        for name, task in self._load(reader).items():
            task.set_fewshot_seed(reader.seed)
            for number, document in task.doc_iterator(limit=limit, rank=0, world_size=1):
                yield self._sample(reader, task, f"{name}, document {number}", number, document)

    def _load(self, reader: Reader) -> Mapping[str, ConfigurableTask]:
        """The tasks by name; those of groups and tags too."""
        from lm_eval.tasks import TaskManager

        checkpoint = {} if reader.checkpoint is None else {"pretrained": str(reader.checkpoint)}
        folders = [str(SHIPPED), *([] if self.include is None else [str(self.include)])]
        manage = partial(TaskManager, include_path=folders, metadata=checkpoint | self._metadata())
        names = list(self.names or ())
        manager = manage(include_defaults=False)  # the whole library takes many seconds to list
        if {*names} - {*manager.task_index}:
            manager = manage()
        if unknown := sorted({*names} - {*manager.task_index}):
            raise TextError(f"lm-eval has no {', '.join(unknown)}; `lm-eval ls tasks` lists what it has")
        try:
            tasks = manager.load(names)["tasks"]
        except Exception as error:  # whatever a task's code, its data or the network raises
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise KVSurgeryError(f"lm-eval cannot load {', '.join(names)}: {reason}") from error
        for name, task in tasks.items():
            if reason := _unusable_reason(task):
                raise TextError(f"{name} {reason}")
            if self.ask_later and name in ASKED_BEFORE:
                raise TextError(f"{name} says what it asks before its context: leave out the task, or `ask_later`")
            if self.ask_later and not _context_field(name, task):
                raise TextError(
                    f"`ask_later` needs to know where the context of {name} ends: add `metadata: {{{CONTEXT}: FIELD}}` "
                    "to its YAML, or ask RULER's questions with the task ruler"
                )
        return tasks

    def _sample(
        self, reader: Reader, task: ConfigurableTask, place: str, number: int, document: dict[str, Any]
    ) -> Sample:
        lead = task.doc_to_prefix(document) or ""
        prompt = task.fewshot_context(document, task.config.num_fewshot or 0, gen_prefix=lead).removesuffix(lead)
        options = _generation(task)
        target = task.doc_to_target(document)
        answers = tuple(map(str, target if isinstance(target, list) else [target]))
        grade = partial(grades, task, document)
        metrics = _metrics(task, grade, answers, place)
        parts = [turn_tokens(reader.tokenizer, prompt, lead, chat=not self.plain)]
        if self.ask_later:
            context, question = _split(prompt, str(document.get(_context_field(task.task_name, task), "")), place)
            parts = list(turn_with_context(reader.tokenizer, context, question, lead, chat=not self.plain))
        room = reader.max_context - options["max_gen_toks"] - sum(map(len, parts[1:]))
        if room < 2:
            raise TextError(f"{place}: question and answer leave no room for a context in {reader.max_context} tokens")
        parts[0] = without_middle(parts[0], room)
        return Sample(
            task=f"lm_eval/{task.task_name}",
            name=str(number),
            tokens=np.concatenate(parts),
            metric=metrics[0],
            also=metrics[1:],
            answers=answers,
            limit=options["max_gen_toks"],
            context=len(parts[0]) if self.ask_later else 0,
            facts={"version": str(task.VERSION)},
            stops=tuple(filter(None, options["until"])),
            grade=grade,
        )

    def _metadata(self) -> dict[str, Any]:
        try:
            values = parse_json(self.metadata or "{}")
        except (ValueError, RecursionError) as error:
            raise TextError(f"`lm_eval_metadata` is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise TextError('`lm_eval_metadata` must be a JSON object, such as {"max_seq_lengths": [4096]}')
        return values


def grades(task: ConfigurableTask, document: dict[str, Any], answer: str) -> dict[str, float]:
    """The scores of an answer by metric, after the task's filters; of several filters, each metric has its name.

    Raises:
        TextError: a score is no number from 0 to 1.
    """
    from lm_eval.api.instance import Instance

    instance = Instance(task.OUTPUT_TYPE, document, (), 0, resps=[answer])
    scores = {}
    for pipeline in task._filters:
        pipeline.apply([instance])
        suffix = f",{pipeline.name}" if len(task._filters) > 1 else ""
        for metric, score in task.process_results(document, [instance.filtered_resps[pipeline.name]]).items():
            if not isinstance(score, Real | np.bool_) or not (score == UNMEASURED or 0 <= score <= 1):
                raise TextError(
                    f"{metric} of {task.task_name} is no score from 0 to 1: run lm_eval itself for this task"
                )
            if score != UNMEASURED:
                scores[metric + suffix] = float(score)
    return scores


def without_middle(tokens: np.ndarray, room: int) -> np.ndarray:
    """int64 [tokens, at most `room`]: the same where there is room, else without the middle."""
    start = room // 2
    return tokens if len(tokens) <= room else np.concatenate([tokens[:start], tokens[len(tokens) - room + start :]])


def _metrics(
    task: ConfigurableTask, grade: partial[dict[str, float]], answers: Sequence[str], place: str
) -> tuple[str, ...]:
    """The metrics of a document, each of which is averaged and is from 0 to 1 for right and wrong answers."""
    metrics = tuple(grade(PROBE))
    if not metrics or any({*grade(answer)} != {*metrics} for answer in answers):
        raise TextError(f"{place} has no score, or other scores for other answers: run lm_eval itself for this task")
    for metric in metrics:
        name = metric.partition(",")[0]
        if not task.higher_is_better().get(name, True):
            raise TextError(f"a lower {name} of {task.task_name} is better: run lm_eval itself for this task")
        if not _is_mean(task.aggregation().get(name, np.mean)):
            raise TextError(f"{name} of {task.task_name} is no mean over answers: run lm_eval itself for this task")
    return metrics


def _is_mean(aggregate: Any) -> bool:
    try:
        return abs(aggregate([0.0, 0.0, 1.0]) - 1 / 3) < 1e-9
    except (TypeError, ValueError, IndexError):  # it takes answers and references
        return False


def _unusable_reason(task: Any) -> str | None:
    """Why a task cannot show what a cache does, if so."""
    from lm_eval.api.task import ConfigurableTask

    if task.OUTPUT_TYPE != "generate_until":
        return (
            "scores given answers by log-likelihood, in one forward that reads no cache: budgets and bits do not show; "
            "choose a task that generates, or run lm_eval itself"
        )
    if type(task) is not ConfigurableTask:
        return "is a task in Python; only tasks in YAML can be asked: run lm_eval itself for this task"
    if task.config.doc_to_image or task.config.doc_to_audio:
        return "has images or sound; only tasks of text can be asked: run lm_eval itself for this task"
    if task.config.unsafe_code:
        return "runs the code that a model writes: run lm_eval itself for this task"
    if _generation(task)["do_sample"] or task.config.repeats > 1:
        return "samples its answers, and ours are greedy: run lm_eval itself for this task"
    return None


def _generation(task: ConfigurableTask) -> dict[str, Any]:
    from lm_eval.models.utils import normalize_gen_kwargs

    return normalize_gen_kwargs(task.config.generation_kwargs)


def _context_field(name: str, task: ConfigurableTask) -> str:
    """The field that is read before the question; empty where none is known."""
    known = (context for start, context in CONTEXT_FIELDS.items() if name.startswith(start))
    return (task.config.metadata or {}).get(CONTEXT) or next(known, "")


def _split(prompt: str, context: str, place: str) -> tuple[str, str]:
    """A prompt up to the end of its context, and what comes later.

    Raises:
        TextError: the context is not in the prompt, or there several times, or nothing comes later.
    """
    before, *after = prompt.split(context.strip()) if context.strip() else [prompt]
    if len(after) != 1 or not after[0].strip():
        raise TextError(f"{place}: `ask_later` needs a prompt that holds its context once, and a question after it")
    return before + context.strip(), after[0]


def _version(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".") if part.isdecimal())


TASK = LmEvalTask
