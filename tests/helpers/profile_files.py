"""Files of head scores as others publish them, for the importers."""

import json

from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.profiled_model import ProfiledModel

GQA = ModelDimensions(layers=3, query_heads=4, kv_heads=2, head_dim=8)

MODEL = ProfiledModel("org/model", GQA)

GATES = [[0.5, 1.0], [-0.0014, 1.005], [0.25, 0.0]]


def tsv(path, rows=GATES):
    path.write_text("".join("\t".join(f"{score:.18e}" for score in row) + "\n" for row in rows))
    return path


def trials():
    """Three equal trials a head, 10 x layer + head."""
    return {f"{n}-{head}": [10 * n + head] * 3 for n in range(3) for head in range(4)}


def dump(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path
