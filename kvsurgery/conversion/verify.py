"""Verifying that a converted checkpoint is what its conversion wrote, and holds the source's bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvsurgery.checkpoint.files import reading
from kvsurgery.checkpoint.headers import changed_headers
from kvsurgery.checkpoint.model_code import saved_again
from kvsurgery.checkpoint.provenance import PROVENANCE, Provenance, is_editable
from kvsurgery.checkpoint.side_files import file_hash, walk
from kvsurgery.checkpoint.source import CONFIG, Checkpoint
from kvsurgery.conversion.converted import Converted, open_converted, read_provenance
from kvsurgery.conversion.engine import JOBS, move_bytes
from kvsurgery.conversion.plan import check_complete, unmoved
from kvsurgery.emit.card import code_hashes
from kvsurgery.errors import CheckpointError, Mismatch


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        provenance: where the checkpoint comes from.
        size: bytes of its weights.
        tensors, files: how many match their recorded hash.
        unrecorded: files that the conversion did not write.
        hashes: SHA-256 of every `.py` file that was written, by name.
        seconds: wall time.
    """

    provenance: Provenance
    size: int
    tensors: int
    files: int
    unrecorded: tuple[str, ...]
    hashes: Mapping[str, str]
    seconds: float


def verify(
    folder: str | Path,
    source: str | Path | None = None,
    *,
    jobs: int = JOBS,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Check a converted checkpoint or adapter against its provenance, and against its source if that is given.

    Files come before weights, and headers before tensors, so that most damage is found early.

    Raises:
        CheckpointError: `folder` is not a converted checkpoint, or lacks a tensor that its original lacked; or `source`
            is no checkpoint, or a converted one.
        Mismatch: the first file or tensor that is not what was recorded.
    """
    start = time.monotonic()
    folder = Path(folder)
    provenance = read_provenance(folder)
    recorded_files = {**provenance.emitted, **provenance.copied}
    checked_hashes = {name: digest for name, digest in recorded_files.items() if digest and not is_editable(name)}
    for name, digest in checked_hashes.items():
        check_file(folder, name, digest, "was changed after the conversion")
    recorded_names = {PROVENANCE, *recorded_files, *provenance.headers}
    unrecorded = tuple(name for name in walk(folder) if name not in recorded_names and not name.startswith("."))
    converted = open_converted(folder)
    if converted.config_file == CONFIG:
        check_complete(str(folder), converted.model, converted.moves)
    original = None if source is None else converted.open_original(source)
    if original is not None:
        if (original.folder / PROVENANCE).exists():
            raise CheckpointError(f"{source} is a converted checkpoint; give the original that {folder} was made of")
        if explanation := saved_again(original.folder, original.config):
            raise CheckpointError(explanation)
        check_source_files(converted, original)
    _check_tensors(converted, jobs, progress)
    if original is not None:
        check_source_tensors(converted, original, jobs, progress)
    with reading(folder):
        code = {name: (folder / name).read_bytes() for name in recorded_files if name.endswith(".py")}
    return VerifyReport(
        provenance,
        converted.size,
        len(converted.moves),
        len(checked_hashes),
        unrecorded,
        code_hashes(code),
        time.monotonic() - start,
    )


def _check_tensors(converted: Converted, jobs: int, progress: Callable[[int], None] | None) -> None:
    recorded_hashes = converted.provenance.tensors
    missing_names = recorded_hashes.keys() - converted.moves.keys()
    if missing_names:
        raise Mismatch(f"{converted.folder} has no tensor {min(missing_names)}, which was recorded")
    for shard in converted.shards:
        move_bytes(shard, converted.moves, inverse=True, expected=recorded_hashes, jobs=jobs, progress=progress)


def check_source_files(converted: Converted, source: Checkpoint) -> None:
    """Check that the headers and side files of `source` are those of the checkpoint that was converted.

    Raises:
        Mismatch: the first file that is not; those that tell models apart come first.
    """
    provenance = converted.provenance
    fault = f"is not what was converted; {converted.folder} was converted from {provenance.source}"
    if changed_files := changed_headers(source.shards, provenance.headers):
        raise Mismatch(f"{source.folder / changed_files[0]} {fault}")
    originals = {name: blake3(content).hexdigest() for name, content in provenance.originals.items()}
    for name, digest in [*originals.items(), *provenance.copied.items()]:
        check_file(source.folder, name, digest, fault)


def check_source_tensors(
    converted: Converted, source: Checkpoint, jobs: int = JOBS, progress: Callable[[int], None] | None = None
) -> None:
    """Check that the tensors of `source` are those of the checkpoint that was converted.

    Raises:
        Mismatch: the first tensor that is not.
    """
    for shard in source.shards:
        moves = {tensor.name: unmoved(tensor) for tensor in shard.tensors}
        move_bytes(shard, moves, expected=converted.provenance.tensors, jobs=jobs, progress=progress)


def check_file(folder: Path, name: str, digest: str | None, fault: str) -> None:
    """Check that a file is there and has its hash, where one was recorded.

    Raises:
        Mismatch: it has not; then the message ends in the `fault`.
    """
    path = folder / name
    if not path.is_file():
        raise Mismatch(f"{path} is missing")
    if digest is None:
        return
    if file_hash(path) != digest:
        raise Mismatch(f"{path} {fault}")
