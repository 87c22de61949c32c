"""The processes that share an evaluation's samples: what `torchrun` started, by accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from kvsurgery.errors import KVSurgeryError

PATIENCE = timedelta(hours=2)  # how long a process waits for another, which may have long prompts


@dataclass(frozen=True)
class Processes:
    """This process among all; the only one, where nothing started more.

    Attributes:
        rank, world: its number, and how many there are.
        device: where it computes.
        accelerator: accelerate's `Accelerator`, of more than one.
    """

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    accelerator: Any = None

    def first(self) -> AbstractContextManager[None]:
        """A block that the first process runs before the others do."""
        return self.accelerator.main_process_first() if self.accelerator else nullcontext()

    def gather(self, records: Sequence[Any]) -> list[Any]:
        """All processes' records, in the order of their numbers."""
        if self.accelerator is None:
            return list(records)
        from accelerate.utils import gather_object

        return gather_object(list(records))


def is_first() -> bool:
    """Whether this is the first of the processes that a launcher started, by the environment that it left."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def started_processes(device: str | None = None) -> Iterator[Processes]:
    """The processes that a launcher started, by the environment that it left.

    Args:
        device: default is CUDA where there is one, a device for each process.

    Raises:
        KVSurgeryError: there are several, and accelerate is not installed.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes(device=device)
        return
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs
    except ImportError as error:
        raise KVSurgeryError("several processes need accelerate: pip install 'kvsurgery[eval]'") from error
    accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])
    try:
        yield Processes(accelerator.process_index, accelerator.num_processes, str(accelerator.device), accelerator)
    finally:
        accelerator.end_training()
