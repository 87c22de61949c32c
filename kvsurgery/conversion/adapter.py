"""Adapters of an original, for the order of heads of its converted checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from kvsurgery.checkpoint.adapter import BASE_CONFIG, adapter_role, open_adapter, read_adapter_config
from kvsurgery.checkpoint.source import ADAPTER_CONFIG, CONFIG
from kvsurgery.conversion.convert import ConvertReport, convert
from kvsurgery.conversion.converted import read_provenance
from kvsurgery.conversion.plan import Plan, plan_moves
from kvsurgery.emit.config import to_json
from kvsurgery.errors import CheckpointError


def convert_adapter(
    adapter: Path, converted: Path, out: Path, base: str | None = None, *, overwrite: bool = False
) -> ConvertReport:
    """Write a LoRA adapter of the original for its converted checkpoint: rows of B and columns of A follow the heads.

    Everything that has no heads along an axis is copied. A run that was interrupted goes on when it is repeated.

    Args:
        adapter: the folder of the adapter, as peft saved it.
        converted: the converted checkpoint, or a folder with its `kvsurgery.json`.
        out: the folder to fill.
        base: the name by which the converted checkpoint will be loaded. Default: the path of its folder.
        overwrite: replace another conversion in this folder; files of anyone else are never removed.

    Raises:
        CheckpointError: a file is missing or malformed, or tensors do not have the shapes of the model.
        UnsupportedModel: it is no LoRA adapter, or has settings or tensors that are not covered.
        OutputError: `out` cannot be used or written, or holds something else.
    """
    provenance = read_provenance(converted)
    if CONFIG not in provenance.originals:
        raise CheckpointError(f"{converted} is a converted adapter; give the converted checkpoint that it is for")
    config = json.loads(provenance.originals[CONFIG])
    checkpoint = open_adapter(adapter, config)
    moves = plan_moves(checkpoint.tensors, checkpoint.model, provenance.permutation, adapter_role)
    reason = {
        "family": provenance.family,
        "permutation": provenance.permutation,
        "profile": provenance.profile,
        "policy": provenance.policy,
        "options": {BASE_CONFIG: config},
    }
    # the emitted code takes the order of heads that an adapter fits from the checkpoint of this name
    here = {"base_model_name_or_path": base or str(converted.resolve()), "revision": None}
    files = {ADAPTER_CONFIG: to_json(read_adapter_config(adapter) | here)}
    return convert(checkpoint, Plan(moves, reason), out, files, overwrite=overwrite)
