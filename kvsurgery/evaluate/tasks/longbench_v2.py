"""LongBench v2: questions with four options on documents of any length (Bai et al. 2024, arXiv 2412.15204)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvsurgery.errors import TextError
from kvsurgery.evaluate.prompts import truncated_prompt
from kvsurgery.evaluate.rows import check_source, in_folder, numbered_rows
from kvsurgery.evaluate.sample import Reader, Sample, fewest
from kvsurgery.setting import SOURCE, samples_setting, setting
from kvsurgery.system.files import reading_text

ANSWER_TOKENS = 128  # at most
# how the benchmark's prompt files call the fields of a row
PLACEHOLDERS = {
    "$DOC$": "context", "$Q$": "question",
    "$C_A$": "choice_A", "$C_B$": "choice_B", "$C_C$": "choice_C", "$C_D$": "choice_D",
}  # fmt: skip
COLUMNS = dict.fromkeys(("_id", "difficulty", "length", "answer", *PLACEHOLDERS.values()), str)
# the metric looks for the sentence that the answer is asked in
PROMPT = """\
Here is a text. A question with four options follows it.

<text>
$DOC$
</text>

Question: $Q$
(A) $C_A$
(B) $C_B$
(C) $C_C$
(D) $C_D$

One option is right. Write its letter into this sentence, and nothing else: "The correct answer is (letter)"."""


@dataclass(frozen=True)
class LongBenchV2Task:
    """The benchmark's questions, answer length and metric, with a prompt of our own or that of a file.

    Attributes:
        source: a dataset's id, a folder with `data.json`, or one file.
        prompt: a file such as LongBench v2's `prompts/0shot.txt`.
        rows: the most samples, the first ones. None: all.
    """

    source: str = setting("THUDM/LongBench-v2", "longbench_v2", SOURCE)
    prompt: str | None = setting(
        None, "longbench_v2_prompt", "a file such as LongBench v2's prompts/0shot.txt", default="shipped"
    )
    rows: int | None = samples_setting()

    def check(self) -> None:
        """Check that the source can be read, and the prompt."""
        _prompt(self.prompt)
        check_source(self.source)

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """One of each row, in their order."""
        limit = fewest(limit, self.rows)
        template, source = _prompt(self.prompt), in_folder(self.source, "data")
        room = reader.max_context - ANSWER_TOKENS
        for _, place, row in numbered_rows(source, COLUMNS, limit, config="default", split="train"):
            if row["answer"] not in (*"ABCD",):
                raise TextError(f'{place}: "answer" must be A, B, C or D, got {row["answer"]!r}')
            # in one pass, so that what a document says is not filled in
            pattern = "|".join(map(re.escape, PLACEHOLDERS))
            prompt = re.sub(pattern, lambda match, row=row: row[PLACEHOLDERS[match[0]]].strip(), template)
            yield Sample(
                task="longbench_v2",
                name=row["_id"],
                tokens=truncated_prompt(reader.tokenizer, prompt, room),
                metric="stated_letter",
                answers=(row["answer"],),
                limit=ANSWER_TOKENS,
                facts={"difficulty": row["difficulty"], "length": row["length"]},
            )


def _prompt(path: str | None) -> str:
    """The prompt of a file if there is one.

    Raises:
        TextError: it cannot be read, or has no placeholder for the text or for the question.
    """
    if path is None:
        return PROMPT
    with reading_text(path):
        prompt = Path(path).read_text(encoding="utf-8-sig")
    if missing_placeholders := [placeholder for placeholder in PLACEHOLDERS if placeholder not in prompt]:
        raise TextError(
            f"{path} has no {', '.join(missing_placeholders)}; give a prompt such as LongBench v2's prompts/0shot.txt"
        )
    return prompt


TASK = LongBenchV2Task
