"""The dtype in which a model is loaded or measured; a CPU without instructions for 16-bit weights is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kvsurgery.checkpoint.headers import Shard
from kvsurgery.checkpoint.source import read_config, read_weights
from kvsurgery.errors import KVSurgeryError, UnsupportedModel, short
from kvsurgery.templates.kv_layout import text_config

CPUINFO = Path("/proc/cpuinfo")
# dtype -> what Linux calls the instructions that multiply matrices of it, on x86 and on ARM
INSTRUCTIONS = {
    "bfloat16": {"amx_bf16", "avx512_bf16", "bf16"},
    "float16": {"amx_fp16", "avx512_fp16", "asimdhp"},
}
STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element
ALIASES = {"double": "float64", "float": "float32", "half": "float16"}  # other names that torch has
KEYS = ("dtype", "torch_dtype")  # of config.json, as transformers 5 and 4 write it


def slow_on_cpu(dtype: str | None) -> bool:
    """Whether this CPU lacks instructions for a 16-bit dtype; True if that cannot be determined."""
    return dtype in INSTRUCTIONS and not INSTRUCTIONS[dtype] & cpu_features()


@cache
def cpu_features() -> frozenset[str]:
    """The instruction sets of this CPU by their Linux names; empty outside of Linux."""
    if not CPUINFO.exists():
        return frozenset()
    lines = (line.partition(":") for line in CPUINFO.read_text().splitlines())
    return next(
        (frozenset(names.split()) for key, _, names in lines if key.strip() in ("flags", "Features")), frozenset()
    )


def config_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype in a config.json, such as "bfloat16", for the whole model or its text model; None if there is none."""
    values = (section.get(key) for section in (config, text_config(config)) for key in KEYS)
    names = (name.removeprefix("torch.") for name in values if isinstance(name, str) and name)
    return next((ALIASES.get(name, name) for name in names), None)


def loading_dtype(config: Mapping[str, Any], shards: Sequence[Shard]) -> str:
    """The dtype that `dtype="auto"` uses for a checkpoint: that of config.json, else that of the first weight by name.

    For a text model inside another model, the outer config counts, as in transformers 5.

    Raises:
        UnsupportedModel: transformers cannot load this dtype.
    """
    value = next((config[key] for key in KEYS if config.get(key) is not None), None)
    if value is None:
        weights = sorted(shards[0].tensors, key=lambda tensor: tensor.name)
        return next((STORED[tensor.dtype] for tensor in weights if tensor.dtype in STORED), "float32")
    dtype = ALIASES.get(value, value) if isinstance(value, str) else ""
    if dtype not in ITEMSIZES:
        raise UnsupportedModel(
            f"config.json: dtype is {short(value)}, which transformers cannot load; write one of {', '.join(ITEMSIZES)}"
        )
    return dtype


def stored_dtype(folder: Path) -> str | None:
    """The dtype that `dtype="auto"` uses for a checkpoint, such as "bfloat16".

    It is None if config.json does not name a dtype and the weights are not there.

    Raises:
        CheckpointError: there is no config.json.
        UnsupportedModel: transformers cannot load this dtype.
    """
    config = read_config(folder)
    try:
        shards = read_weights(folder)[0]
    except KVSurgeryError:  # for a Hub id, only the config was downloaded
        return config_dtype(config)
    return loading_dtype(config, shards)
