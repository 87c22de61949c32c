"""A head profile of a small model, as its tests change it."""

import numpy as np
from safetensors import safe_open

from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.head_profile import HeadProfile

GQA = ModelDimensions(layers=3, query_heads=8, kv_heads=2, head_dim=16)
SCORES = np.array([[0.5, 1.0], [0.0, 0.25], [1.0, 1.0]], np.float32)


def profile(**changes):
    fields = {"scores": SCORES, "method": "duo", "granularity": "kv", "base_model": "org/model", "model": GQA}
    return HeadProfile(**{**fields, **changes})


def metadata(path):
    with safe_open(path, "numpy") as file:
        return file.metadata()
