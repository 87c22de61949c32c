"""The `kv_surgery` section of config.json, as `KVLayout.from_config` reads it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvsurgery.templates.kv_layout import NEAREST, VERSION, KVLayout, LayerLayout, Selection


def layout_section(layout: KVLayout) -> dict[str, Any]:
    """The section for a layout."""
    return {
        "version": VERSION,
        "head_dim": layout.head_dim,
        **({"selection": selection_section(layout.selection)} if layout.selection else {}),
        **({"quantization": quantization} if (quantization := quantization_section(layout)) else {}),
        "layers": [_layer_section(layer) for layer in layout.layers],
    }


def _layer_section(layer: LayerLayout) -> dict[str, Any]:
    entry: dict[str, Any] = {"blocks": [list(block) for block in layer.blocks]}
    if layer.head_dim is not None:
        entry["head_dim"] = layer.head_dim
    if layer.source is not None:
        entry["source"] = layer.source
    if not layer.heads:
        return entry
    if layer.selection:
        return {**entry, "budgets": list(layer.budgets)}
    entry |= {"sink": layer.sink, "recent": layer.recent}
    flags = {"native": layer.native, "chunked": layer.chunked}
    return {**entry, **{name: True for name, is_set in flags.items() if is_set}}


def selection_section(selection: Selection) -> dict[str, Any]:
    """The entry about the selection of budgeted heads, without unset values."""
    return {name: value for name, value in asdict(selection).items() if value is not None}


def quantization_section(layout: KVLayout) -> dict[str, Any] | None:
    """The entry of a quantized cache: the fields of `Quantization`.

    A field that differs between layers is a list by layer; `bits` is None for a layer that keeps the model's dtype.
    Rounding to the nearest code in all layers goes without saying.
    """
    if layout.quantization is None:
        return None
    unquantized_entry = {**asdict(layout.quantization), "bits": None}
    entries = [asdict(layer.quantization) if layer.quantization else unquantized_entry for layer in layout.layers]
    values = {name: [entry[name] for entry in entries] for name in unquantized_entry}
    return {
        name: layer_values[0] if layer_values.count(layer_values[0]) == len(layer_values) else layer_values
        for name, layer_values in values.items()
        if name != "rounding" or {*layer_values} != {NEAREST}
    }
