"""A converted checkpoint, read for verifying and reverting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvsurgery.checkpoint.adapter import ADAPTER_WEIGHTS, BASE_CONFIG, adapter_role, open_adapter
from kvsurgery.checkpoint.fingerprint import SAMPLED_BYTES, fingerprint
from kvsurgery.checkpoint.headers import Read, Shard, Tensor, changed_headers, read_shard
from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.model_code import saved_again
from kvsurgery.checkpoint.provenance import PROVENANCE, Provenance
from kvsurgery.checkpoint.source import ADAPTER_CONFIG, CONFIG, Checkpoint, read_config, read_weights
from kvsurgery.conversion.plan import Move, plan_moves
from kvsurgery.errors import CheckpointError, KVSurgeryError, Mismatch

SAVED_AGAIN = "a checkpoint that save_pretrained wrote again can be neither verified nor reverted"


@dataclass(frozen=True)
class Converted:
    """A converted checkpoint or adapter: its provenance, its original's model, its shards, and the moves that made it.

    `config_file` is the name of the file that makes the folder load.
    """

    folder: Path
    provenance: Provenance
    model: Model
    shards: tuple[Shard, ...]
    moves: Mapping[str, Move]
    config_file: str = CONFIG

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    def open_original(self, folder: str | Path) -> Checkpoint:
        """Open what may be the original of this checkpoint or adapter.

        Raises:
            CheckpointError, UnsupportedModel: as `Checkpoint.open`, or as `open_adapter`.
        """
        if self.config_file == CONFIG:
            return Checkpoint.open(folder)
        return open_adapter(Path(folder), self.model.config)

    @property
    def original_fingerprint(self) -> str:
        """The `fingerprint` of the checkpoint that was converted.

        Raises:
            CheckpointError: a shard cannot be read.
        """
        return fingerprint(self.shards, self._original_first_bytes)

    def _original_first_bytes(self, read: Read, tensor: Tensor) -> bytes:
        sample = bytearray(min(SAMPLED_BYTES, tensor.size))
        for source, destination, length in self.moves[tensor.name].first_runs:
            if source < len(sample):
                read(memoryview(sample)[source : source + length], tensor.start + destination)
        return bytes(sample)


def read_provenance(folder: Path) -> Provenance:
    """The provenance of a converted checkpoint.

    Raises:
        CheckpointError: there is none; then the line says whether the checkpoint was converted. Or it is damaged.
    """
    is_config_alone = (folder / CONFIG).exists() and not (folder / PROVENANCE).exists()
    if is_config_alone and (explanation := saved_again(folder, read_config(folder))):
        raise CheckpointError(explanation)
    return Provenance.read(folder)


def open_converted(folder: Path) -> Converted:
    """Read provenance and headers of a converted checkpoint or adapter, and check them against each other.

    Raises:
        CheckpointError: this is not a converted checkpoint, or its provenance is damaged.
        Mismatch: its weight files are not the ones that the conversion wrote.
    """
    provenance = read_provenance(folder)
    is_adapter = ADAPTER_CONFIG in provenance.originals
    try:
        shards = (read_shard(folder / ADAPTER_WEIGHTS),) if is_adapter else read_weights(folder)[0]
    except KVSurgeryError as error:
        raise Mismatch(str(error)) from error
    if changed_files := changed_headers(shards, provenance.headers):
        raise Mismatch(f"{folder / changed_files[0]} is not the file that the conversion wrote; {SAVED_AGAIN}")
    try:
        config = provenance.options[BASE_CONFIG] if is_adapter else json.loads(provenance.originals[CONFIG])
        model = Model.of(config)
        tensors = (tensor for shard in shards for tensor in shard.tensors)
        moves = plan_moves(tensors, model, provenance.permutation, adapter_role if is_adapter else Model.role)
    except (KVSurgeryError, ValueError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{folder / PROVENANCE} is damaged: {error}") from error
    return Converted(folder, provenance, model, shards, moves, ADAPTER_CONFIG if is_adapter else CONFIG)


def original_fingerprint(folder: Path) -> str | None:
    """The `fingerprint` of a checkpoint, or of the one that it was converted from; None where that cannot be told.

    Raises:
        KVSurgeryError: it is no checkpoint.
    """
    if "kv_surgery" not in read_config(folder):
        return fingerprint(read_weights(folder)[0])
    try:
        return open_converted(folder).original_fingerprint
    except KVSurgeryError:  # it was saved again, or changed
        return None
