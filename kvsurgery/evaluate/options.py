"""`Options`: how an evaluation runs, whatever its tasks are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvsurgery.errors import KVSurgeryError

NOT_ANSWERS = ("tp", "trust_remote_code")


@dataclass(frozen=True)
class Options:
    """How an evaluation runs.

    Attributes:
        limit: the most samples of a task, the first ones. None: all.
        batch: samples of similar length that are read at once, padded on the left.
        chunk: tokens of a prompt that are read at once. None: all.
        seed: of everything random.
        dtype: of the weights; "auto" is the checkpoint's.
        tp: processes that share a model by tensor parallelism: all, or each has its own. Answers do not depend on it.
        trust_remote_code: run code that a tokenizer or a processor names.

    Raises:
        KVSurgeryError: a number is out of range.
    """

    limit: int | None = None
    batch: int = 1
    chunk: int | None = None
    seed: int = 0
    dtype: str = "auto"
    tp: int = 1
    trust_remote_code: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The options that change answers."""
        return {name: value for name, value in asdict(self).items() if name not in NOT_ANSWERS}

    def __post_init__(self) -> None:
        for name in ("limit", "batch", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise KVSurgeryError(f"`{name}` must be 1 or more, got {value}")
        if self.seed < 0:
            raise KVSurgeryError(f"`seed` must be 0 or more, got {self.seed}")
