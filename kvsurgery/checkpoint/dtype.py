"""In which dtype a model is measured: a CPU computes 16-bit weights slowly where it has no instructions for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kvsurgery.checkpoint.source import read_config, read_weights
from kvsurgery.errors import KVSurgeryError
from kvsurgery.templates.kv_layout import text_config

CPUINFO = Path("/proc/cpuinfo")
# dtype -> what Linux calls the instructions that multiply matrices of it, on x86 and on ARM
INSTRUCTIONS = {
    "bfloat16": {"amx_bf16", "avx512_bf16", "bf16"},
    "float16": {"amx_fp16", "avx512_fp16", "asimdhp"},
}
STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def slow_on_cpu(dtype: str | None) -> bool:
    """Whether this CPU has no instructions for a 16-bit dtype. Where that cannot be found out, it has none."""
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
    """The dtype that a config.json names, for all of the model or for its text model, such as "bfloat16"; None: none is
    named."""
    # transformers 5 writes `dtype`
    names = (section.get(key) for section in (config, text_config(config)) for key in ("dtype", "torch_dtype"))
    return next((name.removeprefix("torch.") for name in names if isinstance(name, str) and name), None)


def stored_dtype(folder: Path) -> str | None:
    """The dtype that `dtype="auto"` loads a checkpoint in, such as "bfloat16"; None where only its weights could say it
    and they are not there.

    Raises:
        CheckpointError: there is no config.json.
    """
    config = read_config(folder)
    if dtype := config_dtype(config):
        return dtype
    try:
        shards = read_weights(folder)[0]
    except KVSurgeryError:  # of a Hub id there is the config only
        return None
    return next((STORED[tensor.dtype] for shard in shards for tensor in shard.tensors if tensor.dtype in STORED), None)
