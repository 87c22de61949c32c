"""FlexiCache's unstable heads: KV heads whose important tokens change from step to step, so they keep everything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvsurgery.errors import ProfileError
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.files import origin, parse_object, read
from kvsurgery.profile.profiled_model import ProfiledModel


def import_flexicache(
    path: str | Path, model: ProfiledModel, entry: str | None = None, heads: str | None = None
) -> HeadProfile:
    """Read FlexiCache's lists of heads: an unstable head has the score 1, every other KV head 0.

    Args:
        path: JSON of `{model: {name of a list: [[layer, KV head], ...]}}`.
        entry, heads: the model and the list in the file; None for the only one, or for the model with the same name.

    Raises:
        ProfileError: the file is unreadable or has another layout, it has several models or lists and none was chosen,
            or it names a head that the model does not have.
    """
    path = Path(path)
    raw = read(path)
    content = parse_object(path, raw)
    lists, entry = _select(path, content, model.name if entry is None and model.name in content else entry, "model")
    pairs, heads = _select(path, lists, heads, f"list of {entry}")
    if not isinstance(pairs, list):
        raise ProfileError(f"{path}: {heads} of {entry} is not a list of heads")
    dimensions = model.dimensions
    scores = np.zeros((dimensions.layers, dimensions.kv_heads))
    for pair in pairs:
        scores[_head(path, pair, model)] = 1
    return model.profile(scores, "flexicache", {**origin("FlexiCache", path, raw), "entry": entry, "heads": heads})


def _select(path: Path, content: Any, name: str | None, noun: str) -> tuple[Any, str]:
    """Select one value of an object; returns the value and its name."""
    if not isinstance(content, Mapping) or not content:
        raise ProfileError(f"{path} holds no {noun}")
    if name is None and len(content) == 1:
        name = next(iter(content))
    if name is None or name not in content:
        names = ", ".join(list(content)[:20])
        raise ProfileError(f"{path} has the {noun}: {names}; " + (f"not {name}" if name else "say which"))
    return content[name], name


def _head(path: Path, pair: Any, model: ProfiledModel) -> tuple[int, int]:
    sizes = model.dimensions.layers, model.dimensions.kv_heads
    if not isinstance(pair, list) or len(pair) != 2 or not all(type(number) is int for number in pair):
        raise ProfileError(f"{path}: {str(pair)[:40]} is not a head; a head is [layer, KV head]")
    if not all(0 <= number < size for number, size in zip(pair, sizes, strict=True)):
        raise ProfileError(
            f"{path} names head {pair[1]} of layer {pair[0]}, but {model.name} has {sizes[0]} layers of {sizes[1]} KV "
            "heads; was another model measured?"
        )
    return pair[0], pair[1]
