"""WG-KV's shares: how much of the context the write gate of each KV head lets in."""

from __future__ import annotations

from pathlib import Path

from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.files import origin, read_shares
from kvsurgery.profile.profiled_model import ProfiledModel


def import_wg_kv(path: str | Path, model: ProfiledModel) -> HeadProfile:
    """Read WG-KV's `*_retain_ratio.tsv`: a table of layers x KV heads, the share of tokens that each head keeps.

    Raises:
        ProfileError: the file is unreadable, not such a table, or of another shape.
    """
    path = Path(path)
    scores, raw = read_shares(path, 0, "share of kept tokens", model)
    return model.profile(scores, "wg-kv", origin("WG-KV", path, raw))
