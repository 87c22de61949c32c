"""Distributed processes, as `torchrun` or `accelerate launch` start them."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers

from kvsurgery.errors import KVSurgeryError

PATIENCE = timedelta(hours=2)  # how long a process waits for another, which may have long prompts or a large model


@dataclass(frozen=True)
class Processes:
    """This process and the number of all processes; without a launcher, the only one.

    Attributes:
        rank, world: the rank of this process, and the number of processes.
        local, local_world: the same on this machine.
        device: the device on which it computes.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    local_world: int = 1
    device: str = "cpu"

    @contextmanager
    def first(self) -> Generator[None]:
        """Let the first process run a block before the others."""
        if self.world > 1 and self.rank > 0:
            dist.barrier()
        yield
        if self.world > 1 and self.rank == 0:
            dist.barrier()

    @contextmanager
    def in_turns(self) -> Generator[None]:
        """Let the processes of a machine run a block one after another."""
        for turn in range(self.local_world):
            if turn == self.local:
                yield
            if self.world > 1:
                dist.barrier()

    def gather(self, records: Sequence[Any]) -> list[Any]:
        """Gather the records of all processes, in the order of their ranks."""
        if self.world == 1:
            return list(records)
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, list(records))
        return [record for process_records in gathered for record in process_records]

    def agree(self, value: Any) -> Any:
        """Broadcast the first process's value to all processes."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, 0, device=torch.device(self.device))
        return values[0]

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor


def tensor_parallel(device: str, tp: int, fsdp: int = 1, tail: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments of `from_pretrained` for `tp` processes that share the heads and weights of every layer.

    Args:
        device: the device of the processes.
        fsdp: number of such groups, over which the weights are sharded further.
        tail: modules that are sharded one by one, although transformers would shard them together; a loss on the
            output of the first one requires this.

    Raises:
        KVSurgeryError: this version of transformers does not combine both ways, or does not support the device.
    """
    if device == "cpu" and torch.cuda.is_available():
        raise KVSurgeryError(
            "transformers shares models over GPUs where there are some; hide them: CUDA_VISIBLE_DEVICES="
        )
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if fsdp > 1 and version < (5, 18):
        raise KVSurgeryError(
            f"transformers {transformers.__version__} shares a model over one group of processes only; start {tp}, or "
            "use 5.18 or newer"
        )
    if version < (5, 0):
        return {"tp_plan": "auto"}
    from transformers.distributed import DistributedConfig

    if fsdp == 1:
        return {"distributed_config": DistributedConfig(tp_size=tp)}
    plan = dict.fromkeys(tail, "free_full_weight")
    return {"distributed_config": DistributedConfig(tp_size=tp, fsdp_size=fsdp, fsdp_plan=plan)}


def is_first() -> bool:
    """Whether this is the first process of a launcher, by its environment variables."""
    return os.environ.get("RANK", "0") == "0"


def usable_device(name: str | None) -> str:
    """The name of a device that torch can use; by default CUDA if available.

    Raises:
        KVSurgeryError: torch cannot use it.
    """
    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise KVSurgeryError(f"torch cannot use the device {device}: {reason}; give another `device`") from error
    return device


@contextmanager
def started_processes(device: str | None = None) -> Generator[Processes]:
    """The processes of a launcher, in a process group (NCCL on CUDA, else gloo); without a launcher, only this one.

    Args:
        device: by default CUDA if available, with a device for each process of a machine.

    Raises:
        KVSurgeryError: as `usable_device`.
    """
    device = usable_device(device)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if world == 1:
        yield Processes(device=device)
        return
    owns_group = not dist.is_initialized()  # else the caller's group is taken
    if device == "cuda":
        device = f"cuda:{local}"
        torch.cuda.set_device(device)
    if owns_group and device == "cpu":
        dist.init_process_group("gloo", timeout=PATIENCE)
    elif owns_group:
        dist.init_process_group("nccl", timeout=PATIENCE, device_id=torch.device(device))
    try:
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        yield Processes(dist.get_rank(), world, local, local_world, device)
    finally:
        if owns_group:
            dist.destroy_process_group()
