"""Converting: side files, shards, index, provenance, and config.json last, so that unfinished output never loads."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from kvsurgery.checkpoint.headers import Shard, file_status, header_hashes
from kvsurgery.checkpoint.journal import JOURNAL
from kvsurgery.checkpoint.provenance import PROVENANCE, Provenance, is_editable
from kvsurgery.checkpoint.side_code import SideCode
from kvsurgery.checkpoint.side_files import SideFiles, side_files
from kvsurgery.checkpoint.source import CONFIG, INDEX, Checkpoint
from kvsurgery.conversion.engine import JOBS
from kvsurgery.conversion.output import Output
from kvsurgery.conversion.plan import SurgeryPlan
from kvsurgery.conversion.replacing import remove_conversion
from kvsurgery.errors import CheckpointError, OutputError
from kvsurgery.version import __version__


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion.

    Attributes:
        out: the converted checkpoint.
        size: bytes of its weights.
        tensors, moved: how many tensors it has, and how many changed.
        left_out: files of the source that are not copied, and that `revert` does not restore.
        seconds: wall time.
        resumed: bytes of weights that an interrupted run had written.
        already_done: whether it was there already, and nothing was written.
    """

    out: Path
    size: int
    tensors: int
    moved: int
    left_out: tuple[str, ...]
    seconds: float
    resumed: int = 0
    already_done: bool = False


def convert(
    checkpoint: Checkpoint,
    plan: SurgeryPlan,
    out: str | Path,
    files: Mapping[str, bytes],
    *,
    overwrite: bool = False,
    jobs: int = JOBS,
    progress: Callable[[int], None] | None = None,
) -> ConvertReport:
    """Write the converted checkpoint. A run that was interrupted goes on when it is repeated.

    Args:
        checkpoint, plan: what is converted, and how.
        out: the folder to fill.
        files: emitted files by name, config.json among them; they replace the source's.
        overwrite: replace another conversion in this folder; files of anyone else are never removed.
        jobs: threads.
        progress: called with weight bytes done, from any thread.

    Raises:
        OutputError: `out` cannot be used or written, or holds something else.
        CheckpointError: the source cannot be read, or changed meanwhile.
    """
    start, out = time.monotonic(), Path(out)
    weights = {shard.name for shard in checkpoint.shards} | ({INDEX} if checkpoint.index is not None else set())
    sides = side_files(checkpoint.folder, weights, files, SideCode.of(checkpoint.folder).files)
    for name in sides.copied:
        if (folder := name.partition("/")[0]) in {*files, PROVENANCE, INDEX} - {name}:
            raise CheckpointError(
                f"{checkpoint.folder / folder} is a folder, and conversion writes a file of this name"
            )
    provenance = _provenance(checkpoint, plan, files, sides)
    report = ConvertReport(out, checkpoint.size, len(plan.moves), len(plan.moved), sides.left_out, 0.0)
    if overwrite and not _holds(out, checkpoint, provenance):
        remove_conversion(out, checkpoint.folder, _fingerprint(checkpoint, provenance))
    if _already_done(out, checkpoint, provenance):
        return replace(report, already_done=True, seconds=time.monotonic() - start)

    copied_hashes: dict[str, str] = {}
    size = checkpoint.size + sum(len(content) for content in [*files.values(), *sides.originals.values()])
    size += sum((checkpoint.folder / name).stat().st_size for name in sides.copied)
    with Output.open(out, checkpoint.folder, size, _fingerprint(checkpoint, provenance)) as output:
        for name, content in files.items():
            if name != CONFIG:
                output.write(name, content)
        for name in sides.copied:
            copied_hashes[name] = output.copy(name, checkpoint.folder / name)
        tensors = _move(output, checkpoint, plan, jobs, progress)
        if checkpoint.index is not None:
            output.write(INDEX, checkpoint.index)
            copied_hashes[INDEX] = blake3(checkpoint.index).hexdigest()
        output.write(PROVENANCE, replace(provenance, tensors=tensors, copied=copied_hashes).serialize())
        output.write(CONFIG, files[CONFIG])
    return replace(report, resumed=output.resumed, seconds=time.monotonic() - start)


def _move(
    output: Output, checkpoint: Checkpoint, plan: SurgeryPlan, jobs: int, progress: Callable[[int], None] | None
) -> dict[str, str]:
    """Write all shards; slow ones at the same time, so that no thread waits for the last tensor of a shard.

    Returns:
        By tensor name, the BLAKE3 of the source's bytes.
    """
    shards_at_once = min(jobs, len(checkpoint.shards)) if any(shard.slow for shard in checkpoint.shards) else 1
    failures: list[BaseException] = []

    def fail(reason: BaseException) -> None:
        failures.append(reason)
        for shard in checkpoint.shards:
            shard.stop()

    def advance(count: int) -> None:
        if failures:
            raise failures[0]
        if progress is not None:
            progress(count)

    def move(shard: Shard) -> dict[str, str]:
        if failures:
            raise failures[0]
        try:
            state_before = shard.state
            hashes = output.shard(shard, plan.moves, jobs=jobs // shards_at_once, progress=advance)
            if shard.state != state_before:
                raise CheckpointError(f"{shard.path} changed while it was read; convert again")
        except BaseException as failure:
            fail(failure)
            raise
        return hashes

    tensors: dict[str, str] = {}
    with ThreadPoolExecutor(shards_at_once) as pool:
        try:
            for hashes in pool.map(move, checkpoint.shards):
                tensors |= hashes
        except BaseException as failure:
            fail(failure)
    if failures:
        raise failures[0]
    return tensors


def _provenance(checkpoint: Checkpoint, plan: SurgeryPlan, files: Mapping[str, bytes], sides: SideFiles) -> Provenance:
    """The provenance without hashes of tensors and copied files, which are known once these are read."""
    return Provenance(
        tool=__version__,
        source=checkpoint.name,
        revision=checkpoint.revision,
        family=plan.family,
        permutation=plan.policy.orders,
        profile=plan.profile,
        policy=plan.policy.hash,
        options=plan.policy.options,
        headers=header_hashes(checkpoint.shards),
        tensors={},
        emitted={name: None if is_editable(name) else blake3(content).hexdigest() for name, content in files.items()},
        copied=dict.fromkeys([*sides.copied, *([INDEX] if checkpoint.index is not None else [])]),
        originals=sides.originals,
        left_out=sides.left_out,
    )


def _holds(out: Path, checkpoint: Checkpoint, provenance: Provenance) -> bool:
    """Whether `out` is this conversion, and sound as far as that can be told without reading weights."""
    try:
        return _already_done(out, checkpoint, provenance)
    except (OutputError, CheckpointError):
        return False


def _already_done(out: Path, checkpoint: Checkpoint, provenance: Provenance) -> bool:
    """Whether `out` is the finished conversion of this source and plan."""
    try:
        names = set(os.listdir(out))
    except OSError:
        return False
    if not {PROVENANCE, CONFIG} <= names or JOURNAL in names:
        return False
    existing_provenance = Provenance.read(out)
    hashless_provenance = replace(existing_provenance, tensors={}, copied=dict.fromkeys(existing_provenance.copied))
    if hashless_provenance.serialize() != provenance.serialize():
        raise OutputError(f"{out} holds another conversion; choose another folder, or `overwrite` it")
    finish_time = (out / PROVENANCE).stat().st_mtime_ns
    for shard in checkpoint.shards:
        if shard.changed_after(finish_time):
            folder, source = shlex.quote(str(out)), shlex.quote(str(checkpoint.folder))
            raise OutputError(
                f"{shard.path} is newer than its conversion in {out}; see whether it still is the same with "
                f"`kvsurgery verify {folder} --source {source}`, or choose another folder"
            )
        if not (out / shard.name).is_file() or (out / shard.name).stat().st_size != shard.size:
            raise OutputError(
                f"{out / shard.name} is missing or cut short; `overwrite` {out}, or choose another folder"
            )
    for name in [*existing_provenance.emitted, *existing_provenance.copied]:
        if not is_editable(name) and not (out / name).is_file():
            raise OutputError(f"{out / name} is missing; `overwrite` {out}, or choose another folder")
    return True


def _fingerprint(checkpoint: Checkpoint, provenance: Provenance) -> dict[str, str]:
    """Everything that decides the output, in parts that a message can name."""
    sources = [(shard.name, *shard.state) for shard in checkpoint.shards]
    if checkpoint.revision is None:  # side files of a commit do not change
        states = {name: file_status(checkpoint.folder / name) for name in provenance.copied}
        sources += [(name, status.st_size, status.st_mtime_ns) for name, status in states.items()]
    parts = {
        "source": [sources, dict(provenance.headers), provenance.source, provenance.revision],
        "policy": [provenance.permutation, provenance.policy, dict(provenance.options), provenance.profile],
        "set of emitted files": dict(provenance.emitted),
        "tool version": provenance.tool,
    }
    return {part: blake3(json.dumps(value, sort_keys=True).encode()).hexdigest() for part, value in parts.items()}
