"""WG-KV's shares: how much of the context the write gate of each KV head lets in."""

from __future__ import annotations

from pathlib import Path

from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.files import check_kv_heads, origin, parse_shares, read
from kvsurgery.profile.measured import Measured


def import_wg_kv(path: str | Path, model: Measured) -> HeadProfile:
    """Read WG-KV's `*_retain_ratio.tsv`: a table of layers x KV heads, the share of tokens that each head keeps.

    Args:
        path: the TSV file.
        model: that was measured.

    Raises:
        ProfileError: the file is unreadable, not such a table, or of another shape.
    """
    path = Path(path)
    raw = read(path)
    scores = parse_shares(path, raw, 0, "share of kept tokens")
    check_kv_heads(path, scores, model)
    return HeadProfile(
        scores=scores,
        method="wg-kv",
        granularity="kv",
        base_model=model.name,
        base_revision=model.revision,
        model=model.dimensions,
        provenance=origin("WG-KV", path, raw),
        windows=model.windows,
    )
