"""`Sample`: one question to a model, and `Reader`: whom it is written for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Reader:
    """Whom questions are written for: both models of an evaluation read the same tokens.

    Attributes:
        tokenizer: of the checkpoint.
        max_context: tokens of prompt and answer that there are positions for.
        vocabulary: token ids that the model has rows for.
        seed: of all that is drawn.
    """

    tokenizer: PreTrainedTokenizerBase
    max_context: int
    vocabulary: int
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Sample:
    """One question: what is read, what is right, and how an answer is measured.

    Of a sample whose last tokens are given (`continuation`), no answer is generated: they go through the cache one by
    one, and their negative log-likelihood is measured.

    Attributes:
        task: such as "needle" or "ruler/niah_single_1": what is averaged and shown together.
        name: its own within the task, the same in every run: "4096/0.50/2".
        tokens: int64 [tokens], all that is read.
        metric: a key of `METRICS`, or "perplexity".
        answers: what is right; what several mean is up to the metric.
        limit: tokens of an answer at most.
        continuation: so many of the last tokens are what follows, not prompt.
        facts: by which results are shown: {"tokens": 4096, "depth": 0.5}. JSON values.
        stops: texts that end an answer, besides the model's end tokens.
    """

    task: str
    name: str
    tokens: np.ndarray
    metric: str
    answers: tuple[str, ...] = ()
    limit: int = 0
    continuation: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
