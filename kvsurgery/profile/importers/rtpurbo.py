"""RTPurbo's retrieval heads, which its checkpoints name in config.json as `headwise_config` (rtp-llm)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kvsurgery.errors import ProfileError, short
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.files import origin, parse_object, read
from kvsurgery.profile.profiled_model import ProfiledModel

KEY = "headwise_config"


def import_rtpurbo(path: str | Path, model: ProfiledModel) -> HeadProfile:
    """Read RTPurbo's retrieval heads: a retrieval head has the score 1, every other query head 0.

    Args:
        path: a config.json whose `headwise_config` has a list of 0 and 1 by layer, and the tokens that the other heads
            keep, `sink_token_num` and `swa_token_num`.

    Raises:
        ProfileError: the file is unreadable or of another layout, or the model has other heads.
    """
    path = Path(path)
    raw = read(path)
    settings = parse_object(path, raw).get(KEY)
    if not isinstance(settings, dict):
        raise ProfileError(f"{path} has no {KEY}: it is not the config.json of an RTPurbo checkpoint")
    sizes = model.dimensions
    scores = np.zeros((sizes.layers, sizes.query_heads))
    for layer in range(sizes.layers):
        # layers with linear attention, or a window of the model's own, may have none
        if str(layer) in settings or model.windows is None or model.windows[layer] is None:
            scores[layer] = _heads(path, settings.get(str(layer)), layer, model)
    named = [name for name in settings if name.isdecimal() and int(name) >= sizes.layers]
    if named:
        raise ProfileError(f"{path} names heads of layer {named[0]}, but {model.name} has {sizes.layers} layers")
    return model.profile(
        scores,
        "rtpurbo",
        origin("RTPurbo", path, raw),
        granularity="query",
        sink=_tokens(path, settings, "sink_token_num", 0),
        recent=_tokens(path, settings, "swa_token_num", 1),
    )


def _heads(path: Path, heads: Any, layer: int, model: ProfiledModel) -> list[int]:
    count = model.dimensions.query_heads
    if not isinstance(heads, list) or len(heads) != count or any(head not in (0, 1) for head in heads):
        raise ProfileError(
            f"{path}: {KEY} of layer {layer} should be 0 or 1 for each of {count} query heads of {model.name}, not "
            f"{short(heads)}"
        )
    return heads


def _tokens(path: Path, settings: dict[str, Any], name: str, least: int) -> int | None:
    value = settings.get(name)
    if value is not None and (type(value) is not int or value < least):
        raise ProfileError(f"{path}: {name} of {KEY} should be a whole number of at least {least}, not {short(value)}")
    return value
