"""InfiniteBench: books, dialogues, code, numbers and retrieval at 100k tokens (Zhang et al. 2024, arXiv 2402.13718)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvsurgery.errors import TextError
from kvsurgery.evaluate.prompts import read_prompts, truncated_prompt
from kvsurgery.evaluate.rows import (
    OPTION_FIELDS,
    named_files,
    numbered_rows,
    option_fields,
    right_answers,
    table_beside,
)
from kvsurgery.evaluate.sample import Reader, Sample, fewest
from kvsurgery.setting import SOURCE, THERE, samples_setting, setting

TASKS = table_beside(__file__)
COLUMNS = {"context": str, "input": str}
SHARE = 4  # of the context that an answer may have: one in so many; that of math_calc has 30,000 tokens


@dataclass(frozen=True)
class InfiniteBenchTask:
    """The benchmark's questions, answer lengths and metrics, with prompts of our own or those of a file.

    Attributes:
        source: a dataset's id, a folder with files such as `passkey.jsonl`, or one such file.
        tasks: such as "passkey". None: of a folder all that are there, of an id all.
        prompts: a JSON file with the benchmark's templates by task; fields are called as there.
        rows: the most samples of each task, the first ones. None: all.
    """

    source: str = setting("xinrongzhang2022/InfiniteBench", "infinitebench", SOURCE)
    tasks: tuple[str, ...] | None = setting(None, "infinitebench_tasks", "tasks such as passkey", default=THERE)
    prompts: str | None = setting(
        None, "infinitebench_prompts", "a JSON file of templates by task, such as InfiniteBench's", default="shipped"
    )
    rows: int | None = samples_setting()

    def check(self) -> None:
        """Check that there is what the samples need, without reading them."""
        self._templates()
        self._files()

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """Task by task, in the order of the rows."""
        limit = fewest(limit, self.rows)
        files, templates = self._files(), self._templates()
        for task, source in files.items():
            if task not in templates:
                raise TextError(f"{self.prompts} has no prompt for {task}")
            metric = TASKS[task]["metric"]
            tokens = min(TASKS[task]["limit"], reader.max_context // SHARE)
            for number, place, row in numbered_rows(source, COLUMNS, limit, config="default", split=task):
                prompt = templates[task].format(**_fields(task, row, place))
                yield Sample(
                    task=f"infinitebench/{task}",
                    name=str(number),
                    tokens=truncated_prompt(reader.tokenizer, prompt, reader.max_context - tokens),
                    metric=metric,
                    answers=right_answers(row, metric, place),
                    limit=tokens,
                )

    def _files(self) -> dict[str, str]:
        return named_files(self.source, [*TASKS], self.tasks, "InfiniteBench")

    def _templates(self) -> dict[str, str]:
        optional_fields = ("input", "question", *OPTION_FIELDS, "prefix", "func", "func_call")
        return read_prompts(self.prompts, TASKS, "context", optional_fields, "InfiniteBench's templates")


def _fields(task: str, row: Mapping[str, Any], place: str) -> dict[str, str]:
    """What a prompt is filled in with."""
    fields = dict.fromkeys(("prefix", "func", "func_call"), "") | option_fields(row, TASKS[task]["metric"], place)
    if task == "math_find":
        fields["prefix"] = f"What is {_matched_text('The .+(?= of)', row, place).lower()} in this list?"
    if task == "code_run":
        call = _matched_text(r"func_[0-9]+\(-?[0-9]+\)", row, place)
        fields |= {"func": call.partition("(")[0], "func_call": call}
    return {**fields, "context": row["context"], "input": row["input"], "question": row["input"]}


def _matched_text(pattern: str, row: Mapping[str, Any], place: str) -> str:
    match = re.search(pattern, row["input"])
    if match is None:
        raise TextError(f'{place}: "input" does not say what is asked for, got {row["input"][:60]!r}')
    return match[0]


TASK = InfiniteBenchTask
