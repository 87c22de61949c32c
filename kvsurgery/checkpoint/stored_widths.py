"""Widths of the KV cache that ModelOpt stores in config.json, by layer."""

from __future__ import annotations

from collections.abc import Mapping

from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.quantization import KEY
from kvsurgery.errors import CheckpointError, UnsupportedModel, short

LAYERS = "kv_cache_quantized_layers"
VERSION = "kv_cache_schema_version"
# bits of ModelOpt's formats of keys and values
ALGORITHMS: dict[str, int | str] = {"FP8": 8, "NVFP4": 4, "FP8_K_NVFP4_V": "k8v4"}


def stored_bits(model: Model) -> list[int | str | None]:
    """Bits by layer of the KV cache, as ModelOpt stores them in config.json; None for layers that are not listed.

    Raises:
        UnsupportedModel: there are none, or their version or an algorithm is unknown.
        CheckpointError: they are malformed, or are not of layers with a KV cache of this model.
    """
    settings = model.config.get(KEY)
    if not isinstance(settings, Mapping) or LAYERS not in settings:
        raise UnsupportedModel(f"`cache.bits` source: {KEY} of config.json has no {LAYERS}; give a width, such as 8")
    if (version := settings.get(VERSION, 1)) != 1:
        raise UnsupportedModel(f"config.json: {VERSION} of {KEY} is {short(version)}; known is 1; give a width")
    entries = settings[LAYERS]
    if not isinstance(entries, Mapping):
        raise CheckpointError(f"config.json: {LAYERS} should be an object, not {short(entries)}")
    if not entries:
        raise UnsupportedModel(f"config.json: {LAYERS} lists no layer; give a width, such as 8")
    bits: list[int | str | None] = [None] * len(model.layer_heads)
    for name, entry in entries.items():
        layer, part = model.family.place(name)
        if (
            layer is None
            or layer >= len(bits)
            or part != model.family.modeling.attention
            or not model.layer_heads[layer]
        ):
            raise CheckpointError(
                f"config.json: {short(name)} of {LAYERS} is not the attention of a layer with a KV cache"
            )
        if bits[layer] is not None:
            raise CheckpointError(f"config.json: {LAYERS} lists layer {layer} twice")
        algorithm = entry.get("quant_algo") if isinstance(entry, Mapping) else None
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise UnsupportedModel(
                f"config.json: {short(name)} of {LAYERS} should have a quant_algo of {', '.join(ALGORITHMS)}, not "
                f"{short(entry)}"
            )
        bits[layer] = ALGORITHMS[algorithm]
    return bits
