"""A benchmark from a folder: what is measured where nothing is said, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvsurgery.bench.caches import stored_bytes
from kvsurgery.bench.contenders import contenders, load_models, usable
from kvsurgery.bench.measure import Workload, measure
from kvsurgery.bench.results import Bench
from kvsurgery.bench.timing import read_bandwidth
from kvsurgery.conversion.inspection import inspect_checkpoint
from kvsurgery.errors import CheckpointError, KVSurgeryError
from kvsurgery.evaluate.checkpoint import read_text_config
from kvsurgery.evaluate.records import versions
from kvsurgery.evaluate.results import CONVERTED, ORIGINAL
from kvsurgery.processes import started_processes, usable_device

# on a CPU what a small model does in a minute or two; prompts are as long as the context has room for
LENGTHS = {"cpu": (512, 1024, 2048, 4096), "cuda": (4096, 16384, 65536)}
CHUNK = {"cpu": 512, "cuda": 2048}


def silent(done: int, of: int, note: str) -> None:
    """Progress that nobody is told of."""


def benchmark(
    folder: Path,
    source: Path | None = None,
    *,
    device: str | None = None,
    dtype: str = "auto",
    lengths: tuple[int, ...] | None = None,
    chunk: int | None = None,
    command: str = "",
    progress: Callable[[int, int, str], None] = silent,
    **options: Any,
) -> Bench:
    """Measure a converted checkpoint beside the original; processes that a launcher started share both.

    Args:
        folder: the converted checkpoint; its code is executed.
        source: the original's folder; by default the stock class over the converted one's weights.
        device: default is CUDA where there is one.
        dtype: of the weights and caches; "auto" is the checkpoint's.
        lengths, chunk: of `Workload`; by default what suits the device and the model's context.
        command: what was typed, for the results.
        progress: as `measure` calls it.
        options: what else `Workload` has.

    Raises:
        CheckpointError: `folder` was not converted, or not for this many processes, or a model cannot be loaded.
        KVSurgeryError: numbers that make no sense, a device that is not there, weights that do not fit, or prompts
            beyond the context.
    """
    facts = inspect_checkpoint(folder, str(folder))
    if facts.surgery is None:
        raise CheckpointError(f"{folder} is not a converted checkpoint; give a folder that `kvsurgery convert` wrote")
    where, new = usable_device(device), options.get("new", Workload.new)
    positions = read_text_config(folder).max_position_embeddings
    budget = facts.surgery.reform["recompute_budget"] if facts.surgery.reform else None
    kind = torch.device(where).type
    lengths = lengths or default_lengths(kind, positions - new, budget)
    for length in lengths:
        if length + new > positions and (budget is None or length <= budget):
            raise KVSurgeryError(
                f"{length:,} and {new:,} new tokens are beyond the {positions:,} positions of {folder}; "
                "measure shorter prompts"
            )
    work = Workload(lengths, chunk=chunk or CHUNK[kind], **options)
    with started_processes(where) as processes:
        converted, original = load_models(folder, source, processes, dtype)
        part = (0, 1) if facts.surgery.replicated else (processes.rank, processes.world)
        found, left_out = usable(contenders(converted, original, part))
        bandwidth = read_bandwidth(converted.device)
        rows = measure(found, work, bandwidth, progress if processes.rank == 0 else silent, processes)
    return Bench(
        models={CONVERTED: str(folder), ORIGINAL: str(source or folder)},
        command=command,
        settings={
            **asdict(work),
            "device": where,
            "dtype": str(converted.dtype).removeprefix("torch."),
            "processes": processes.world,
            "attention": original.get_decoder().config._attn_implementation,
        },
        versions={**versions(processes.device), "threads": str(torch.get_num_threads())},
        checkpoint=facts.to_json(),
        weights=sum(map(stored_bytes, original.parameters())),
        bandwidth=bandwidth,
        contenders=tuple(contender.name for contender in found),
        left_out=left_out,
        rows=rows,
    )


def default_lengths(device: str, room: int, budget: int | None) -> tuple[int, ...]:
    """Lengths of prompts up to what there is room for; beside a recompute budget also two that it is a part of."""
    within = {min(length, room) for length in LENGTHS[device]}
    return tuple(sorted(within | {times * budget for times in (2, 4) if budget}))
