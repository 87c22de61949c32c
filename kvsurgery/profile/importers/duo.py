"""DuoAttention's gates (Xiao et al. 2024, arXiv 2410.10819)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvsurgery.errors import ProfileError
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.files import is_number, origin, parse_object, read, read_shares
from kvsurgery.profile.profiled_model import ProfiledModel

GATES_FILE = "full_attention_heads.tsv"
# how far outside [0, 1] optimizer noise takes a gate (-0.0014 seen); anything further is not a gate
SLACK = 0.01
# facts worth keeping from DuoAttention's dump of its training arguments: the numbers, never its paths
FACTS = ("num_steps", "lr", "reg_weight", "context_length_min", "context_length_max", "num_passkeys", "seed")


def import_duo(path: str | Path, model: ProfiledModel) -> HeadProfile:
    """Read DuoAttention's gates: a table of layers x KV heads, clipped to [0, 1].

    Args:
        path: the TSV file, or the folder that holds it as `full_attention_heads.tsv`. The sink and recent sizes of the
            training run come from the `config.json` beside the table, if there is one.

    Raises:
        ProfileError: the file is unreadable, not such a table, or of another shape.
    """
    path = Path(path)
    if os.path.isdir(path):
        path /= GATES_FILE
    scores, raw = read_shares(path, SLACK, "DuoAttention gate", model)
    options = _options(path.with_name("config.json"))
    training = {name: options[name] for name in FACTS if is_number(options.get(name))}
    return model.profile(
        scores,
        "duo",
        {**origin("DuoAttention", path, raw), "training": training},
        sink=_whole_number(options, "sink_size", 0),
        recent=_whole_number(options, "recent_size", 1),
    )


def _options(path: Path) -> dict[str, Any]:
    """DuoAttention's training arguments; empty without the file."""
    return parse_object(path, read(path)) if os.path.exists(path) else {}


def _whole_number(options: dict[str, Any], name: str, minimum: int) -> int | None:
    value = options.get(name)
    if value is not None and (type(value) is not int or value < minimum):
        raise ProfileError(f"config.json beside the gates: {name} must be a whole number >= {minimum}, got {value!r}")
    return value
