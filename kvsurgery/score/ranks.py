"""Several processes that share the work: what `torchrun` or `accelerate launch` started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvsurgery.errors import ProfileError
from kvsurgery.score.subject import Subject

PATIENCE = timedelta(hours=2)  # how long a process waits for another, which may have a large model to load


@dataclass(frozen=True)
class Ranks:
    """This process among all that share the work; the only one, where nothing started more.

    Attributes:
        rank, world: its number, and how many there are.
        local, local_world: the same on this machine.
        device: where it computes.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    local_world: int = 1
    device: str = "cpu"

    def load(self, source: str, revision: str | None = None, *, dtype: str = "auto") -> Subject:
        """`Subject.load` on every process, the weights sharded over all of them (FSDP2).

        The processes of a machine take turns, so that its memory holds one whole model at a time. Each reads the whole
        checkpoint. `lm_head` is not sharded.
        """
        if self.world == 1:
            return Subject.load(source, revision, device=self.device, dtype=dtype)
        for turn in range(self.local_world):
            if turn == self.local:
                subject = Subject.load(source, revision, device="cpu", dtype=dtype)
                self.shard(subject)
            dist.barrier()
        return subject

    def shard(self, subject: Subject) -> None:
        """Keep a part of every layer's frozen weights here, gathered when the layer is computed."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        device = torch.device(self.device).type
        mesh = DeviceMesh(device, range(self.world))
        for layer in subject.model.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(subject.model.get_decoder(), mesh=mesh)
        subject.model.to(self.device)

    def share(self, prompts: int) -> range:
        """Which of so many prompts are this process's.

        Raises:
            ProfileError: they cannot be dealt evenly.
        """
        if prompts % self.world:
            raise ProfileError(
                f"{prompts} prompts cannot be dealt evenly to {self.world} processes; give a multiple of {self.world}"
            )
        return range(self.rank, prompts, self.world)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of every process's tensor, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, value: Any) -> Any:
        """What the first process has."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, 0, device=torch.device(self.device))
        return values[0]


@contextmanager
def started_ranks(device: str | None = None) -> Iterator[Ranks]:
    """The processes that a launcher started, by the environment it left; NCCL on CUDA, else gloo.

    Args:
        device: default is CUDA where there is one, a device for each process of a machine.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if world == 1:
        yield Ranks(device=device)
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        device = f"cuda:{local}"
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=PATIENCE, device_id=torch.device(device))
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        yield Ranks(dist.get_rank(), world, local, local_world, device)
    finally:
        dist.destroy_process_group()
