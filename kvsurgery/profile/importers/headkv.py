"""HeadKV's scores (Fu et al. 2024, arXiv 2410.19258) and those of Retrieval_Head (Wu et al. 2024, arXiv 2404.15574)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from kvsurgery.errors import ProfileError
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.files import is_number, origin, parse_object, read
from kvsurgery.profile.profiled_model import ProfiledModel

HEADKV_METHODS = ("headkv-r", "headkv-er", "headkv-r2")


def import_headkv(path: str | Path, model: ProfiledModel, method: str = "headkv-r") -> HeadProfile:
    """Read HeadKV (Fu et al. 2024) or Retrieval_Head (Wu et al. 2024) scores: the mean over trials per query head.

    Args:
        path: JSON of `{"layer-head": [score of each trial, ...]}`; the keys alone say which head a list belongs to.
        method: the kind of score, one of `HEADKV_METHODS`, which the file does not record.

    Raises:
        ProfileError: the file is unreadable or not such JSON, heads are missing or unknown, or a list of trials is
            empty: its head was not measured, which is not a score of 0.
    """
    if method not in HEADKV_METHODS:
        raise ProfileError(f"unknown HeadKV method {method!r}; known: {', '.join(HEADKV_METHODS)}")
    path = Path(path)
    raw = read(path)
    trials = parse_object(path, raw)
    layers, heads = model.dimensions.layers, model.dimensions.query_heads
    expectation = f"{model.name} has {layers} layers of {heads} query heads; was another model measured?"
    if len(trials) != layers * heads:
        raise ProfileError(f"{path} holds {len(trials)} heads, but {expectation}")
    places = {f"{layer}-{head}": (layer, head) for layer in range(layers) for head in range(heads)}
    # as many keys as heads, so an unknown key also shows as a missing one
    missing_keys = [key for key in places if key not in trials]
    if missing_keys:
        raise ProfileError(f"{path} lacks head {missing_keys[0]!r} (layer-head), but {expectation}")

    scores = np.empty((layers, heads))
    for key, place in places.items():
        scores[place] = _mean_score(path, key, trials[key])
    counts = [len(trials[key]) for key in places]
    facts = {**origin("HeadKV", path, raw), "trials": [min(counts), max(counts)]}
    return model.profile(scores, method, facts, granularity="query")


def _mean_score(path: Path, key: str, trials: Any) -> float:
    if not isinstance(trials, list) or not trials:
        raise ProfileError(f"{path}: head {key} has no list of trials, so no score; measure it again")
    for trial in trials:
        if not is_number(trial) or trial < 0:
            raise ProfileError(f"{path}: head {key} has the trial {str(trial)[:40]}; scores are numbers from 0 up")
    return math.fsum(trials) / len(trials)
