"""`Sample`: one question to a model, and `Reader`: the model that questions are written for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from kvsurgery.errors import KVSurgeryError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from kvsurgery.evaluate.images import ImagePrompt

SHORT_ANSWER = 128  # tokens that a short answer has at most: before it, the last tokens of the prompt come one by one


@dataclass(frozen=True, eq=False)
class Reader:
    """What questions are written for: both models of an evaluation read the same tokens.

    Attributes:
        tokenizer: of the checkpoint.
        max_context: the most tokens that prompt and answer can have together.
        vocabulary: rows of the model's embedding.
        seed: of everything random.
        checkpoint: the folder that has the tokenizer, and a processor where the model reads images.
        trust_remote_code: run code that the processor names.
    """

    tokenizer: PreTrainedTokenizerBase
    max_context: int
    vocabulary: int
    seed: int = 0
    checkpoint: Path | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, eq=False)
class Sample:
    """One question: what is read, what is right, and how an answer is measured.

    Of a sample whose last tokens are given (`continuation`), no answer is generated: they go through the cache one by
    one, and their negative log-likelihood is measured.

    Attributes:
        task: such as "needle" or "ruler/niah_single_1": what is averaged and shown together.
        name: its own within the task, the same in every run: "4096/0.50/2".
        tokens: int64 [tokens], all that is read.
        metric: a key of `METRICS`, of what `grade` gives, "token_accuracy" or "perplexity".
        answers: what is right; what several mean is up to the metric.
        choices: what there is to choose from, for metrics that look for more than what is right.
        limit: tokens of an answer at most.
        continuation: how many of the last tokens follow the prompt.
        context: how many of the first tokens are read before the question: a compressed cache takes them for the
            prompt. Samples with the same context are asked on copies of one cache. 0: the prompt has the question.
        facts: by which results are shown: {"tokens": 4096, "depth": 0.5}. JSON values.
        stops: texts that end an answer, besides the model's end tokens.
        also: further metrics of the answer; each gives a result of its own.
        answer_tokens: for "token_accuracy", what is right token by token, int64 [limit].
        images: where the prompt has some, what the tokens were made from.
        grade: gives the scores of an answer by metric. None: metrics are keys of `METRICS`.
    """

    task: str
    name: str
    tokens: np.ndarray
    metric: str
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    limit: int = 0
    continuation: int = 0
    context: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    answer_tokens: np.ndarray | None = None
    images: ImagePrompt | None = None
    grade: Callable[[str], Mapping[str, float]] | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Its identity among all samples."""
        return self.task, self.name

    @property
    def kind(self) -> tuple:
        """Samples of one kind can be read as one batch. One with images is read alone."""
        if self.images:
            return self.key
        if self.context:
            return hashlib.sha256(self.tokens[: self.context].tobytes()).hexdigest(), self.stops
        return self.task, self.continuation, self.limit <= SHORT_ANSWER, self.stops

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric of its answer."""
        return (self.metric, *self.also)

    @property
    def positions(self) -> int:
        """The most tokens in the cache after the answer."""
        return len(self.tokens) + self.limit


def batched(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Samples that are read at once: of one kind, and next to each other in length. A context has one batch.

    Args:
        size: of other batches, at most.
    """
    kinds: dict[tuple, list[Sample]] = {sample.kind: [] for sample in samples}
    for sample in sorted(samples, key=lambda sample: len(sample.tokens)):
        kinds[sample.kind].append(sample)
    sizes = (len(group) if group[0].context else size for group in kinds.values())
    return [
        group[start : start + size]
        for group, size in zip(kinds.values(), sizes, strict=True)
        for start in range(0, len(group), size)
    ]


class Task(Protocol):
    """What is asked: a frozen dataclass whose fields are its settings."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def check(self) -> None:
        """Check settings and inputs as far as that needs neither a tokenizer nor a model.

        Raises:
            KVSurgeryError: a setting is out of range or names nothing, an input cannot be read, or a package for it is
                not installed.
        """

    def samples(self, reader: Reader, limit: int | None = None) -> Iterator[Sample]:
        """Its questions, the same for equal readers; the first ones are representative.

        Args:
            limit: the most samples of each `Sample.task`, the first ones. None: all.

        Raises:
            TextError: a text, or what is asked about it, cannot be used; a file is missing, holds no rows or one of
                another layout; or a prompt has no room.
        """


def fewest(*limits: int | None) -> int | None:
    """The smallest of some limits. None: no limit."""
    return min((limit for limit in limits if limit is not None), default=None)


def limited_samples(tasks: Mapping[str, Task], reader: Reader, limit: int | None) -> Iterator[Sample]:
    """The samples of all tasks; of each `Sample.task`, the first ones up to a limit.

    Raises:
        KVSurgeryError: a task has no samples, or two samples have one name.
    """
    return distinct(chain.from_iterable(_some_samples(name, task, reader, limit) for name, task in tasks.items()))


def distinct(samples: Iterable[Sample]) -> Iterator[Sample]:
    """The samples as they are.

    Raises:
        KVSurgeryError: two of them have one name.
    """
    seen_keys: set[tuple[str, str]] = set()
    for sample in samples:
        if sample.key in seen_keys:
            raise KVSurgeryError(f"{sample.task} has two samples of the name {sample.name}")
        seen_keys.add(sample.key)
        yield sample


def _some_samples(name: str, task: Task, reader: Reader, limit: int | None) -> Iterator[Sample]:
    is_empty = True
    for sample in task.samples(reader, limit):
        is_empty = False
        yield sample
    if is_empty:
        raise KVSurgeryError(f"{name} has no samples; check its options and files")
