"""Several processes that work together, forked from one that has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
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

PATIENCE = 240  # seconds


def start(count: int, work: Callable[..., Any], out: Path, *arguments: Any) -> list[Any]:
    """What `work(*arguments)` returns in each of some processes, by rank, as torchrun starts them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, work.__module__])
    given = count, Path(dynamic_module_utils.HF_MODULES_CACHE), out, work, arguments
    processes = [context.Process(target=_be, args=(rank, *given), daemon=True) for rank in range(count)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(PATIENCE)
    ends = [one.exitcode for one in processes]
    assert ends == [0] * count, ends
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _be(rank: int, world: int, modules: Path, out: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Be one of several processes; what it finds is saved as `{rank}.pt`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dynamic_module_utils.HF_MODULES_CACHE = str(modules)
    sys.path.insert(0, str(modules))
    torch.distributed.init_process_group("gloo", f"file://{out / 'store'}", rank=rank, world_size=world)
    torch.save(work(*arguments), out / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
