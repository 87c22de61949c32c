"""Several processes that work together, forked from one that has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what processes need is imported once, before they fork
import torch.distributed.fsdp
import torch.distributed.tensor
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel, dynamic_module_utils  # noqa: F401
from transformers.utils import logging

from kvsurgery.system.processes import started_processes

PATIENCE = 1800  # seconds; only a process that hangs takes that long, even on busy cores


def start(count: int, work: Callable[..., Any], out: Path, *arguments: Any) -> list[Any]:
    """What `work(processes, *arguments)` returns in each of some processes, by rank, as torchrun starts them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, work.__module__])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = Path(dynamic_module_utils.HF_MODULES_CACHE), out, work, arguments
    processes = [context.Process(target=_be, args=((rank, count, port), *given), daemon=True) for rank in range(count)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(PATIENCE)
    ends = [one.exitcode for one in processes]
    assert ends == [0] * count, ends
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _be(
    place: tuple[int, int, int], modules: Path, out: Path, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Be one of several processes; what it finds is saved as `{rank}.pt`."""
    rank, world, port = map(str, place)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dynamic_module_utils.HF_MODULES_CACHE = str(modules)
    sys.path.insert(0, str(modules))
    with started_processes("cpu") as processes:
        torch.save(work(processes, *arguments), out / f"{rank}.pt")
        torch.distributed.barrier()
