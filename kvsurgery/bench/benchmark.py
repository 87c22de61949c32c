"""Run a benchmark of a converted checkpoint: checks, default workload, measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from kvsurgery.bench.caches import stored_bytes
from kvsurgery.bench.contenders import contenders, load_models, usable_contenders
from kvsurgery.bench.measure import measure
from kvsurgery.bench.results import Bench
from kvsurgery.bench.timing import read_bandwidth
from kvsurgery.bench.workload import Workload
from kvsurgery.conversion.converted import original_fingerprint
from kvsurgery.conversion.inspection import Facts, Surgery, inspect_checkpoint
from kvsurgery.display.progress import Progress, silent
from kvsurgery.errors import CheckpointError, KVSurgeryError
from kvsurgery.evaluate.checkpoint import read_text_config
from kvsurgery.evaluate.records import versions
from kvsurgery.evaluate.results import CONVERTED, ORIGINAL
from kvsurgery.system.processes import started_processes, usable_device

# on a CPU, sizes that a small model measures in a minute or two; prompts must fit into the context
DEFAULT_LENGTHS = {"cpu": (512, 1024, 2048, 4096), "cuda": (4096, 16384, 65536)}
DEFAULT_CHUNK = {"cpu": 512, "cuda": 2048}


def benchmark(
    folder: Path,
    source: Path | None = None,
    workload: Workload | None = None,
    *,
    device: str | None = None,
    dtype: str = "auto",
    command: str = "",
    progress: Progress = silent,
    keep: Callable[[Bench], None] = lambda results: None,
    trust_remote_code: bool = False,
) -> Bench:
    """Measure a converted checkpoint and the original; processes that a launcher started share both models.

    Args:
        folder: the converted checkpoint; its code is executed.
        source: the original's folder; by default, the stock class with the converted model's weights.
        workload: lengths, batches and rounds; by default `default_workload`.
        device: by default CUDA if available.
        dtype: of weights and caches; "auto" is the checkpoint's.
        command: the command as typed, for the results.
        progress: called as in `measure`, and while models are loaded.
        keep: called in the first process with the results so far, after each batch and length.
        trust_remote_code: run code that the config names, in addition to the emitted code.

    Raises:
        CheckpointError: `folder` was not converted, or not for this number of processes, or a model cannot be loaded.
        KVSurgeryError: the device is missing, weights do not fit, or prompts exceed the context.
    """
    facts, surgery = _inspect_converted(folder)
    device_name = usable_device(device)
    work = workload or default_workload(folder, device_name)
    positions = read_text_config(folder, trust_remote_code).max_position_embeddings
    budget = _recompute_budget(surgery)
    for length in work.lengths:
        if length + work.new > positions and (budget is None or length <= budget):
            raise KVSurgeryError(
                f"{length:,} and {work.new:,} new tokens are beyond the {positions:,} positions of {folder}; "
                "measure shorter prompts"
            )
    with started_processes(device_name) as processes:
        if processes.rank > 0:
            progress = silent
        progress(0, None, f"loading {folder}")
        converted, original = load_models(folder, source, processes, dtype)
        part = (0, 1) if surgery.replicated else (processes.rank, processes.world)
        measured_contenders, left_out = usable_contenders(contenders(converted, original, part))
        progress(0, None, "measuring the memory's bandwidth")
        bandwidth = read_bandwidth(converted.device)
        results = Bench(
            models={CONVERTED: str(folder), ORIGINAL: str(source or folder)},
            command=command,
            settings={
                **asdict(work),
                "device": device_name,
                "dtype": str(converted.dtype).removeprefix("torch."),
                "processes": processes.world,
                "attention": original.get_decoder().config._attn_implementation,
            },
            versions={**versions(processes.device), "threads": str(torch.get_num_threads())},
            checkpoint=facts.to_json(),
            weights=sum(map(stored_bytes, original.parameters())),
            bandwidth=bandwidth,
            contenders=tuple(contender.name for contender in measured_contenders),
            left_out=left_out,
            rows=(),
            original=original_fingerprint(folder),
        )
        for rows in measure(measured_contenders, work, bandwidth, progress, processes):
            results = replace(results, rows=results.rows + rows)
            if processes.rank == 0:
                keep(results)
    return results


def default_workload(
    folder: Path, device: str | None = None, new: int = Workload.new, trust_remote_code: bool = False
) -> Workload:
    """The default prompts and chunks for a device and a converted checkpoint's context, with room for `new` tokens.

    Raises:
        CheckpointError: `folder` was not converted.
        KVSurgeryError: `new` is out of range, or the device is not there.
    """
    _, surgery = _inspect_converted(folder)
    kind = torch.device(usable_device(device)).type
    room = max(read_text_config(folder, trust_remote_code).max_position_embeddings - new, 1)
    return Workload(default_lengths(kind, room, _recompute_budget(surgery)), new=new, chunk=DEFAULT_CHUNK[kind])


def default_lengths(device: str, room: int, budget: int | None) -> tuple[int, ...]:
    """Prompt lengths that fit; with a recompute budget, also two and four times this budget."""
    fitting_lengths = {min(length, room) for length in DEFAULT_LENGTHS[device]}
    return tuple(sorted(fitting_lengths | {times * budget for times in (2, 4) if budget}))


def _inspect_converted(folder: Path) -> tuple[Facts, Surgery]:
    """The facts of a checkpoint that must be converted."""
    facts = inspect_checkpoint(folder, str(folder))
    if facts.surgery is None:
        raise CheckpointError(f"{folder} is not a converted checkpoint; give a folder that `kvsurgery convert` wrote")
    return facts, facts.surgery


def _recompute_budget(surgery: Surgery) -> int | None:
    return surgery.reform["recompute_budget"] if surgery.reform else None
