"""KVzip's head scores (Kim et al. 2025, arXiv 2505.23416)."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvsurgery.errors import ProfileError
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.files import check_kv_heads, origin, read
from kvsurgery.profile.measured import Measured


def import_kvzip(paths: Sequence[str | Path], model: Measured) -> HeadProfile:
    """Read KVzip's head scores: of each KV head the largest score over the files, as KVzip takes it.

    Args:
        paths: `.pt` files of one model, each measured on a text of its own: a tensor of layers x KV heads, whatever
            axes of size 1 it has besides. They are loaded without unpickling code.
        model: that was measured.

    Raises:
        ProfileError: a file is unreadable, not such a tensor, or of another shape.
    """
    files = [Path(path) for path in paths]
    raws = [read(path) for path in files]
    tables = [_table(path, raw, model) for path, raw in zip(files, raws, strict=True)]
    for path, table in zip(files, tables, strict=True):
        check_kv_heads(path, table, model)
    sources = [origin("KVzip", path, raw) for path, raw in zip(files, raws, strict=True)]
    return model.profile(np.max(tables, axis=0), "kvzip", sources[0] if len(sources) == 1 else {"files": sources})


def _table(path: Path, raw: bytes, model: Measured) -> np.ndarray:
    import torch

    try:
        tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ProfileError(f"{path} is not a tensor that torch loads without running code") from error
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise ProfileError(f"{path} holds no tensor of scores")
    expected = (model.dimensions.layers, model.dimensions.kv_heads)
    if [size for size in tensor.shape if size > 1] == [size for size in expected if size > 1]:
        tensor = tensor.reshape(expected)
    return tensor.float().numpy()
