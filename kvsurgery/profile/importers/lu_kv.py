"""LU-KV's budget curves: how much of the cache each KV head gives up (arXiv 2602.08585)."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from kvsurgery.errors import ProfileError
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.files import check_kv_heads, origin, read
from kvsurgery.profile.profiled_model import ProfiledModel

# rows of a curve: 1% to 99% of the cache removed
PERCENTS = 99
# how far outside [0, 1] rounding may take a share
SLACK = 1e-3


def import_lu_kv(path: str | Path, model: ProfiledModel, keep: int) -> HeadProfile:
    """Read one row of LU-KV's curves: the share of the tokens that each head keeps.

    Args:
        path: `.npy`, floats [99, layers, KV heads]. Row p - 1 has the share that each head *loses* when p% of the cache
            are removed.
        keep: per cent of the whole cache that is kept, 1 to 99.

    Raises:
        ProfileError: the file is unreadable, of another layout or shape, or the percentage is out of range.
    """
    if not 1 <= keep <= PERCENTS:
        raise ProfileError(f"a curve of LU-KV keeps 1 to {PERCENTS} per cent of the cache, got {keep}")
    path = Path(path)
    raw = read(path)
    removed_shares = _curves(path, raw, model)
    means = removed_shares.mean(axis=(1, 2))
    if not -SLACK <= removed_shares.min() <= removed_shares.max() <= 1 + SLACK:  # also false of NaN
        raise ProfileError(
            f"{path} has {removed_shares.min():.4g} to {removed_shares.max():.4g}; removed shares lie in [0, 1]"
        )
    if means[0] >= means[-1]:
        raise ProfileError(f"{path} removes no more in its last row than in its first; this is not a curve of LU-KV")
    kept_shares = 1 - np.clip(removed_shares[PERCENTS - keep], 0, 1)
    return model.profile(kept_shares, "lu-kv", {**origin("LU-KV", path, raw), "keep_percent": keep})


def _curves(path: Path, raw: bytes, model: ProfiledModel) -> np.ndarray:
    """float64 [99, layers, KV heads]. The header is checked first: it may claim more than the file has."""
    file = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
    except Exception as error:  # a damaged header raises whatever Python's tokenizer runs into
        raise ProfileError(f"{path} is not a .npy file of numbers") from error
    if dtype.kind != "f" or len(shape) != 3 or shape[0] != PERCENTS:
        expected_layout = f"floats of {PERCENTS} x layers x KV heads"
        raise ProfileError(f"{path} holds {dtype} of {' x '.join(map(str, shape)) or 'no axis'}, not {expected_layout}")
    check_kv_heads(path, shape[1:], model)
    if np.prod(shape, dtype=object) * dtype.itemsize != len(raw) - file.tell():
        raise ProfileError(f"{path} has {len(raw)} bytes, which is not what its header says; fetch it again")
    return np.load(io.BytesIO(raw), allow_pickle=False).astype(np.float64)
