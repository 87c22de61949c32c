"""config.json of a converted checkpoint: the source's, with the heads' layout and the emitted code's names."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from kvsurgery.checkpoint.dtype import KEYS
from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.patch import FULL_ATTENTION, SLIDING_ATTENTION
from kvsurgery.checkpoint.side_code import side_references
from kvsurgery.errors import CheckpointError
from kvsurgery.heads.section import layout_section
from kvsurgery.policy.policy import Policy
from kvsurgery.templates.kv_layout import text_config

# a cache implementation in a generation config would push the emitted cache aside
CACHE_OPTIONS = ("cache_implementation", "cache_config")
# what transformers runs attention and experts with: its own code under a plain name, code of the Hub as "org/name"
IMPLEMENTATIONS = tuple(f"{start}{part}_implementation" for start in ("", "_") for part in ("attn", "experts"))
# transformers sets these when it runs; before 5.3 it takes them from config.json and asks nobody (CVE-2026-4372)
INTERNAL = tuple(f"_{part}_implementation_internal" for part in ("attn", "experts"))
# RoPE settings that transformers 4 has outside of `rope_scaling`
UNSCALED = ("rope_theta", "partial_rotary_factor")


def converted_config(model: Model, policy: Policy, dtype: str | None = None) -> dict[str, Any]:
    """The source's config.json with `auto_map`, `kv_surgery`, and RoPE as transformers 4 and 5 spell it.

    It names the `dtype` in which the source is loaded, if that is given, so that every version of transformers loads
    what the card predicts.

    `model_type` and `architectures` stay, so that without `trust_remote_code` the stock class loads. Keys that can make
    transformers run code of the Hub without it are left out.
    """
    family = model.family
    full, sliding = model.dimensions, model.sliding_dimensions
    result = copy.deepcopy(dict(model.config))
    for part, key, _ in [*_hub_code(result)]:
        del part[key]
    text = text_config(result)
    if not family.rope_parameters_only:
        text.update(both_rope_spellings(text, family.rope_by_type))
    # a config may leave out what is its class's default; the layout is checked against these
    text["num_hidden_layers"] = full.layers
    text["num_attention_heads"] = full.query_heads
    text["num_key_value_heads"] = sliding.kv_heads
    if family.full_attention:
        full_shape = {"head_dim": full.head_dim, "num_key_value_heads": full.kv_heads}
        full_layers = [layer for layer, window in enumerate(model.windows) if window is None]
        text |= {"head_dim": sliding.head_dim, "per_layer_config": {str(layer): full_shape for layer in full_layers}}
    if family.states and not family.states.beside and text.get("layer_types") is None:
        text["layer_types"] = [*model.kinds]
    if dtype is not None:
        _name_dtype(result, text, dtype)
    own_classes = {auto: f"{family.module}.{name}" for auto, name in family.classes.items()}
    result["auto_map"] = side_references(result) | own_classes
    section = layout_section(policy.layout)
    layers = section.pop("layers")
    reform = {"reform": asdict(policy.reform)} if policy.reform else {}
    result["kv_surgery"] = {**section, **_order(policy), **reform, "layers": layers}
    return result


def _name_dtype(config: dict[str, Any], text: dict[str, Any], dtype: str) -> None:
    """Name the dtype where a config has none, and where that of its text model is another."""
    if all(config.get(key) is None for key in KEYS):
        config["dtype"] = dtype
    for key in KEYS:
        if text is not config and text.get(key) is not None:
            text[key] = dtype


def _order(policy: Policy) -> dict[str, str]:
    """A hash of the order of all heads, by which adapters are known; nothing where it is the source's."""
    if not policy.moves_heads:
        return {}
    return {"order": hashlib.sha256(json.dumps(policy.orders).encode()).hexdigest()[:16]}


def hub_code_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Dotted names of the keys that can make transformers run code of the Hub without `trust_remote_code`."""
    return tuple(name for _, _, name in _hub_code(config))


def _hub_code(part: Any, prefix: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """(object, key, dotted name) of each such key in a config, the configs inside it included."""
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for key, value in items:
        name = f"{prefix}{key}"
        # an implementation may be an object that has one for every config inside
        if key in INTERNAL or (key in IMPLEMENTATIONS and "/" in json.dumps(value)):
            yield part, key, name
        else:
            yield from _hub_code(value, f"{name}.")


def auto_class(config: Mapping[str, Any]) -> str:
    """The auto class of transformers that loads a converted checkpoint with its output layer."""
    return [*config["auto_map"]][-1]


def both_rope_spellings(config: Mapping[str, Any], by_type: bool = False) -> dict[str, Any]:
    """The RoPE settings of a config in the spelling that it lacks.

    transformers 5 writes one dict, `rope_parameters`, nested by layer type where types differ. transformers 4 reads
    `rope_theta`, `rope_scaling`, `partial_rotary_factor` and `rope_local_base_freq`, and knows no other.
    With `by_type`, sliding layers have the same `rope_theta`, but are never scaled.

    Raises:
        CheckpointError: settings are not objects, or both spellings are there and differ.
    """
    parameters = _mapping(config.get("rope_parameters") or {})
    if parameters:
        full_rope = _mapping(parameters.get(FULL_ATTENTION, parameters))
        _check_older_spelling(config, full_rope)
        scaling = {key: value for key, value in full_rope.items() if key not in UNSCALED}
        result = {key: full_rope[key] for key in UNSCALED if key in full_rope}
        # models that read images have sections there that are not scaled
        result["rope_scaling"] = None if scaling in ({}, {"rope_type": "default"}) else scaling
        if SLIDING_ATTENTION in parameters and not by_type:
            result["rope_local_base_freq"] = _mapping(parameters[SLIDING_ATTENTION]).get("rope_theta", 10_000.0)
        return result
    if "rope_theta" not in config:
        return {}
    scaling = dict(_mapping(config.get("rope_scaling") or {}))
    kind = scaling.pop("type", "default")
    full_rope = {"rope_type": kind, **scaling, "rope_theta": config["rope_theta"]}
    if "partial_rotary_factor" in config:
        full_rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    if "rope_local_base_freq" not in config and not by_type:
        return {"rope_parameters": full_rope}
    theta = config["rope_theta"] if by_type else config["rope_local_base_freq"]
    sliding_rope = {"rope_type": "default", "rope_theta": theta}
    return {"rope_parameters": {FULL_ATTENTION: full_rope, SLIDING_ATTENTION: sliding_rope}}


def _check_older_spelling(config: Mapping[str, Any], full_rope: Mapping[str, Any]) -> None:
    """Raise CheckpointError where `rope_scaling` or `rope_theta` differ from `rope_parameters`.

    transformers 5 prefers `rope_scaling` to them, but not `rope_theta`; transformers 4 reads only these two.
    """
    scaling = config.get("rope_scaling")
    theta = config.get("rope_theta")
    differing = {
        "rope_scaling": bool(scaling) and _scaling(_mapping(scaling)) != _scaling(full_rope),
        "rope_theta": theta is not None and theta != full_rope.get("rope_theta", theta),
    }
    for name, differs in differing.items():
        if differs:
            raise CheckpointError(
                f"config.json: {name} and rope_parameters differ, and versions of transformers follow different ones; "
                f"state RoPE in rope_parameters alone, and remove {name}"
            )


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling of RoPE settings in one spelling."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    others = {key: value for key, value in rope.items() if key not in ("type", *UNSCALED)}
    # transformers replaces the name of what has sections for images, but no scaling
    return {**others, "rope_type": "default" if kind == "mrope" else kind}


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: RoPE settings should be an object, not {value!r}")
    return value


def converted_generation_config(raw: bytes) -> bytes:
    """generation_config.json without a cache implementation; the same bytes where it names none."""
    try:
        settings = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"generation_config.json is not JSON: {error}") from error
    if not isinstance(settings, dict) or not any(key in settings for key in CACHE_OPTIONS):
        return raw
    return to_json({key: value for key, value in settings.items() if key not in CACHE_OPTIONS})


def to_json(content: Mapping[str, Any]) -> bytes:
    """JSON as transformers writes it: two spaces, a final newline."""
    return (json.dumps(content, indent=2) + "\n").encode()
