"""LongBench: questions, summaries, examples and code, in English and Chinese (Bai et al. 2023, arXiv 2308.14508)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from kvsurgery.errors import TextError
from kvsurgery.evaluate.prompts import read_prompts, truncated_prompt
from kvsurgery.evaluate.rows import check_source, named_files, read_rows, table_beside
from kvsurgery.evaluate.sample import Reader, Sample, fewest
from kvsurgery.metrics.words import require_jieba
from kvsurgery.setting import SOURCE, THERE, samples_setting, setting

DATASETS = table_beside(__file__)
COLUMNS = {"input": str, "context": str, "answers": list, "length": int, "dataset": str}
EXTENDED = (
    "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum",
    "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
)  # fmt: skip
BUCKETS = ((4000, "0-4k"), (8000, "4-8k"))  # words of a LongBench-E context, below which it is called so


@dataclass(frozen=True)
class LongBenchTask:
    """The benchmark's questions, answer lengths and metrics, with prompts of our own or those of a file.

    Attributes:
        source: a dataset's id, a folder with files such as `hotpotqa.jsonl`, or one file.
        datasets: such as "hotpotqa". None: of a folder or file all that are there, of an id all.
        extended: LongBench-E, whose files are called `hotpotqa_e.jsonl`; scores are shown by length too.
        prompts: a file such as LongBench's `dataset2prompt.json`, by dataset a text with {context} and maybe {input}.
        rows: the most samples of each task, the first ones. None: all.
    """

    source: str = setting("THUDM/LongBench", "longbench", SOURCE)
    datasets: tuple[str, ...] | None = setting(None, "longbench_datasets", "datasets such as hotpotqa", default=THERE)
    extended: bool = setting(False, "longbench_extended", "use LongBench-E, with scores by length")
    prompts: str | None = setting(
        None, "longbench_prompts", "a file such as LongBench's dataset2prompt.json", default="shipped"
    )
    rows: int | None = samples_setting()

    def check(self) -> None:
        """Check that there is what the samples need, without reading them."""
        if unknown_datasets := {*(self.datasets or ())} - {*DATASETS}:
            raise TextError(f"LongBench has no {', '.join(sorted(unknown_datasets))}; it has {', '.join(DATASETS)}")
        _prompts(self.prompts)
        datasets = (name.removesuffix("_e") for name in self._files())
        if any(DATASETS.get(name, {}).get("metric", "").endswith("_zh") for name in datasets):
            require_jieba()

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """Dataset by dataset, in the order of the rows.

        Raises:
            KVSurgeryError: answers are in Chinese, and jieba is not installed.
        """
        limit = fewest(limit, self.rows)
        self.check()
        prompts = _prompts(self.prompts)
        for name, source in self._files().items():
            numbers = {dataset: islice(count(), limit) for dataset in self.datasets or DATASETS}
            for row in read_rows(source, COLUMNS, config=name, split="test"):
                dataset = row["dataset"].removesuffix("_e")
                if dataset not in DATASETS:
                    raise TextError(f'{self.source}: "dataset" {dataset!r} is none of {", ".join(DATASETS)}')
                if dataset in numbers and (number := next(numbers[dataset], None)) is not None:
                    if dataset not in prompts:
                        raise TextError(f"{self.prompts} has no prompt for {dataset}")
                    prompt = prompts[dataset].format(context=row["context"], input=row["input"])
                    yield self._sample(reader, dataset, number, row, prompt)

    def _files(self) -> dict[str, str]:
        """What is read, by the names of the benchmark's files; a single file may have any name, and any datasets."""
        if Path(self.source).is_file():
            check_source(self.source)
            return {Path(self.source).stem: self.source}
        suffix = "_e" if self.extended else ""
        names = [name + suffix for name in (EXTENDED if self.extended else DATASETS)]
        return named_files(self.source, names, self.datasets and [name + suffix for name in self.datasets], "LongBench")

    def _sample(self, reader: Reader, dataset: str, number: int, row: Mapping[str, Any], prompt: str) -> Sample:
        metric, limit = DATASETS[dataset]["metric"], DATASETS[dataset]["limit"]
        classes = row.get("all_classes") or ()
        if not row["answers"] or (metric == "classification" and not isinstance(classes, list)):
            raise TextError(f'{self.source}: row {number + 1} of {dataset} needs "answers", and classes "all_classes"')
        if metric.endswith("_zh"):
            require_jieba()  # before a model has answered
        room = reader.max_context - limit
        bucket = next((name for bound, name in BUCKETS if row["length"] < bound), "8k+")
        return Sample(
            task=f"longbench-e/{dataset}" if self.extended else f"longbench/{dataset}",
            name=str(number),
            tokens=truncated_prompt(reader.tokenizer, prompt, room, chat=DATASETS[dataset].get("chat", True)),
            metric=metric,
            answers=tuple(row["answers"]),
            choices=tuple(classes),
            limit=limit,
            facts={"words": bucket} if self.extended else {},
        )


def _prompts(path: str | None) -> dict[str, str]:
    """Prompts by dataset, of a file if there is one.

    Raises:
        TextError: it is no JSON object of texts, or they have other fields than a row fills in.
    """
    return read_prompts(path, DATASETS, "context", ("input",), "LongBench's dataset2prompt.json")


TASK = LongBenchTask
