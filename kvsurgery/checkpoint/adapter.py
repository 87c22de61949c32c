"""LoRA adapters as saved by peft: their files, and the roles of their tensors."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsurgery.checkpoint.family import LAYER
from kvsurgery.checkpoint.files import check_link
from kvsurgery.checkpoint.headers import Tensor, read_shard
from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.provenance import PROVENANCE
from kvsurgery.checkpoint.role import OTHER, Role
from kvsurgery.checkpoint.side_files import survey
from kvsurgery.checkpoint.source import ADAPTER_CONFIG, CONFIG, Checkpoint, read_json
from kvsurgery.errors import CheckpointError, UnsupportedModel
from kvsurgery.system.repo_id import cached_origin, did_you_mean

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE_CONFIG = "base_config"  # in the options of a converted adapter's provenance
# by what follows a module's name: the axes of the module's weight that the tensor has, None for the rank
LORA: dict[str, tuple[int | None, ...]] = {
    ".lora_A.weight": (None, 1),
    ".lora_B.weight": (0, None),
    ".lora_B.bias": (0,),
    ".lora_magnitude_vector": (0,),
    ".lora_magnitude_vector.weight": (0,),
}
# settings that change the rows of B, the columns of A, or the layers, so that they do not match the model
REFUSED = ("fan_in_fan_out", "layer_replication", "use_bdlora", "use_qalora")
MERGE = "merge it into the original (merge_and_unload() of peft) and convert the result"


def open_adapter(folder: Path, base_config: Mapping[str, Any]) -> Checkpoint:
    """Read the config and the header of an adapter of the model with this config.json.

    Raises:
        CheckpointError: a file is missing or malformed, or the adapter is already converted.
        UnsupportedModel: it is not a LoRA adapter, or its settings do not allow reordering heads.
    """
    settings = read_adapter_config(folder)
    if (folder / PROVENANCE).exists():
        raise CheckpointError(f"{folder} is already converted; give the original adapter, or `kvsurgery revert` it")
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"{folder} is an adapter of type {kind}, and only LoRA is converted; {MERGE}")
    for name in REFUSED:
        if settings.get(name):
            raise UnsupportedModel(f"{folder / ADAPTER_CONFIG} has {name}, which is not converted; {MERGE}")
    _check_base(folder, settings.get("base_model_name_or_path"))
    states = survey(folder)
    if not (folder / ADAPTER_WEIGHTS).exists():
        pickled = (folder / "adapter_model.bin").exists()
        way_out = "; load it with peft, and save it again with save_pretrained" if pickled else ""
        raise CheckpointError(f"{folder} has no {ADAPTER_WEIGHTS}{way_out}")
    check_link(folder, ADAPTER_WEIGHTS)
    shard = read_shard(folder / ADAPTER_WEIGHTS)
    name, revision = cached_origin(folder) or (folder.resolve().name, None)
    return Checkpoint(folder, name, revision, dict(base_config), (shard,), None, states, ADAPTER_CONFIG)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json of an adapter.

    Raises:
        CheckpointError: no such folder, no such file in it, or not a JSON object.
    """
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is not a folder; download an adapter on the Hub first{did_you_mean(folder)}")
    if not (folder / ADAPTER_CONFIG).exists():
        raise CheckpointError(f"{folder} has no {ADAPTER_CONFIG}: it is not an adapter saved by peft")
    return read_json(folder / ADAPTER_CONFIG)[0]


def adapter_role(model: Model, tensor: Tensor) -> Role:
    """The role of an adapter's tensor, from the axes that it shares with the weight of its module.

    Raises:
        UnsupportedModel: the tensor belongs to attention, and its role is not known.
    """
    family = model.family
    name = tensor.name.removeprefix(PREFIX).replace(".base_layer.", ".")
    suffix = next((suffix for suffix in LORA if name.endswith(suffix)), None)
    weight = name if suffix is None else f"{name.removesuffix(suffix)}.weight"
    try:
        role = family.role(weight)
    except UnsupportedModel as error:
        stem = next((weight.removeprefix(prefix) for prefix in family.prefixes if weight.startswith(prefix)), weight)
        match = LAYER.fullmatch(stem)
        is_attention = f".{family.modeling.attention}." in f".{stem}"
        is_outside = not is_attention and (match or "layers." not in stem)
        if not is_outside:
            raise UnsupportedModel(
                f"tensor {tensor.name!r} of the adapter is not known in family {family.name}; {MERGE}"
            ) from error
        return Role(int(match[1]) if match else None, name)
    if suffix is None or not role.shape:
        return Role(role.layer, name, role.shape)
    shape = tuple(OTHER if axis is None else role.shape[axis] for axis in LORA[suffix])
    return Role(role.layer, name, shape)


def _check_base(folder: Path, base: Any) -> None:
    """Raise CheckpointError if an adapter was trained on a converted checkpoint that is on this machine."""
    if not isinstance(base, str) or not os.path.isfile(config := Path(base) / CONFIG):
        return
    section = read_json(config)[0].get("kv_surgery")
    if isinstance(section, dict) and section.get("order"):
        raise CheckpointError(
            f"{folder} was trained on the converted checkpoint {shlex.quote(base)}, whose order of heads it fits; "
            "give an adapter of the original"
        )
