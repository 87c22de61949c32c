"""SCBench: several questions on one context, asked after it has been read (Li et al. 2024, arXiv 2412.10319)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsurgery.errors import TextError
from kvsurgery.evaluate.rows import named_files, numbered_rows, option_fields, right_answers, table_beside
from kvsurgery.evaluate.sample import Reader, Sample, fewest
from kvsurgery.metrics.functions import LANGUAGES, require_parsers
from kvsurgery.setting import SOURCE, THERE, samples_setting, setting
from kvsurgery.text.chat import turn_with_context

TASKS = table_beside(__file__)
PREFIX = "scbench_"  # of the names of files and configurations
FILES = [PREFIX + task for task in TASKS]
FUNCTION = "repeated_function"  # a metric that knows all functions that are asked for
WITH_FUNCTIONS = {"repoqa", "repoqa_and_kv"}


@dataclass(frozen=True)
class SCBenchTask:
    """The benchmark's contexts and questions in its multi-request mode, its answer lengths and metrics; our prompts.

    Each question is asked on the cache that the context alone has left, as a compressed cache is used when questions
    come later.

    Attributes:
        source: a dataset's id, a folder with files such as `scbench_kv.jsonl`, or one such file.
        tasks: such as "kv". None: of a folder all that are there, of an id all.
        rows: the most samples of each task, the first ones. None: all.
    """

    source: str = setting("microsoft/SCBench", "scbench", SOURCE)
    tasks: tuple[str, ...] | None = setting(None, "scbench_tasks", "tasks such as kv,qa_eng", default=THERE)
    rows: int | None = samples_setting()

    def check(self) -> None:
        """Check that there is what the samples need, without reading them."""
        if {name.removeprefix(PREFIX) for name in self._files()} & WITH_FUNCTIONS:
            require_parsers()

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """Task by task, in the order of the rows and of their questions."""
        limit = fewest(limit, self.rows)
        for name, source in self._files().items():
            yield from self._samples(reader, name, source, limit)

    def _files(self) -> dict[str, str]:
        selected_files = self.tasks and [PREFIX + task.removeprefix(PREFIX) for task in self.tasks]
        return named_files(self.source, FILES, selected_files, "SCBench")

    def _samples(self, reader: Reader, name: str, source: str, limit: int | None) -> Iterator[Sample]:
        """Of one file; a task with questions of two kinds ends when both are at the limit."""
        task = name.removeprefix(PREFIX)
        sample_counts = dict.fromkeys([""] if "metric" in TASKS[task] else TASKS[task], 0)
        functions = _functions(task, name, source) if task in WITH_FUNCTIONS else {}
        for number, place, row in numbered_rows(source, {}, config=name, split="test"):
            questions = _questions(task, row, place)
            context_tokens, question_tokens = _parts(reader, task, row, questions, place)
            for turn, (question, tokens) in enumerate(zip(questions, question_tokens, strict=True), 1):
                if limit is not None and min(sample_counts.values()) >= limit:
                    return
                if limit is not None and sample_counts[question.kind] >= limit:
                    continue
                sample_counts[question.kind] += 1
                asks_for_function = question.metric == FUNCTION
                yield Sample(
                    task="/".join(filter(None, ("scbench", task, question.kind))),
                    name=f"{number}/{turn}",
                    tokens=np.concatenate([context_tokens, tokens]),
                    metric=question.metric,
                    answers=(*question.answers, row["lang"]) if asks_for_function else question.answers,
                    choices=functions[row["repo"]] if asks_for_function else (),
                    limit=question.limit,
                    context=len(context_tokens),
                    facts={"question": turn},
                )


@dataclass(frozen=True)
class Question:
    """One question of a row.

    Attributes:
        kind: of a task with several kinds, which; else "".
        text: what is asked.
        metric, limit, answers: as a `Sample` has them.
    """

    kind: str
    text: str
    metric: str
    limit: int
    answers: tuple[str, ...]

    @classmethod
    def of(cls, task: str, turn: Any, place: str) -> Question:
        """Read one of `multi_turns`.

        Raises:
            TextError: it is of another layout.
        """
        if not isinstance(turn, dict) or not isinstance(turn.get("input"), str):
            raise TextError(f'{place}: "input" must be text')
        spec, kind = TASKS[task], ""
        if "metric" not in spec:
            kind = str(turn.get("task")).removeprefix(PREFIX)
            if kind not in spec:
                raise TextError(f'{place}: "task" must be one of {", ".join(PREFIX + kind for kind in spec)}')
            spec = spec[kind]
        metric = spec["metric"]
        fields = option_fields(turn, metric, place)
        text = spec.get("question", "\n\n{question}").format(question=turn["input"], **fields)
        return cls(kind, text, metric, spec["limit"], right_answers(turn, metric, place))


def _questions(task: str, row: Mapping[str, Any], place: str) -> list[Question]:
    turns = row.get("multi_turns")
    if not isinstance(turns, list) or not turns:
        raise TextError(f'{place}: "multi_turns" must be a list of questions')
    return [Question.of(task, turn, f"{place}, question {number}") for number, turn in enumerate(turns, 1)]


def _functions(task: str, name: str, source: str) -> dict[str, tuple[str, ...]]:
    """The functions that are asked for, by repository: several rows may be of one."""
    functions_by_repository: dict[str, dict[str, None]] = {}
    columns = {"repo": str, "lang": str}
    for _, place, row in numbered_rows(source, columns, config=name, split="test"):
        if row["lang"] not in LANGUAGES:
            raise TextError(f'{place}: "lang" must be one of {", ".join(LANGUAGES)}')
        function_questions = (question for question in _questions(task, row, place) if question.metric == FUNCTION)
        functions_by_repository.setdefault(row["repo"], {}).update(
            dict.fromkeys(question.answers[0] for question in function_questions)
        )
    return {repository: tuple(functions) for repository, functions in functions_by_repository.items()}


def _parts(
    reader: Reader, task: str, row: Mapping[str, Any], questions: Sequence[Question], place: str
) -> tuple[np.ndarray, list[np.ndarray]]:
    """int64 [tokens] each: the context, cut so that every question has room after it, and the questions."""
    context = row.get("context", row.get("input"))  # variable tracking has it there, and lists are of numbers
    if not isinstance(context, str | list):
        raise TextError(f'{place}: "context" or "input" must be text or a list')
    text = TASKS[task].get("context", "{context}").format(context=context)
    parts = [turn_with_context(reader.tokenizer, text, question.text) for question in questions]
    context_tokens, question_tokens = parts[0][0], [tokens for _, tokens in parts]
    needed_tokens = max(
        len(tokens) + question.limit for tokens, question in zip(question_tokens, questions, strict=True)
    )
    room = reader.max_context - needed_tokens
    if room < 2:
        raise TextError(f"{place}: its questions leave no room for a context in {reader.max_context} tokens")
    if len(context_tokens) > room:
        context_tokens = np.concatenate([context_tokens[: room // 2], context_tokens[-(room // 2) :]])
    return context_tokens, question_tokens


TASK = SCBenchTask
