"""The embedding heads that REFORM's paper chose (Song et al. 2025, arXiv 2506.01215)."""

from __future__ import annotations

import tomllib
from pathlib import Path

from kvsurgery.errors import ProfileError
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.embedding_heads import EmbeddingHead
from kvsurgery.profile.head_profile import REFORM, HeadProfile
from kvsurgery.version import TOOL

HEADS = Path(__file__).with_name("reform_heads.toml")


def import_reform(name: str) -> HeadProfile:
    """The embedding heads that the paper of REFORM chose for a model; their ranks are not published.

    Args:
        name: Hub id of the model, with or without its owner, in any case.

    Raises:
        ProfileError: the paper has no choice for it.
    """
    entries = tomllib.loads(HEADS.read_text(encoding="utf-8"))
    for model_id, entry in entries.items():
        if name.lower() in (model_id.lower(), model_id.lower().partition("/")[2]):
            return HeadProfile(
                None,
                REFORM,
                None,
                base_model=model_id,
                model=ModelDimensions(*entry["model"]),
                provenance={"source": "arXiv:2506.01215", "origin": "REFORM", "tool": TOOL},
                embedding_heads=EmbeddingHead.parse(entry["heads"]),
            )
    raise ProfileError(f"REFORM's paper chose no heads for {name!r}; it did for {', '.join(entries)}")
