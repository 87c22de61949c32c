"""RLKV's gates for reasoning models (Du et al. 2025, arXiv 2510.08525)."""

from __future__ import annotations

import os
from pathlib import Path

from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.files import origin, read_shares
from kvsurgery.profile.profiled_model import ProfiledModel

GATES_FILE = "adapter_weights.tsv"
# published gates reach from -0.0106 to 1.008
SLACK = 0.02
# of the streaming heads that published gates were trained beside; no file says so
SINK, RECENT = 128, 256


def import_rlkv(path: str | Path, model: ProfiledModel) -> HeadProfile:
    """Read RLKV's gates: a table of layers x KV heads, clipped to [0, 1].

    Args:
        path: the TSV file, or the folder that holds it as `adapter_weights.tsv`.

    Raises:
        ProfileError: the file is unreadable, not such a table, or of another shape.
    """
    path = Path(path)
    if os.path.isdir(path):
        path /= GATES_FILE
    scores, raw = read_shares(path, SLACK, "RLKV gate", model)
    return model.profile(scores, "rlkv", origin("RLKV", path, raw), sink=SINK, recent=RECENT)
