"""A checkpoint folder: config, shards and index, checked against each other before they are used."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvsurgery.checkpoint.files import FileState, check_link, check_regular, reading, source_changed
from kvsurgery.checkpoint.headers import Shard, Tensor, read_shard
from kvsurgery.checkpoint.journal import check_finished
from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.quantization import KEY as QUANTIZATION
from kvsurgery.checkpoint.side_files import survey
from kvsurgery.errors import CheckpointError, UnsupportedModel
from kvsurgery.system.repo_id import GGUF, cached_origin, did_you_mean
from kvsurgery.templates.kv_layout import text_config

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
MODELOPT_CONFIG = "hf_quant_config.json"  # where ModelOpt said how weights are quantized before its version 0.31
ADAPTER_ADVICE = (
    "merge it into its model first (merge_and_unload), or convert the model, and then the adapter for it "
    "(`kvsurgery convert --adapter`)"
)
# an index names every tensor of the largest models in a few MB; a config is far smaller
MAX_JSON_BYTES, MAX_DEPTH = 100_000_000, 100


@dataclass(frozen=True)
class Checkpoint:
    """A stock checkpoint on disk, or an adapter of one.

    Attributes:
        folder: its path; files may be symlinks, as in the Hub cache.
        name: the Hub id, also for a folder in a cache of the Hub, or the folder's name.
        revision: commit on the Hub, if known.
        config: config.json; for an adapter, that of the model on which it was trained.
        shards: shards by file name.
        index: raw bytes of the index; None for a single file without one.
        states: the states of the files beside the weights, recorded before any of them was read.
        config_file: name of the file that makes the folder load, which is written last.
    """

    folder: Path
    name: str
    revision: str | None
    config: dict[str, Any]
    shards: tuple[Shard, ...]
    index: bytes | None
    states: Mapping[str, FileState] = field(default_factory=dict)
    config_file: str = CONFIG

    @classmethod
    def open(cls, folder: str | Path, name: str | None = None, revision: str | None = None) -> Checkpoint:
        """Read config, index and headers, and check that they agree.

        Raises:
            CheckpointError: a file is missing, malformed or a link out of the folder, or index and shards disagree.
            UnsupportedModel: there are no safetensors weights, or an adapter lies beside them.
        """
        folder = Path(folder)
        if os.path.exists(folder / ADAPTER_CONFIG):
            raise UnsupportedModel(f"{folder} has an adapter; {ADAPTER_ADVICE}")
        states = survey(folder) if os.path.exists(folder / CONFIG) else {}
        config = read_config(folder)
        shards, index = read_weights(folder)
        for file_name in [*([INDEX] if index is not None else []), *(shard.name for shard in shards)]:
            check_link(folder, file_name)
        if name is None:
            name, revision = cached_origin(folder) or (folder.resolve().name, revision)
        return cls(folder, name, revision, config, shards, index, states)

    def check_unchanged(self) -> None:
        """Check that no file changed since the checkpoint was opened.

        Raises:
            SourceChanged: a file was written again, replaced, added or removed.
        """
        for shard in self.shards:
            shard.check_unchanged()
        states = survey(self.folder)
        for name in sorted(states.keys() | self.states.keys()):
            if states.get(name) != self.states.get(name):
                raise source_changed(self.folder / name)

    @cached_property
    def model(self) -> Model:
        """Its family and config, read once.

        Raises:
            UnsupportedModel: surgery does not cover it.
        """
        return Model.of(self.config)

    @property
    def tensors(self) -> Iterator[Tensor]:
        """Every tensor, shard by shard in file order."""
        return (tensor for shard in self.shards for tensor in shard.tensors)

    @property
    def positions(self) -> int | None:
        """The maximum number of positions of the model; None if the config does not give it."""
        positions = self.text_config.get("max_position_embeddings")
        return positions if type(positions) is int and positions > 0 else None

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the config for the model with the KV cache."""
        return text_config(self.config)

    @cached_property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    @cached_property
    def has_output(self) -> bool:
        """Whether an output layer is stored."""
        return any(tensor.name.endswith("lm_head.weight") for tensor in self.tensors)


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read config.json of a checkpoint folder.

    Raises:
        CheckpointError: no such folder, no config.json in it, or not a JSON object.
        UnsupportedModel: only another file says how the weights are quantized.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):  # unlike Path.is_dir, it answers for names that are too long
        raise CheckpointError(
            f"{folder} is not a folder; give a checkpoint folder, and download a model on the Hub first"
            f"{did_you_mean(folder)}"
        )
    if not (folder / CONFIG).exists():
        check_finished(folder)
        _check_another_kind(folder)
    config = read_json(folder / CONFIG)[0]
    if config.get(QUANTIZATION) is None and (folder / MODELOPT_CONFIG).exists():
        raise UnsupportedModel(
            f"{folder}: {CONFIG} has no {QUANTIZATION}, and {MODELOPT_CONFIG} says that the weights are quantized; "
            "export the model with ModelOpt 0.31 or newer, or give the 16-bit original"
        )
    return config


def _check_another_kind(folder: Path) -> None:
    """Explain a folder without config.json, if its content is recognized.

    Raises:
        UnsupportedModel: it has weights of another format, or an adapter.
        CheckpointError: the checkpoint is in a folder inside it.
    """
    if gguf_files := sorted(folder.glob("*.gguf")):
        raise UnsupportedModel(f"{folder} has a {GGUF} ({gguf_files[0].name})")
    if (folder / ADAPTER_CONFIG).exists():
        raise UnsupportedModel(f"{folder} is an adapter; {ADAPTER_ADVICE}")
    inner_folders = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if inner_folders:
        raise CheckpointError(
            f"{folder} has no {CONFIG}, but folders inside of it have one; give one of them, such as "
            f"{shlex.quote(str(inner_folders[0]))}"
        )


def read_weights(folder: Path) -> tuple[tuple[Shard, ...], bytes | None]:
    """Read the headers of a checkpoint's shards, and its raw index, which is None for a single file without one.

    Raises:
        CheckpointError, UnsupportedModel: as `Checkpoint.open`.
    """
    index, names = _weight_files(folder)
    shards = tuple(read_shard(folder / name) for name in sorted(set(names.values())))
    _check_tensors(folder, shards, names if index is not None else None)
    return shards, index


def _weight_files(folder: Path) -> tuple[bytes | None, dict[str, str]]:
    """The raw index, if any, and the file of each tensor; without an index, the single file under a stand-in name."""
    has_single = (folder / SINGLE).exists()
    has_index = (folder / INDEX).exists()
    if not has_index:
        if not has_single:
            raise _no_weights(folder)
        return None, {"": SINGLE}
    content, raw = read_json(folder / INDEX)
    names = content.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{folder / INDEX} has no weight_map")
    for tensor, name in names.items():
        if not _plain_file_name(name):
            raise CheckpointError(f"{folder / INDEX} puts {tensor!r} in {name!r}, which is not a file of this folder")
    if has_single and set(names.values()) != {SINGLE}:
        raise CheckpointError(f"{folder} has both {SINGLE} and an index of other shards; remove the ones not meant")
    for name in sorted(set(names.values())):
        if not (folder / name).exists():
            raise CheckpointError(f"{folder / name} is missing, and {INDEX} names it; fetch it again")
    return raw, names


def _plain_file_name(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name and "\\" not in name


def _check_tensors(folder: Path, shards: tuple[Shard, ...], names: dict[str, str] | None) -> None:
    """Check that every tensor is in exactly one shard, as the index says."""
    shard_by_tensor: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in shard_by_tensor:
                raise CheckpointError(
                    f"{folder}: {tensor.name!r} is in both {shard_by_tensor[tensor.name]} and {shard.name}"
                )
            shard_by_tensor[tensor.name] = shard.name
    if names is None:
        return
    for tensor, name in names.items():
        if shard_by_tensor.get(tensor) != name:
            location = shard_by_tensor.get(tensor, "no shard")
            raise CheckpointError(f"{folder / INDEX} puts {tensor!r} in {name}, but it is in {location}")
    unindexed = shard_by_tensor.keys() - names.keys()
    if unindexed:
        raise CheckpointError(
            f"{folder / INDEX} does not name {min(unindexed)!r}, which is in {shard_by_tensor[min(unindexed)]}"
        )


def weight_bytes(*folders: Path) -> int:
    """Bytes of the safetensors files in folders."""
    paths = (path for folder in folders for path in folder.glob("*.safetensors"))
    return sum(path.stat().st_size for path in paths if path.is_file())


def read_json(path: Path) -> tuple[dict[str, Any], bytes]:
    """A JSON object from a file, and the file's bytes.

    Raises:
        CheckpointError: it cannot be read, is too large or too deep, or is not a JSON object.
    """
    check_regular(path)
    with reading(path):
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is too large to be what its name says")
        raw = path.read_bytes()
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [item for part in level for item in (part.values() if isinstance(part, dict) else part)]
        level = [item for item in level if isinstance(item, dict | list)]
    if level:
        raise CheckpointError(f"{path} is nested more than {MAX_DEPTH} deep, as no file of its name is")
    return content, raw


def _no_weights(folder: Path) -> Exception:
    pickles = sorted(path.name for suffix in ("*.bin", "*.pt", "*.pth") for path in folder.glob(suffix))
    if not pickles and (gguf_files := sorted(folder.glob("*.gguf"))):
        return UnsupportedModel(f"{folder} has a {GGUF} ({gguf_files[0].name})")
    if not pickles:
        return CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}")
    source = json.dumps(str(folder))
    target = json.dumps(f"{folder}-safetensors")
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f'M.from_pretrained({source}, dtype="auto").save_pretrained({target}); '
        f"T.from_pretrained({source}).save_pretrained({target})"
    )
    return UnsupportedModel(
        f"{folder} has pickled weights only ({pickles[0]}); turn them into safetensors: python -c {shlex.quote(code)}"
    )
