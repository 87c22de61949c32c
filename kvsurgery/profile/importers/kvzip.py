"""KVzip's head scores (Kim et al. 2025, arXiv 2505.23416)."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvsurgery.errors import ProfileError
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.files import check_kv_heads, origin, read
from kvsurgery.profile.profiled_model import ProfiledModel

# published files have 2 KB; decompressed, they may be a thousand times as large
LARGEST_TENSOR_FILE = 1 << 20


def import_kvzip(paths: Sequence[str | Path], model: ProfiledModel) -> HeadProfile:
    """Read KVzip's head scores: the largest score of each KV head over the files, as in KVzip.

    Args:
        paths: `.pt` files of one model, each measured on a text of its own: a tensor of layers x KV heads, whatever
            axes of size 1 it has besides. They are loaded without unpickling code.

    Raises:
        ProfileError: a file is unreadable, not such a tensor, or of another shape.
    """
    files = [Path(path) for path in paths]
    raws = [read(path, LARGEST_TENSOR_FILE) for path in files]
    tables = [_table(path, raw, model) for path, raw in zip(files, raws, strict=True)]
    sources = [origin("KVzip", path, raw) for path, raw in zip(files, raws, strict=True)]
    return model.profile(np.max(tables, axis=0), "kvzip", sources[0] if len(sources) == 1 else {"files": sources})


def _table(path: Path, raw: bytes, model: ProfiledModel) -> np.ndarray:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats
            tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises whatever its opcodes run into
        raise ProfileError(f"{path} is not a tensor that torch loads without running code") from error
    is_plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_plain or not tensor.is_floating_point():
        raise ProfileError(f"{path} holds no tensor of scores")
    expected_shape = (model.dimensions.layers, model.dimensions.kv_heads)
    if [size for size in tensor.shape if size > 1] == [size for size in expected_shape if size > 1]:
        tensor = tensor.reshape(expected_shape)
    check_kv_heads(path, tensor.shape, model)  # before the copy: a tensor may repeat one element
    return tensor.detach().float().numpy()
