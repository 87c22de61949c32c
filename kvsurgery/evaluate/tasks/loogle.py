"""LooGLE: questions, summaries and clozes on papers, articles and scripts (Li et al. 2023, arXiv 2311.04939)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvsurgery.errors import TextError, short
from kvsurgery.evaluate.prompts import read_prompts, truncated_prompt
from kvsurgery.evaluate.rows import named_files, numbered_rows, table_beside
from kvsurgery.evaluate.sample import Reader, Sample, fewest
from kvsurgery.setting import SOURCE, THERE, samples_setting, setting

TASKS = table_beside(__file__)


@dataclass(frozen=True)
class LoogleTask:
    """The benchmark's questions and answer lengths, its metrics that need no model, and our prompts or those of a file.

    Attributes:
        source: a dataset's id, a folder with files such as `longdep_qa.jsonl`, or one such file.
        tasks: such as "longdep_qa". None: of a folder all that are there, of an id all.
        prompts: a file such as LooGLE's `task2prompt.json`, by task a text with {input} and maybe {Q}.
        rows: the most samples of each task, the first ones. None: all.
    """

    source: str = setting("bigai-nlco/LooGLE", "loogle", SOURCE)
    tasks: tuple[str, ...] | None = setting(None, "loogle_tasks", "tasks such as longdep_qa", default=THERE)
    prompts: str | None = setting(None, "loogle_prompts", "a file such as LooGLE's task2prompt.json", default="shipped")
    rows: int | None = samples_setting()

    def check(self) -> None:
        """Check that there is what the samples need, without reading them."""
        self._templates()
        self._files()

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """Task by task, in the order of the rows and of their questions."""
        limit = fewest(limit, self.rows)
        files, templates = self._files(), self._templates()
        for task, source in files.items():
            if task not in templates:
                raise TextError(f"{self.prompts} has no prompt for {task}")
            yield from islice(self._samples(reader, task, source, templates[task]), limit)

    def _samples(self, reader: Reader, task: str, source: str, template: str) -> Iterator[Sample]:
        spec = TASKS[task]
        room = reader.max_context - spec["limit"]
        for number, place, row in numbered_rows(source, {}, config=spec.get("config", task), split="test"):
            # files call the document `input`, the Hub calls it `context`
            document = row.get("context", row.get("input"))
            if not isinstance(document, str):
                raise TextError(f'{place}: "input" or "context" must be text, the document')
            for turn, pair in enumerate(_pairs(row, place)):
                masks, answers = _masks_and_answers(pair.get("A"), spec["metric"], place)
                question = pair.get("Q")
                if "{Q}" in template and not (isinstance(question, str) and question):
                    raise TextError(f'{place}: a question, "Q" or "question", must be text, got {short(question)}')
                prompt = template.format(input=document, Q=question)
                yield Sample(
                    task=f"loogle/{task}",
                    name=f"{number}/{turn}",
                    tokens=truncated_prompt(reader.tokenizer, prompt, room),
                    metric=spec["metric"],
                    also=tuple(spec["also"]),
                    answers=answers,
                    choices=masks,
                    limit=spec["limit"],
                    facts={"type": pair["type"]} if "type" in pair else {},
                )

    def _files(self) -> dict[str, str]:
        return named_files(self.source, [*TASKS], self.tasks, "LooGLE")

    def _templates(self) -> dict[str, str]:
        return read_prompts(self.prompts, TASKS, "input", ("Q",), "LooGLE's task2prompt.json")


def _pairs(row: Mapping[str, Any], place: str) -> list[Mapping[str, Any]]:
    """Questions `Q` and answers `A` of a row: several in a file's, one in the Hub's, and none asked for a summary."""
    if "qa_pairs" not in row:
        return [{"Q": row.get("question"), "A": row.get("answer")}]
    if row["qa_pairs"] == "none":
        return [{"A": row.get("output")}]
    try:
        pairs = row["qa_pairs"] if isinstance(row["qa_pairs"], list) else ast.literal_eval(row["qa_pairs"])
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pairs = None
    # the published files hold them as a text of Python
    if not isinstance(pairs, list) or not all(isinstance(pair, dict) and "Q" in pair for pair in pairs):
        raise TextError(f'{place}: "qa_pairs" must be a list of questions "Q" and answers "A", or its text')
    return pairs


def _masks_and_answers(answer: Any, metric: str, place: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The masks of a cloze, none of another question, and what is right."""
    if metric == "cloze_exact":
        names_by_mask = (
            {f"<mask-{place}>": name for place, name in enumerate(answer)} if isinstance(answer, list) else answer
        )
        if (
            not isinstance(names_by_mask, dict)
            or not names_by_mask
            or not all(isinstance(name, str) for name in names_by_mask.values())
        ):
            raise TextError(f'{place}: the answer to a cloze, "A" or "answer", must give a name for each mask')
        return tuple(names_by_mask), tuple(names_by_mask.values())
    if not isinstance(answer, str):
        raise TextError(f'{place}: an answer, "A", "answer" or "output", must be text, got {short(answer)}')
    return (), (answer,)


TASK = LoogleTask
