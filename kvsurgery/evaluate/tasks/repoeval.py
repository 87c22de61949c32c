"""RepoEval: lines and calls that complete a file of a repository (Zhang et al. 2023, arXiv 2303.12570)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvsurgery.errors import TextError
from kvsurgery.evaluate.prompts import truncated_prompt
from kvsurgery.evaluate.rows import named_files, numbered_rows
from kvsurgery.evaluate.sample import Reader, Sample, fewest
from kvsurgery.setting import samples_setting, setting
from kvsurgery.system.files import check_readable

ANSWER_TOKENS = 100  # tokens at most; the benchmark's code leaves it to whoever generates
# what RepoCoder publishes; functions are left out, since their tests would have to run
CONTEXT_SIZES = ("1k_context_codegen", "2k_context_codegen", "2k_context_codex", "4k_context_codex")
FILES = [f"{level}_level_completion_{size}.test" for level in ("line", "api") for size in CONTEXT_SIZES]


@dataclass(frozen=True)
class RepoEvalTask:
    """The benchmark's prompts as they are, without a chat template, and its metrics.

    Attributes:
        source: a folder with the files of RepoCoder's `datasets.zip`, or a file of prompts such as its pipeline writes,
            with code from other files before the unfinished one.
        rows: the most samples of each task, the first ones. None: all.
    """

    source: str | None = setting(
        None, "repoeval", "a file of RepoEval, or a folder with RepoCoder's datasets.zip unpacked", default="none"
    )
    rows: int | None = samples_setting()

    def check(self) -> None:
        """Check that there are files."""
        self._files()

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """File by file, in the order of the rows."""
        limit = fewest(limit, self.rows)
        room = reader.max_context - ANSWER_TOKENS
        for name, path in self._files().items():
            for number, place, row in numbered_rows(path, {"prompt": str}, limit, config=name, split="test"):
                facts = row.get("metadata")
                if not isinstance(facts, dict) or not all(
                    isinstance(facts.get(key), str) and facts[key] for key in ("ground_truth", "task_id")
                ):
                    raise TextError(f'{place}: "metadata" must have texts "task_id" and "ground_truth"')
                yield Sample(
                    task=f"repoeval/{name}",
                    name=str(number),
                    tokens=truncated_prompt(reader.tokenizer, row["prompt"], room, chat=False),
                    metric="lines_match",
                    also=("edit_similarity",),
                    answers=(facts["ground_truth"],),
                    limit=ANSWER_TOKENS,
                    facts={"repository": facts["task_id"].partition("/")[0]},
                )

    def _files(self) -> dict[str, str]:
        """Paths by what they are called: "line_2k_codex" of a published file."""
        if self.source is None:
            raise TextError("`repoeval` must name a file or folder; the benchmark's are in RepoCoder's datasets.zip")
        path = Path(self.source)
        if not path.is_dir():
            check_readable(path)
            return {_short_name(path.stem): self.source}
        return {_short_name(name): path for name, path in named_files(self.source, FILES, None, "RepoEval").items()}


def _short_name(name: str) -> str:
    return re.sub(r"_level_completion|_context|\.test", "", name)


TASK = RepoEvalTask
