"""What others published, as a `HeadProfile`: DuoAttention gates, HeadKV and Retrieval_Head scores, REFORM's choices."""

from __future__ import annotations

import json
import math
import os
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from kvsurgery import __version__
from kvsurgery.dimensions import ModelDimensions
from kvsurgery.errors import ProfileError
from kvsurgery.profile.embedding_heads import EmbeddingHead
from kvsurgery.profile.head_profile import REFORM, HeadProfile

DUO_FILE = "full_attention_heads.tsv"
# how far outside [0, 1] optimiser noise takes a gate (-0.0014 seen); anything further is not a gate
DUO_SLACK = 0.01
# facts worth keeping from DuoAttention's dump of its training arguments: the numbers, never its paths
DUO_FACTS = ("num_steps", "lr", "reg_weight", "context_length_min", "context_length_max", "num_passkeys", "seed")
HEADKV_METHODS = ("headkv-r", "headkv-er", "headkv-r2")
REFORM_HEADS = Path(__file__).with_name("reform_heads.toml")
# 128 layers x 128 heads x 1,000 trials of 20 characters come to a third of it
LARGEST_FILE = 1 << 30


def import_duo(
    path: str | Path,
    model: ModelDimensions,
    base_model: str,
    base_revision: str | None = None,
    windows: tuple[int | None, ...] | None = None,
) -> HeadProfile:
    """Read DuoAttention gates (Xiao et al. 2024): a table of layers x KV heads, clipped to [0, 1].

    Args:
        path: the TSV file, or the folder that holds it as `full_attention_heads.tsv`. The sink and recent sizes of the
            training run come from the `config.json` beside the table, where there is one.
        model: dimensions of the model that was measured.
        base_model, base_revision: its name and commit, for the profile.
        windows: its sliding windows by layer, as `Family.windows` gives them.

    Raises:
        ProfileError: the file is unreadable, not such a table, or of another shape.
    """
    path = Path(path)
    if os.path.isdir(path):
        path /= DUO_FILE
    raw = _read(path)
    rows = [_duo_row(path, number, line) for number, line in enumerate(raw.decode("ascii", "replace").splitlines(), 1)]
    columns = len(rows[0]) if rows else 0
    for number, row in enumerate(rows, 1):
        if len(row) != columns:
            raise ProfileError(f"{path}, line {number}: {len(row)} scores, but {columns} in line 1")
    if (len(rows), columns) != (model.layers, model.kv_heads):
        raise ProfileError(
            f"{path} holds {len(rows)} x {columns} scores, but {base_model} has {model.layers} layers of "
            f"{model.kv_heads} KV heads; was another model measured?"
        )
    options = _duo_options(path.with_name("config.json"))
    return HeadProfile(
        scores=np.clip(np.array(rows), 0, 1),
        method="duo",
        granularity="kv",
        base_model=base_model,
        base_revision=base_revision,
        model=model,
        sink=_whole(options, "sink_size", 0),
        recent=_whole(options, "recent_size", 1),
        provenance={
            **_origin("DuoAttention", path, raw),
            "training": {name: options[name] for name in DUO_FACTS if _is_number(options.get(name))},
        },
        windows=windows,
    )


def import_headkv(
    path: str | Path,
    model: ModelDimensions,
    base_model: str,
    base_revision: str | None = None,
    method: str = "headkv-r",
    windows: tuple[int | None, ...] | None = None,
) -> HeadProfile:
    """Read HeadKV (Fu et al. 2024) or Retrieval_Head (Wu et al. 2024) scores: the mean over trials per query head.

    Args:
        path: JSON of `{"layer-head": [score of each trial, ...]}`; the keys alone say which head a list belongs to.
        model: dimensions of the model that was measured.
        base_model, base_revision: its name and commit, for the profile.
        windows: its sliding windows by layer, as `Family.windows` gives them.
        method: what the trials measured, one of `HEADKV_METHODS`; the file does not say.

    Raises:
        ProfileError: the file is unreadable or not such JSON, heads are missing or unknown, or a list of trials is
            empty: its head was not measured, which is not a score of 0.
    """
    if method not in HEADKV_METHODS:
        raise ProfileError(f"unknown HeadKV method {method!r}; known: {', '.join(HEADKV_METHODS)}")
    path = Path(path)
    raw = _read(path)
    trials = _parse_object(path, raw)
    expected = f"{base_model} has {model.layers} layers of {model.query_heads} query heads; was another model measured?"
    if len(trials) != model.layers * model.query_heads:
        raise ProfileError(f"{path} holds {len(trials)} heads, but {expected}")
    places = {f"{layer}-{head}": (layer, head) for layer in range(model.layers) for head in range(model.query_heads)}
    # as many keys as heads, so an unknown key also shows as a missing one
    missing = [key for key in places if key not in trials]
    if missing:
        raise ProfileError(f"{path} lacks head {missing[0]!r} (layer-head), but {expected}")

    scores = np.empty((model.layers, model.query_heads))
    for key, place in places.items():
        scores[place] = _mean(path, key, trials[key])
    counts = [len(trials[key]) for key in places]
    return HeadProfile(
        scores=scores,
        method=method,
        granularity="query",
        base_model=base_model,
        base_revision=base_revision,
        model=model,
        provenance={**_origin("HeadKV", path, raw), "trials": [min(counts), max(counts)]},
        windows=windows,
    )


def import_reform(name: str) -> HeadProfile:
    """The embedding heads that the paper of REFORM chose for a model (Song et al. 2025); their ranks are not published.

    Args:
        name: Hub id of the model, with or without its owner, in any case.

    Raises:
        ProfileError: the paper has no choice for it.
    """
    published = tomllib.loads(REFORM_HEADS.read_text(encoding="utf-8"))
    for model_id, chosen in published.items():
        if name.lower() in (model_id.lower(), model_id.lower().partition("/")[2]):
            return HeadProfile(
                None,
                REFORM,
                None,
                base_model=model_id,
                model=ModelDimensions(*chosen["model"]),
                provenance={"source": "arXiv:2506.01215", "origin": "REFORM", "tool": f"kvsurgery {__version__}"},
                embedding_heads=EmbeddingHead.parse(chosen["heads"]),
            )
    raise ProfileError(f"REFORM's paper chose no heads for {name!r}; it did for {', '.join(published)}")


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ProfileError(f"{path} is over 1 GiB; this is no file of head scores")
        return path.read_bytes()
    except OSError as error:
        raise ProfileError(f"cannot read {path}: {error.strerror}") from error


def _origin(tool: str, path: Path, raw: bytes) -> dict[str, str]:
    return {"source": path.name, "blake3": blake3(raw).hexdigest(), "origin": tool, "tool": f"kvsurgery {__version__}"}


def _duo_row(path: Path, number: int, line: str) -> list[float]:
    row = []
    for cell in line.split("\t"):
        try:
            score = float(cell)
        except ValueError:
            raise ProfileError(f"{path}, line {number}: {cell[:40]!r} is not a number") from None
        if not -DUO_SLACK <= score <= 1 + DUO_SLACK:
            raise ProfileError(f"{path}, line {number}: {score} is outside [0, 1]; this is no DuoAttention gate")
        row.append(score)
    return row


def _duo_options(path: Path) -> dict[str, Any]:
    """DuoAttention's training arguments; empty without the file."""
    return _parse_object(path, _read(path)) if os.path.exists(path) else {}


def _whole(options: dict[str, Any], name: str, least: int) -> int | None:
    value = options.get(name)
    if value is not None and (type(value) is not int or value < least):
        raise ProfileError(f"config.json beside the gates: {name} must be a whole number >= {least}, got {value!r}")
    return value


def _parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    """A JSON object whose keys are given once."""
    try:
        value = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ProfileError(f"{path} holds no JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is given twice")
    return result


def _is_number(value: Any) -> bool:
    # within float32, which also keeps out NaN, infinity and whole numbers of a thousand digits
    return type(value) in (int, float) and abs(value) < 1e38


def _mean(path: Path, key: str, trials: Any) -> float:
    if not isinstance(trials, list) or not trials:
        raise ProfileError(f"{path}: head {key} has no list of trials, so no score; measure it again")
    for trial in trials:
        if not _is_number(trial) or trial < 0:
            raise ProfileError(f"{path}: head {key} has the trial {str(trial)[:40]}; scores are numbers from 0 up")
    return math.fsum(trials) / len(trials)
