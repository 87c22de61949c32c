"""`AttentionRules`: the attention of every layer, read from a config by the rules of its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsurgery.checkpoint.patch import FullAttention, Windows
from kvsurgery.errors import UnsupportedModel
from kvsurgery.heads.dimensions import ModelDimensions, ModelLayers
from kvsurgery.templates.kv_layout import LINEAR, text_config

# what `layer_types` of a config calls the attention of layers, besides LINEAR
FULL_ATTENTION, SLIDING_ATTENTION, CHUNKED_ATTENTION = "full_attention", "sliding_attention", "chunked_attention"
# larger numbers in a config are nonsense, and would make lists of that length
MAX_DIMENSION = 1 << 20
MAX_POSITIONS = 1 << 30  # Llama 4 Scout has ten million
# a row of o_proj has to fit a window of the engine
MAX_WIDTH = 1 << 17


@dataclass(frozen=True)
class AttentionRules:
    """How the config of a family describes attention: dimensions, windows, and layers that share a KV cache.

    Attributes:
        defaults: of the family's config class, for keys that a config leaves out.
        window: the table `[windows]` of the family's file, which says what layers without full attention have.
        full_attention: the table `[full_attention]`, None where all layers have heads of one number and size.
        sharing: the config key that counts the layers without a KV cache of their own.
    """

    defaults: Mapping[str, Any]
    window: Windows | None
    full_attention: FullAttention | None
    sharing: str | None

    @property
    def has_linear_layers(self) -> bool:
        """Whether the layers without full attention have linear attention."""
        return self.window is not None and self.window.kind == LINEAR

    @property
    def has_chunked_layers(self) -> bool:
        """Whether the layers without full attention have chunked attention."""
        return self.window is not None and self.window.kind == CHUNKED_ATTENTION

    def dimensions(self, config: Mapping[str, Any]) -> ModelDimensions:
        """Attention dimensions of layers with full attention, with the defaults of the family's config class.

        Raises:
            UnsupportedModel: a dimension is no sensible number, query heads do not divide into groups, or layers of one
                kind differ.
        """
        config = text_config(config)
        return self._dimensions({**config, **self._of_full_attention(config)})

    def sliding_dimensions(self, config: Mapping[str, Any]) -> ModelDimensions:
        """Attention dimensions of layers with a sliding window of the model's own.

        Raises:
            UnsupportedModel: as `dimensions`.
        """
        return self._dimensions(text_config(config))

    def layer_dimensions(self, config: Mapping[str, Any]) -> tuple[ModelDimensions, ...]:
        """Attention dimensions of each layer.

        Raises:
            UnsupportedModel: as `dimensions` and `windows`.
        """
        full, sliding = self.dimensions(config), self.sliding_dimensions(config)
        return tuple(full if window is None else sliding for window in self.windows(config))

    def has_part(self, part: str, layer: int, config: Mapping[str, Any]) -> bool:
        """Whether a layer has a tensor that others of the model have.

        Where keys are values, it has no `v_proj`; where it shares the KV cache of an earlier layer, neither that nor
        anything else of keys. Linear attention has tensors of its own.
        """
        config = text_config(config)
        if layer in self.sources(config) and part.startswith(("self_attn.k_", "self_attn.v_")):
            return False
        if self.has_linear_layers and part.startswith(("self_attn.", "linear_attn.")):
            return part.startswith("linear_attn.") == (self.windows(config)[layer] == 0)
        full = self.full_attention
        if full is None or not part.startswith("self_attn.v_proj.") or not self._value(config, full.keys_are_values):
            return True
        return self.windows(config)[layer] is not None

    def _dimensions(self, config: Mapping[str, Any]) -> ModelDimensions:
        layers = self._number(config, "num_hidden_layers")
        query_heads = self._number(config, "num_attention_heads")
        # a null means one KV head per query head, a missing key the family's default
        has_kv_heads = config.get("num_key_value_heads", self.defaults.get("num_key_value_heads")) is not None
        kv_heads = self._number(config, "num_key_value_heads") if has_kv_heads else query_heads
        if query_heads % kv_heads:
            raise UnsupportedModel(f"config.json: {query_heads} query heads do not share {kv_heads} KV heads evenly")
        has_head_dim = config.get("head_dim") is not None or "head_dim" in self.defaults
        head_dim = self._number(config, "head_dim") if has_head_dim else self.hidden(config) // query_heads
        if not 0 < query_heads * head_dim <= MAX_WIDTH:
            raise UnsupportedModel(f"config.json: {query_heads} query heads of width {head_dim} are not plausible")
        return ModelDimensions(layers, query_heads, kv_heads, head_dim)

    def hidden(self, config: Mapping[str, Any]) -> int:
        """Width of the hidden state."""
        return self._number(text_config(config), "hidden_size")

    def layers(self, config: Mapping[str, Any]) -> ModelLayers:
        """What attention each layer has, and where its KV cache is.

        Raises:
            UnsupportedModel: as `windows`, `sources` and `sliding_dimensions`.
        """
        return ModelLayers(
            self.windows(config), self.has_chunked_layers, self.sliding_dimensions(config), self.sources(config)
        )

    def windows(self, config: Mapping[str, Any]) -> tuple[int | None, ...]:
        """Per layer, the model's own sliding window or the size of its chunks, in tokens; None is full attention, and 0
        linear attention, which has no KV cache.

        A window that spans every position the model has counts as full attention.

        Raises:
            UnsupportedModel: layers of another kind, or sliding layers without a window.
        """
        config = text_config(config)
        sliding, size = self._sliding_layers(config)
        layers = len(sliding)
        if not any(sliding):
            return (None,) * layers
        if type(size) is not int or (size < 1 and not self.has_linear_layers):
            raise UnsupportedModel(f"config.json has sliding layers, but {self._window_size} is {size!r}")
        if size >= self._number(config, "max_position_embeddings", MAX_POSITIONS) and not self.full_attention:
            return (None,) * layers
        return tuple(size if slides else None for slides in sliding)

    def sources(self, config: Mapping[str, Any]) -> dict[int, int]:
        """The layers without a KV cache of their own, each with the layer whose keys and values its queries attend to:
        the last one with the same kind of attention that has a cache.

        Raises:
            UnsupportedModel: their number is no sensible one, or no layer of their kind has a cache.
        """
        if self.sharing is None:
            return {}
        config = text_config(config)
        sliding, _ = self._sliding_layers(config)
        count = self._value(config, self.sharing)
        if type(count) is not int or not 0 <= count < len(sliding):
            raise UnsupportedModel(f"config.json: {self.sharing} is {count!r}, of {len(sliding)} layers")
        first_shared = len(sliding) - count
        last_by_kind = {slides: layer for layer, slides in enumerate(sliding[:first_shared])}
        if not last_by_kind.keys() >= set(sliding):
            raise UnsupportedModel(f"config.json: {self.sharing} is {count}, which leaves a kind of layers no KV cache")
        return {layer: last_by_kind[sliding[layer]] for layer in range(first_shared, len(sliding))}

    def state_bytes(self, config: Mapping[str, Any], itemsize: int = 2) -> int:
        """Bytes of a sequence's states in all layers with linear attention.

        A layer has the last inputs of its convolution, with elements of `itemsize` bytes, and for each value head a
        float32 matrix, its recurrent state.
        """
        if not self.has_linear_layers:
            return 0
        config = text_config(config)
        names = "num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim"
        keys, key_dim, values, value_dim, kernel = (self._number(config, f"linear_{name}") for name in names)
        convolution = (2 * keys * key_dim + values * value_dim) * kernel * itemsize
        return self.windows(config).count(0) * (convolution + 4 * values * key_dim * value_dim)

    def _of_full_attention(self, config: Mapping[str, Any]) -> dict[str, int]:
        """The dimensions that layers with full attention have of their own.

        They lie under keys of the family, or in `per_layer_config`, which transformers 5 writes in their place.
        """
        if self.full_attention is None:
            if config.get("per_layer_config") not in (None, {}):
                raise UnsupportedModel("config.json: per_layer_config is not supported for models of this family")
            return {}
        if "per_layer_config" not in config:
            keys = {"head_dim": self.full_attention.head_dim}
            if self._value(config, self.full_attention.keys_are_values):
                keys["num_key_value_heads"] = self.full_attention.num_key_value_heads
            overrides = {name: self._value(config, key) for name, key in keys.items()}
            return {name: value for name, value in overrides.items() if value is not None}
        layers = {} if config["per_layer_config"] is None else config["per_layer_config"]  # null: all are alike
        names = "head_dim", "num_key_value_heads"
        base_shape = {name: self._number(config, name) for name in names}
        windows = self.windows(config)
        refusal = UnsupportedModel(f"config.json: per_layer_config must give layers {' and '.join(names)} only")
        try:
            layer_shapes = {int(layer): {**base_shape, **overrides} for layer, overrides in layers.items()}
            shapes = [layer_shapes.pop(layer, base_shape) for layer in range(len(windows))]
        except (AttributeError, TypeError, ValueError) as error:
            raise refusal from error
        if layer_shapes or any(shape.keys() != {*names} for shape in shapes):
            raise refusal
        full, sliding = (
            [shape for shape, window in zip(shapes, windows, strict=True) if (window is None) == is_full]
            for is_full in (True, False)
        )
        if any(shape != full[0] for shape in full) or any(shape != base_shape for shape in sliding):
            raise UnsupportedModel("config.json: per_layer_config gives layers of one kind heads of several shapes")
        return full[0] if full else {}

    def _sliding_layers(self, config: Mapping[str, Any]) -> tuple[list[bool], Any]:
        """Whether each layer has no full attention, and the window or the chunk of those that have none; 0 is linear
        attention."""
        layers, window = self._number(config, "num_hidden_layers"), self.window
        if not isinstance(config.get("layer_types"), list | None):
            raise UnsupportedModel(f"config.json: layer_types is {config['layer_types']!r}, not a list")
        if window is None:
            return [False] * layers, None
        enabled = window.enabled_by is None or self._value(config, window.enabled_by)
        size = self._value(config, self._window_size) if enabled else None
        if self.has_linear_layers:
            size = 0
        types = config.get("layer_types") if window.layer_types else None
        if types is None and size is not None and window.layer_types == "required":
            raise UnsupportedModel("config.json has a sliding window; add layer_types, which say where it applies")
        if types is not None:
            allowed_types = (FULL_ATTENTION, window.kind)
            if len(types) != layers or any(item not in allowed_types for item in types):
                raise UnsupportedModel(f"config.json: layer_types must be {layers} times {' or '.join(allowed_types)}")
            # stock code takes the last layer of a family with two kinds of heads for one with full attention
            kinds = [*types[:-1], FULL_ATTENTION] if self.full_attention else types
            return [item != FULL_ATTENTION for item in kinds], size
        if size is None:
            return [False] * layers, size
        flags = self._value(config, window.layers) if window.layers else None
        if flags:
            if not isinstance(flags, list) or len(flags) < layers:
                raise UnsupportedModel(f"config.json: {window.layers} must have a number for each of {layers} layers")
            return [bool(flag) for flag in flags[:layers]], size
        first_layer = self._value(config, window.from_layer) if window.from_layer else 0
        period = window.full_every
        if isinstance(period, str):
            period = self._number(config, period)
        if type(first_layer) is not int:
            raise UnsupportedModel(f"config.json: {window.from_layer} is {first_layer!r}, not a number of layers")
        sliding = [layer >= first_layer and (period is None or (layer + 1) % period != 0) for layer in range(layers)]
        return [*sliding[:-1], False] if self.full_attention else sliding, size

    @property
    def _window_size(self) -> str:
        """What a config calls the size of windows or chunks."""
        return self.window.size if self.window else "sliding_window"

    def _value(self, config: Mapping[str, Any], key: str) -> Any:
        return config.get(key, self.defaults.get(key))

    def _number(self, config: Mapping[str, Any], key: str, maximum: int = MAX_DIMENSION) -> int:
        value = config.get(key)
        if value is None:
            value = self.defaults.get(key)
        if type(value) is not int or not 0 < value <= maximum:
            raise UnsupportedModel(f"config.json: {key} is {value!r}, not a number between 1 and {maximum}")
        return value
