"""`Workload`: the prompts and rounds of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from kvsurgery.errors import KVSurgeryError

# decode steps that are not counted; on a GPU, the third captures the ones that follow
WARM = 4


@dataclass(frozen=True)
class Workload:
    """The work that every contender of a benchmark does.

    Attributes:
        lengths: tokens of prompts.
        batches: batch sizes.
        new: decode steps after a prompt, the first `WARM` of which do not count; with 12 and more, a CUDA graph is
            captured.
        chunk: tokens of a chunk, where a prompt is also read in chunks.
        rounds: number of timed rounds, after a round that warms up and measures the memory.
        seed: of the prompts' random tokens.

    Raises:
        KVSurgeryError: a number is out of range.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    new: int = 48
    chunk: int = 2048
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, minimum in {"lengths": 1, "batches": 1, "new": WARM + 1, "chunk": 1, "rounds": 1}.items():
            value = getattr(self, name)
            smallest_value = min(value, default=0) if isinstance(value, tuple) else value
            if smallest_value < minimum:
                raise KVSurgeryError(f"`{name}` must be {minimum} or more, got {smallest_value}")

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Every batch and length, once."""
        return [*dict.fromkeys((batch, length) for batch in self.batches for length in self.lengths)]
