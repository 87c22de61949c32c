"""Reverting: restore the original of a converted checkpoint byte for byte, checking every byte."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from kvsurgery.checkpoint.files import check_link, file_status
from kvsurgery.checkpoint.journal import JOURNAL
from kvsurgery.checkpoint.source import INDEX
from kvsurgery.conversion.converted import Converted, open_converted
from kvsurgery.conversion.engine import JOBS
from kvsurgery.conversion.output import Output, reserved
from kvsurgery.conversion.verify import check_file, check_source_files, check_source_tensors
from kvsurgery.errors import KVSurgeryError, Mismatch

CHANGED = "was changed after the conversion; the original cannot be given back"


@dataclass(frozen=True)
class RevertReport:
    """The result of a reversion.

    Attributes:
        out: the restored checkpoint.
        source: its name when it was converted.
        size: bytes of its weights.
        tensors, files: their numbers; shards are not counted as files.
        left_out: files that the original had and conversion did not keep.
        seconds: wall time.
        already_done: whether it was there already, and nothing was written.
    """

    out: Path
    source: str
    size: int
    tensors: int
    files: int
    left_out: tuple[str, ...]
    seconds: float
    already_done: bool = False


def revert(
    folder: str | Path, out: str | Path, *, jobs: int = JOBS, progress: Callable[[int], None] | None = None
) -> RevertReport:
    """Write the original of a converted checkpoint or adapter. A run that was interrupted goes on when it is repeated.

    Raises:
        CheckpointError: `folder` is not a converted checkpoint, or its provenance is damaged.
        Mismatch: its bytes are not those that the conversion wrote; then nothing is left in `out`.
        OutputError: `out` cannot be used or written.
    """
    start = time.monotonic()
    folder = Path(folder)
    out = Path(out)
    converted = open_converted(folder)
    provenance = converted.provenance
    for name, digest in provenance.copied.items():
        check_link(folder, name)
        check_file(folder, name, digest, CHANGED)
    files = len(provenance.copied) + len(provenance.originals)
    report = RevertReport(
        out, provenance.source, converted.size, len(converted.moves), files, provenance.left_out, seconds=0.0
    )
    size = converted.size + sum(len(content) for content in provenance.originals.values())
    size += sum(file_status(folder / name).st_size for name in provenance.copied)
    with reserved(out, folder):
        if _already_done(converted, out, jobs):
            return replace(report, already_done=True, seconds=time.monotonic() - start)
        output = Output.open(out, size, _fingerprint(converted), last=converted.config_file)
        try:
            with output:
                _write(output, converted, jobs, progress)
        except Mismatch:
            output.discard([*provenance.copied, *provenance.originals, *provenance.headers])
            raise
    return replace(report, seconds=time.monotonic() - start)


def _write(output: Output, converted: Converted, jobs: int, progress: Callable[[int], None] | None) -> None:
    """Write the original, its config last."""
    provenance = converted.provenance
    for name in provenance.copied:
        if name != INDEX:
            _copy(output, converted, name)
    for name, content in provenance.originals.items():
        if name != converted.config_file:
            output.write(name, content)
    for shard in converted.shards:
        output.shard(shard, converted.moves, inverse=True, expected=provenance.tensors, jobs=jobs, progress=progress)
    if INDEX in provenance.copied:
        _copy(output, converted, INDEX)
    output.write(converted.config_file, provenance.originals[converted.config_file])


def _copy(output: Output, converted: Converted, name: str) -> None:
    digest = converted.provenance.copied[name]
    if output.copy(name, converted.folder / name) != digest and digest is not None:
        raise Mismatch(f"{converted.folder / name} {CHANGED}")


def _already_done(converted: Converted, out: Path, jobs: int) -> bool:
    """Whether `out` is the original, comparing every byte."""
    if (out / JOURNAL).exists() or not (out / converted.config_file).exists():
        return False
    try:
        original = converted.open_original(out)
        check_source_files(converted, original)
        check_source_tensors(converted, original, jobs)
    except KVSurgeryError:
        return False
    return True


def _fingerprint(converted: Converted) -> dict[str, str]:
    # it has the hash of every tensor, and only tensors with that hash are recorded as finished
    return {"converted checkpoint": blake3(converted.provenance.serialize()).hexdigest()}
