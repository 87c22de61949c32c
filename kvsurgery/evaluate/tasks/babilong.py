"""BABILong: questions about facts that lie among the sentences of books (Kuratov et al. 2024, arXiv 2406.10149)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, product, zip_longest
from pathlib import Path

from kvsurgery.errors import TextError
from kvsurgery.evaluate.rows import check_source, in_folder, numbered_rows, table_beside
from kvsurgery.evaluate.sample import Reader, Sample
from kvsurgery.setting import SOURCE, THERE, samples_setting, setting
from kvsurgery.text.chat import turn_tokens

TASKS = table_beside(__file__)
COLUMNS = {"input": str, "question": str, "target": str}
LENGTH = r"\d+[kM]"
NAME = re.compile(rf"(qa\d+)_({LENGTH})")  # of a file, and how a dataset's splits and configurations are called
DEFAULT_TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")
DEFAULT_LENGTHS = ("0k", "1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k")
ANSWER_TOKENS = 20  # at most

# the metric ends an answer where one of these tags begins
EXAMPLE = "<example>\n{}\nQuestion: {}\nAnswer: {}\n</example>\n\n"
PROMPT = """\
A few sentences of the text below are facts; the others come from books and do not matter. {facts}
A question follows the text. {form} Some examples first:

{examples}<context>
{context}
</context>

Question: {question}
Answer:"""


@dataclass(frozen=True)
class BabilongTask:
    """Questions of the benchmark and its metric, with prompts of our own.

    Attributes:
        source: a dataset's id, a folder with files such as `qa1_4k.jsonl`, or one such file.
        tasks: "qa1" to "qa10". None: of a folder all that are there, of a dataset the first five.
        lengths: of contexts, as they are called: "0k", "4k", "1M". None: of a folder all that are there, of a dataset
            those that the model has positions for.
        rows: the most samples of each task and length, the first ones. None: all.
    """

    source: str = setting("RMT-team/babilong", "babilong", SOURCE)
    tasks: tuple[str, ...] | None = setting(None, "babilong_tasks", "tasks such as qa1,qa2", default=THERE)
    lengths: tuple[str, ...] | None = setting(None, "babilong_lengths", "lengths such as 0k,4k", default=THERE)
    rows: int | None = samples_setting()

    def check(self) -> None:
        """Check that the source can be read."""
        check_source(self.source)

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """Task by task, of each the first row of every length, then the second."""
        parts = self._parts(reader)
        for task in dict.fromkeys(task for task, _ in parts):
            columns = [islice(self._samples(reader, *part), self.rows) for part in parts if part[0] == task]
            rows = chain.from_iterable(zip_longest(*columns))
            yield from islice(filter(None, rows), limit)

    def _parts(self, reader: Reader) -> list[tuple[str, str]]:
        """Tasks and lengths, in the order of their numbers."""
        for length in self.lengths or ():
            if not re.fullmatch(LENGTH, length):
                raise TextError(f"BABILong's lengths are called 0k, 1k, 2k, ... 1M, 10M; got {length}")
        path = Path(self.source)
        if path.is_dir():
            present_parts = [(match[1], match[2]) for file in path.iterdir() if (match := NAME.fullmatch(file.stem))]
        elif path.is_file():
            if not (match := NAME.fullmatch(path.stem)):
                raise TextError(f"{path}: the name must say the task and the length, as qa1_4k.jsonl does")
            present_parts = [(match[1], match[2])]
        else:
            fitting_lengths = [length for length in DEFAULT_LENGTHS if _tokens(length) < reader.max_context]
            present_parts = [*product(self.tasks or DEFAULT_TASKS, self.lengths or fitting_lengths)]
        requested_names = {*(self.tasks or ()), *(self.lengths or ())}
        parts = {
            part for part in present_parts if part[0] in (self.tasks or part) and part[1] in (self.lengths or part)
        }
        if not parts or (missing_names := requested_names.difference(*parts)):
            listed_names = ", ".join(sorted(missing_names if parts else requested_names))
            raise TextError(f"{self.source} has no {listed_names or 'files'} of BABILong, such as qa1_4k.jsonl")
        if unknown_tasks := {task for task, _ in parts} - {*TASKS}:
            raise TextError(f"there are prompts for {', '.join(TASKS)}; got {', '.join(sorted(unknown_tasks))}")
        return sorted(parts, key=lambda part: (int(part[0][2:]), _tokens(part[1])))

    def _samples(self, reader: Reader, task: str, length: str) -> Iterator[Sample]:
        spec = TASKS[task]
        examples = "".join(EXAMPLE.format(*example) for example in spec["examples"])
        source = in_folder(self.source, f"{task}_{length}")
        for number, _, row in numbered_rows(source, COLUMNS, config=length, split=task):
            context, question, target = row["input"].strip(), row["question"].strip(), row["target"].lower()
            prompt = PROMPT.format(
                facts=spec["facts"], form=spec["form"], examples=examples, context=context, question=question
            )
            yield Sample(
                task=f"babilong/{task}",
                name=f"{length}/{number}",
                tokens=turn_tokens(reader.tokenizer, prompt),
                metric="babilong",
                answers=tuple(target.split(",")),
                # what the question names is never the answer
                choices=tuple(label.lower() for label in spec["labels"] if label.lower() not in question.lower()),
                limit=ANSWER_TOKENS,
                facts={"length": length},
            )


def _tokens(length: str) -> int:
    """Of a context that is called so, about."""
    return int(length[:-1]) * {"k": 1_000, "M": 1_000_000}[length[-1]]


TASK = BabilongTask
