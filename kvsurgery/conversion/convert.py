"""Converting: side files, shards, index, provenance, and the config last, so that unfinished output never loads."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from kvsurgery.checkpoint.files import file_status, source_changed
from kvsurgery.checkpoint.headers import Shard, header_hashes
from kvsurgery.checkpoint.journal import JOURNAL
from kvsurgery.checkpoint.provenance import PROVENANCE, Provenance, is_editable
from kvsurgery.checkpoint.side_code import SideCode
from kvsurgery.checkpoint.side_files import SideFiles, file_hash, side_files
from kvsurgery.checkpoint.source import INDEX, Checkpoint
from kvsurgery.conversion.engine import JOBS
from kvsurgery.conversion.output import Output, check_space, reserved, writing
from kvsurgery.conversion.plan import Plan
from kvsurgery.conversion.replacing import remove_conversion
from kvsurgery.errors import CheckpointError, OutputError, SourceChanged
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
        updated: files that were written again or removed in a finished conversion, since the source's files changed.
    """

    out: Path
    size: int
    tensors: int
    moved: int
    left_out: tuple[str, ...]
    seconds: float
    resumed: int = 0
    already_done: bool = False
    updated: tuple[str, ...] = ()


def convert(
    checkpoint: Checkpoint,
    plan: Plan,
    out: str | Path,
    files: Mapping[str, bytes],
    *,
    overwrite: bool = False,
    jobs: int = JOBS,
    progress: Callable[[int], None] | None = None,
) -> ConvertReport:
    """Write the converted checkpoint. A run that was interrupted goes on when it is repeated.

    Repeated after a file beside the weights changed in the source, it writes what differs into the finished conversion.

    Args:
        checkpoint, plan: what is converted, an adapter or a whole model, and how.
        out: the folder to fill.
        files: emitted files by name, the config among them; they replace the source's.
        overwrite: replace another conversion in this folder; files of anyone else are never removed.
        jobs: threads.
        progress: called with weight bytes done, from any thread.

    Raises:
        OutputError: `out` cannot be used or written, or holds something else.
        CheckpointError: the source cannot be read, or changed meanwhile.
    """
    start = time.monotonic()
    out = Path(out)
    checkpoint.check_unchanged()
    weights = {shard.name for shard in checkpoint.shards} | ({INDEX} if checkpoint.index is not None else set())
    sides = side_files(checkpoint.folder, weights, files, SideCode.of(checkpoint.folder).files)
    for name in sides.copied:
        if (folder := name.partition("/")[0]) in {*files, PROVENANCE, INDEX} - {name}:
            raise CheckpointError(
                f"{checkpoint.folder / folder} is a folder, and conversion writes a file of this name"
            )
    provenance = _provenance(checkpoint, plan, files, sides)
    report = ConvertReport(out, checkpoint.size, len(plan.moves), len(plan.moved), sides.left_out, 0.0)
    size = checkpoint.size + sum(len(content) for content in [*files.values(), *sides.originals.values()])
    size += sum(file_status(checkpoint.folder / name).st_size for name in sides.copied)
    with reserved(out, checkpoint.folder):
        fingerprint = _fingerprint(checkpoint, provenance)
        try:
            with writing(out):
                earlier = _earlier(out, checkpoint, provenance)
        except (OutputError, CheckpointError):
            if not overwrite:
                raise
            earlier = None
        if earlier is None and overwrite:
            check_space(out, size)  # before the earlier conversion is gone
            remove_conversion(out, fingerprint)
        if earlier is not None and _equal(earlier, replace(provenance, tensors=earlier.tensors)):
            return replace(report, already_done=True, seconds=time.monotonic() - start)
        finished = None if earlier is None else _tensors_by_shard(checkpoint, earlier)
        output = Output.open(out, size, fingerprint, finished, checkpoint.config_file)
        try:
            with output:
                updated = _update(output, earlier, provenance) if earlier is not None else None
                _write(output, checkpoint, plan, files, provenance, updated, jobs, progress)
        except SourceChanged:
            if earlier is None:  # else the weights of the earlier conversion are there
                output.discard([*files, *provenance.copied, *provenance.headers, PROVENANCE])
            raise
    return replace(report, resumed=output.resumed, updated=updated or (), seconds=time.monotonic() - start)


def _write(
    output: Output,
    checkpoint: Checkpoint,
    plan: Plan,
    files: Mapping[str, bytes],
    provenance: Provenance,
    updated: Collection[str] | None,
    jobs: int,
    progress: Callable[[int], None] | None,
) -> None:
    """Write what is missing; of the side files, those `updated`, or all of them. The config is last."""
    for name, content in files.items():
        if name != checkpoint.config_file and (updated is None or name in updated):
            output.write(name, content)
    for name, digest in provenance.copied.items():
        path = checkpoint.folder / name
        if name != INDEX and (updated is None or name in updated) and output.copy(name, path) != digest:
            raise source_changed(path)
    tensors = _move(output, checkpoint, plan, jobs, progress)
    if checkpoint.index is not None:
        output.write(INDEX, checkpoint.index)
    output.write(PROVENANCE, replace(provenance, tensors=tensors).serialize())
    checkpoint.check_unchanged()
    output.write(checkpoint.config_file, files[checkpoint.config_file])


def _update(output: Output, earlier: Provenance, provenance: Provenance) -> tuple[str, ...]:
    """Remove the files that only an earlier conversion wrote; returns the names of all that differ from its files.

    A model card that was edited or removed afterwards stays so.
    """
    old_files = {**earlier.emitted, **earlier.copied}
    new_files = {**provenance.emitted, **provenance.copied}
    finish_time = file_status(output.folder / PROVENANCE).st_mtime_ns
    obsolete_names = [name for name in old_files if name not in new_files]
    for name in obsolete_names:
        output.remove(name)
    updated_names = {PROVENANCE, *obsolete_names}
    for name, digest in new_files.items():
        path, is_updated = output.folder / name, old_files.get(name, "") != digest
        if digest is None and earlier.originals.get(name) != provenance.originals.get(name) and path.is_file():
            is_updated |= file_status(path).st_mtime_ns <= finish_time
        if is_updated:
            updated_names.add(name)
    return tuple(sorted(updated_names))


def _move(
    output: Output, checkpoint: Checkpoint, plan: Plan, jobs: int, progress: Callable[[int], None] | None
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
            hashes = output.shard(shard, plan.moves, jobs=jobs // shards_at_once, progress=advance)
            shard.check_unchanged()
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


def _provenance(checkpoint: Checkpoint, plan: Plan, files: Mapping[str, bytes], sides: SideFiles) -> Provenance:
    """The provenance without hashes of tensors, which are known once these are read."""
    copied = {name: file_hash(checkpoint.folder / name) for name in sides.copied}
    if checkpoint.index is not None:
        copied[INDEX] = blake3(checkpoint.index).hexdigest()
    return Provenance(
        tool=__version__,
        source=checkpoint.name,
        revision=checkpoint.revision,
        **plan.reason,
        headers=header_hashes(checkpoint.shards),
        tensors={},
        emitted={name: None if is_editable(name) else blake3(content).hexdigest() for name, content in files.items()},
        copied=copied,
        originals=sides.originals,
        left_out=sides.left_out,
    )


def _earlier(out: Path, checkpoint: Checkpoint, provenance: Provenance) -> Provenance | None:
    """The provenance of the finished conversion in `out`, whose weights are those that this one would write.

    None if there is no finished conversion.

    Raises:
        OutputError: it is another conversion, it lacks something, or a shard of the source is newer.
    """
    try:
        names = set(os.listdir(out))
    except OSError:
        return None
    if not {PROVENANCE, checkpoint.config_file} <= names or JOURNAL in names:
        return None
    earlier = Provenance.read(out)
    sides = {field: getattr(provenance, field) for field in ("copied", "originals", "left_out")}
    # files are emitted after those of the source; where these are the same, another emitted file has other reasons
    if any(getattr(earlier, field) != value for field, value in sides.items()):
        sides["emitted"] = provenance.emitted
    if not _equal(replace(earlier, tensors={}, **sides), provenance):
        raise OutputError(f"{out} holds another conversion; choose another folder, or `overwrite` it")
    finish_time = (out / PROVENANCE).stat().st_mtime_ns
    for shard in checkpoint.shards:
        if shard.changed_after(finish_time):
            folder = shlex.quote(str(out))
            source = shlex.quote(str(checkpoint.folder))
            raise OutputError(
                f"{shard.path} is newer than its conversion in {out}; check whether it is unchanged with "
                f"`kvsurgery verify {folder} --source {source}`, or choose another folder"
            )
        if not (out / shard.name).is_file() or (out / shard.name).stat().st_size != shard.size:
            raise OutputError(
                f"{out / shard.name} is missing or cut short; `overwrite` {out}, or choose another folder"
            )
    for name in [*earlier.emitted, *earlier.copied]:
        if not is_editable(name) and not (out / name).is_file():
            raise OutputError(f"{out / name} is missing; `overwrite` {out}, or choose another folder")
    return earlier


def _equal(left: Provenance, right: Provenance) -> bool:
    """Whether two provenances are the same file; options that were read have lists in place of tuples."""
    return left.serialize() == right.serialize()


def _tensors_by_shard(checkpoint: Checkpoint, earlier: Provenance) -> dict[str, dict[str, str]]:
    """By shard, the hashes of its tensors that an earlier conversion recorded."""
    return {
        shard.name: {tensor.name: earlier.tensors[tensor.name] for tensor in shard.tensors}
        for shard in checkpoint.shards
    }


def _fingerprint(checkpoint: Checkpoint, provenance: Provenance) -> dict[str, str]:
    """Everything that decides the output, in parts that a message can name."""
    sources = [(shard.name, *shard.state) for shard in checkpoint.shards]
    originals = {name: blake3(content).hexdigest() for name, content in provenance.originals.items()}
    source_files = [sources, dict(provenance.headers), dict(provenance.copied), originals]
    parts = {
        "source": [source_files, provenance.source, provenance.revision],
        "policy": [provenance.permutation, provenance.policy, dict(provenance.options), provenance.profile],
        "set of emitted files": dict(provenance.emitted),
        "tool version": provenance.tool,
    }
    return {part: blake3(json.dumps(value, sort_keys=True).encode()).hexdigest() for part, value in parts.items()}
