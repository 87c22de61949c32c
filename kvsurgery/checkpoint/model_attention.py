"""`ModelAttention`: the attention of every layer, read from a config by the rules of its family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from kvsurgery.checkpoint.family import Family
from kvsurgery.checkpoint.patch import FULL_ATTENTION
from kvsurgery.checkpoint.patterns import matches
from kvsurgery.errors import UnsupportedModel
from kvsurgery.heads.dimensions import ModelDimensions, ModelLayers
from kvsurgery.templates.kv_layout import NEITHER, STATES, text_config

# larger numbers in a config are nonsense, and would make lists of that length
MAX_DIMENSION = 1 << 20
MAX_POSITIONS = 1 << 30  # Llama 4 Scout has ten million
OLD_KINDS = {"attention": FULL_ATTENTION, "mamba": "linear_attention"}  # earlier names in `layer_types`
# a row of o_proj has to fit a window of the engine
MAX_WIDTH = 1 << 17


@dataclass(frozen=True, eq=False)
class ModelAttention:
    """The attention of a model from its config: dimensions, windows, and layers that share a KV cache.

    Every property raises UnsupportedModel if the config is not plausible.

    Attributes:
        family: the model family, with the facts about the heads of its text model.
        config: config.json before the conversion.
    """

    family: Family
    config: Mapping[str, Any]

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """The part of the config for the model with the KV cache, with the kinds of its layers in `layer_types`."""
        text, rules = text_config(self.config), self.family.layers
        if rules is None:
            return text
        kinds = [OLD_KINDS.get(str(kind), kind) for kind in rules.kinds(text, self.family.defaults)]
        return {**text, "layer_types": kinds, "num_hidden_layers": len(kinds)}  # stock code ignores another number

    @cached_property
    def dimensions(self) -> ModelDimensions:
        """Attention dimensions of layers with full attention, with the defaults of the family's config class."""
        return replace(self, config={**self.text, **self._of_full_attention()}).sliding_dimensions

    @cached_property
    def sliding_dimensions(self) -> ModelDimensions:
        """Attention dimensions of layers with a sliding window of the model's own."""
        layers = self._number("num_hidden_layers")
        query_heads = self._number("num_attention_heads")
        # a null means one KV head per query head, a missing key the family's default
        has_kv_heads = self._value("num_key_value_heads") is not None
        kv_heads = self._number("num_key_value_heads") if has_kv_heads else query_heads
        if query_heads % kv_heads:
            raise UnsupportedModel(f"config.json: {query_heads} query heads do not share {kv_heads} KV heads evenly")
        has_head_dim = self.text.get("head_dim") is not None or "head_dim" in self.family.defaults
        head_dim = self._number("head_dim") if has_head_dim else self.hidden // query_heads
        if not 0 < query_heads * head_dim <= MAX_WIDTH:
            raise UnsupportedModel(f"config.json: {query_heads} query heads of width {head_dim} are not plausible")
        return ModelDimensions(layers, query_heads, kv_heads, head_dim)

    @cached_property
    def layer_dimensions(self) -> tuple[ModelDimensions, ...]:
        """Attention dimensions of each layer."""
        full, sliding = self.dimensions, self.sliding_dimensions
        return tuple(full if window is None else sliding for window in self.windows)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """What `layer_types` calls each layer."""
        if self.family.layers:
            return tuple(self.text["layer_types"])
        other = self.family.window.kind if self.family.window else FULL_ATTENTION
        return tuple(FULL_ATTENTION if window is None else other for window in self.windows)

    @cached_property
    def layer_heads(self) -> tuple[range, ...]:
        """The KV heads of each layer in the source's order; layers with states have none."""
        pairs = zip(self.layer_dimensions, self.windows, strict=True)
        return tuple(range(0 if window == 0 else dimensions.kv_heads) for dimensions, window in pairs)

    def has_part(self, part: str, layer: int) -> bool:
        """Whether a layer has a tensor that other layers of the model have.

        If keys are values, a layer has no `v_proj`. If it shares the KV cache of an earlier layer, it has neither
        `v_proj` nor tensors of keys. Layers without a KV cache have tensors of their own.
        """
        if layer in self.sources and part.startswith(("self_attn.k_", "self_attn.v_")):
            return False
        kinds = [kind for kind, patterns in self.family.only.items() if matches(part, patterns)]
        if kinds and self.kinds[layer] not in kinds:
            return False
        full = self.family.full_attention
        if full is None or not part.startswith("self_attn.v_proj.") or not self._value(full.keys_are_values):
            return True
        return self.windows[layer] is not None

    @property
    def hidden(self) -> int:
        """Width of the hidden state."""
        return self._number("hidden_size")

    @cached_property
    def layers(self) -> ModelLayers:
        """The attention of each layer, and the layers that share a KV cache."""
        chunked = self.family.has_chunked_layers
        stateful = self.state_bytes() > 0
        return ModelLayers(self.dimensions, self.windows, chunked, self.sliding_dimensions, self.sources, stateful)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, the model's own sliding window or the size of its chunks, in tokens; None is full attention.

        0 is a layer with states, which has no KV cache. A window that spans every position the model has counts as full
        attention.
        """
        sliding, size = self._sliding_layers
        layers = len(sliding)
        if not any(sliding):
            return (None,) * layers
        if type(size) is not int or (size < 1 and not self.family.states):
            raise UnsupportedModel(f"config.json has sliding layers, but {self._window_size} is {size!r}")
        if size >= self._number("max_position_embeddings", MAX_POSITIONS) and not self.family.full_attention:
            return (None,) * layers
        return tuple(size if slides else None for slides in sliding)

    @cached_property
    def sources(self) -> dict[int, int]:
        """The layers without a KV cache of their own, each with the layer whose keys and values its queries attend to.

        This is the last layer with a cache and the same kind of attention.
        """
        key = self.family.sharing
        if key is None:
            return {}
        sliding, _ = self._sliding_layers
        count = self._value(key)
        if type(count) is not int or not 0 <= count < len(sliding):
            raise UnsupportedModel(f"config.json: {key} is {count!r}, of {len(sliding)} layers")
        first_shared = len(sliding) - count
        last_by_kind = {slides: layer for layer, slides in enumerate(sliding[:first_shared])}
        if not last_by_kind.keys() >= set(sliding):
            raise UnsupportedModel(f"config.json: {key} is {count}, which leaves a kind of layers no KV cache")
        return {layer: last_by_kind[sliding[layer]] for layer in range(first_shared, len(sliding))}

    def state_bytes(self, itemsize: int = 2) -> int:
        """Bytes of a sequence's states in all layers that have some.

        A layer stores the last inputs of its convolution, in elements of `itemsize` bytes, and a recurrent state in
        float32.
        """
        states = self.family.states
        if states is None:
            return 0
        layer_bytes = itemsize * self._sum(states.convolution) + 4 * self._sum(states.recurrence)
        return layer_bytes * sum(states.beside or kind in STATES for kind in self.kinds)

    def _sum(self, products: Iterable[str]) -> int:
        """The sum of products of numbers and config keys, as `States` has them."""
        factors = ([*product.split(" * ")] for product in products)
        return sum(prod(int(one) if one.isdecimal() else self._number(one) for one in row) for row in factors)

    def _of_full_attention(self) -> dict[str, int]:
        """The dimensions that layers with full attention have of their own.

        They lie under keys of the family, or in `per_layer_config`, which transformers 5 writes in their place.
        """
        text, full = self.text, self.family.full_attention
        if full is None:
            if text.get("per_layer_config") not in (None, {}):
                raise UnsupportedModel("config.json: per_layer_config is not supported for models of this family")
            return {}
        if "per_layer_config" not in text:
            keys = {"head_dim": full.head_dim}
            if self._value(full.keys_are_values):
                keys["num_key_value_heads"] = full.num_key_value_heads
            overrides = {name: self._value(key) for name, key in keys.items()}
            return {name: value for name, value in overrides.items() if value is not None}
        layers = {} if text["per_layer_config"] is None else text["per_layer_config"]  # null: all are alike
        names = "head_dim", "num_key_value_heads"
        base_shape = {name: self._number(name) for name in names}
        refusal = UnsupportedModel(f"config.json: per_layer_config must give layers {' and '.join(names)} only")
        try:
            layer_shapes = {int(layer): {**base_shape, **overrides} for layer, overrides in layers.items()}
            shapes = [layer_shapes.pop(layer, base_shape) for layer in range(len(self.windows))]
        except (AttributeError, TypeError, ValueError) as error:
            raise refusal from error
        if layer_shapes or any(shape.keys() != {*names} for shape in shapes):
            raise refusal
        layer_kinds = [*zip(shapes, self.windows, strict=True)]
        full_shapes = [shape for shape, window in layer_kinds if window is None]
        sliding_shapes = [shape for shape, window in layer_kinds if window is not None]
        full_shape = full_shapes[0] if full_shapes else {}
        if any(shape != full_shape for shape in full_shapes) or any(shape != base_shape for shape in sliding_shapes):
            raise UnsupportedModel("config.json: per_layer_config gives layers of one kind heads of several shapes")
        return full_shape

    @cached_property
    def _sliding_layers(self) -> tuple[list[bool], Any]:
        """Whether each layer has no full attention, and the window or chunk of those that have none; 0 for states."""
        layers = self._number("num_hidden_layers")
        window, text = self.family.window, self.text
        if not isinstance(text.get("layer_types"), list | None):
            raise UnsupportedModel(f"config.json: layer_types is {text['layer_types']!r}, not a list")
        if window is None:
            return [False] * layers, None
        enabled = window.enabled_by is None or self._value(window.enabled_by)
        size = self._value(self._window_size) if enabled else None
        if self.family.states:
            size = 0
        types = text.get("layer_types") if window.layer_types else None
        if types is None and size is not None and window.layer_types == "required":
            raise UnsupportedModel("config.json has a sliding window; add layer_types, which say where it applies")
        if types is not None:
            types = [OLD_KINDS.get(kind, kind) for kind in types] if self.family.states else types
            allowed_types = (FULL_ATTENTION, window.kind, *(NEITHER if self.family.layers else ()))
            if len(types) != layers or any(item not in allowed_types for item in types):
                raise UnsupportedModel(f"config.json: layer_types must be {layers} times {' or '.join(allowed_types)}")
            # stock code takes the last layer of a family with two kinds of heads for one with full attention
            kinds = [*types[:-1], FULL_ATTENTION] if self.family.full_attention else types
            return [item != FULL_ATTENTION for item in kinds], size
        if size is None:
            return [False] * layers, size
        if window.full_layers:
            full_layers = self._value(window.full_layers)
            if not isinstance(full_layers, list | None):
                raise UnsupportedModel(f"config.json: {window.full_layers} is {full_layers!r}, not a list of layers")
            return [full_layers is not None and layer not in full_layers for layer in range(layers)], size
        flags = self._value(window.layers) if window.layers else None
        if flags:
            if not isinstance(flags, list) or len(flags) < layers:
                raise UnsupportedModel(f"config.json: {window.layers} must have a number for each of {layers} layers")
            return [bool(flag) for flag in flags[:layers]], size
        first_layer = self._value(window.from_layer) if window.from_layer else 0
        period = window.full_every
        if isinstance(period, str):
            period = self._number(period)
        if type(first_layer) is not int:
            raise UnsupportedModel(f"config.json: {window.from_layer} is {first_layer!r}, not a number of layers")
        sliding = [layer >= first_layer and (period is None or (layer + 1) % period != 0) for layer in range(layers)]
        return [*sliding[:-1], False] if self.family.full_attention else sliding, size

    @property
    def _window_size(self) -> str:
        """The config key of the size of windows or chunks."""
        return self.family.window.size if self.family.window else "sliding_window"

    def _value(self, key: str) -> Any:
        return self.text.get(key, self.family.defaults.get(key))

    def _number(self, key: str, maximum: int = MAX_DIMENSION) -> int:
        value = self.text.get(key)
        if value is None:
            value = self.family.defaults.get(key)
        if type(value) is not int or not 0 < value <= maximum:
            raise UnsupportedModel(f"config.json: {key} is {value!r}, not a number between 1 and {maximum}")
        return value
