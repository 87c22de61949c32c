"""`Family`: one model family, read from its file in `patches/`.

A patch says what the family's config assumes for keys left out, which layers have a sliding window of their own, which
config traits surgery does not cover, and the role of every tensor. In `[permute]` a tensor's shape is spelt with the
letters of the heads along it: `["q", "hidden"]` has the query heads as rows, `["hidden", "q"]` as columns, and
`["qkv", "hidden"]` all heads one after the other; `query_heads` is one number for each query head, and `gated_queries`
each query head's rows and as many of its gate. `*` in a name stands for a number, `**` for anything. In `[windows]`,
`kind` is what `layer_types` calls layers without full attention, `size` the key of their window, and `layers` that of a
list with a number for each layer, 0 where it has full attention. `[full_attention]` has the config keys of dimensions
that layers with full attention have of their own, and of the switch for layers without `v_proj`, whose values are made
from the projected keys. `[parallel]` says where transformers' tensor parallelism does not split the heads, `[reform]`
why REFORM does not cover a family, `[measure]` why its heads cannot be measured. `[rope]` says whether layer types have
RoPE of their own, and whether `rope_parameters` is their only spelling, `[sharing]` which config key counts the last
layers that share the KV cache of earlier ones, `[modeling]` is what the emitted code says of the family.

The patch of a model that reads images says in `[text]` which families its text model may be of, and under which names
its tensors lie; all that concerns heads is then that family's, and read from `text_config`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from kvsurgery.checkpoint.role import Role
from kvsurgery.dimensions import ModelDimensions, ModelLayers
from kvsurgery.errors import UnsupportedModel
from kvsurgery.resources import PATCHES
from kvsurgery.templates.kv_layout import LINEAR, text_config

# larger numbers in a config are nonsense, and would make lists of that length
MAX_DIMENSION = 1 << 20
MAX_POSITIONS = 1 << 30  # Llama 4 Scout has ten million
# a row of o_proj has to fit a window of the engine
MAX_WIDTH = 1 << 17
LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,6})\.(.+)", re.DOTALL)


@dataclass(frozen=True)
class Modeling:
    """What the emitted modeling code says of a family, beside the names of its classes.

    Attributes:
        title: the family's name, as people write it.
        module: the package of `transformers.models` that has its classes.
        base_model_prefix: the prefix of the weights' names, where transformers 4 assumes another.
        weights: emitted classes whose weights transformers 5 converts at load, and the stock class or `model_type`
            whose conversion applies to them.
        image_inputs: arguments of `generate` that become embeddings in the prompt.
        oldest: the first major version of transformers that runs the emitted code, where it is not 4.
    """

    title: str
    module: str
    base_model_prefix: str | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    image_inputs: tuple[str, ...] = ()
    oldest: int | None = None


@dataclass(frozen=True)
class Family:
    """One model family; `name` is the `model_type` of its config, `classes` the model class of each auto class.

    `prefixes` may come before the names of tensors, the longest first; `text` are the families that its text model may
    be of, where it has one inside. Where attention is `replicated`, every process of tensor parallelism has all heads.
    `layers_beyond` is the config key that counts layers after the last one, which are copied. `no_reform` says why
    REFORM cannot read long prompts, where it cannot, and `no_measure` why heads cannot be measured. With
    `rope_by_type`, scaled RoPE is not that of sliding layers; with `rope_parameters_only`, no transformers 4 reads it.
    `sharing` is the config key that counts the layers without a KV cache of their own.
    """

    name: str
    classes: Mapping[str, str]
    modeling: Modeling
    defaults: Mapping[str, Any]
    refusals: Mapping[str, str | Mapping[str, str]]
    window: Mapping[str, Any] | None
    full_attention: Mapping[str, str]
    permute: Mapping[str, tuple[str, ...]]
    optional: Mapping[str, tuple[str, ...]]
    copy_layer: tuple[str, ...]
    copy_model: tuple[str, ...]
    layers_beyond: str | None
    prefixes: tuple[str, ...]
    text: tuple[str, ...]
    replicated: bool
    no_reform: str | None
    no_measure: str | None
    rope_by_type: bool
    rope_parameters_only: bool
    sharing: str | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Family:
        """The family of a stock config.

        Raises:
            UnsupportedModel: no patch for this `model_type`, an already converted model, or a trait that surgery
                does not cover, such as quantized weights.
        """
        name = config.get("model_type")
        if name not in supported():
            raise UnsupportedModel(f"model_type {name!r} {_unsupported(text_config(config))}")
        if "kv_surgery" in config:
            raise UnsupportedModel("this checkpoint is already converted; give the original, or `kvsurgery revert` it")
        family = load_family(name)
        architectures = config.get("architectures") or list(family.classes.values())
        if not isinstance(architectures, list) or any(name not in family.classes.values() for name in architectures):
            raise UnsupportedModel(
                f"architectures {architectures} is not supported; a {name} checkpoint must be one of "
                f"{', '.join(dict.fromkeys(family.classes.values()))}"
            )
        family._refuse(config)
        return family._with_text(text_config(config)) if family.text else family

    @property
    def has_linear_layers(self) -> bool:
        """Whether the layers without full attention have linear attention."""
        return self.window is not None and self.window.get("kind") == LINEAR

    @property
    def has_chunked_layers(self) -> bool:
        """Whether the layers without full attention have chunked attention."""
        return self.window is not None and self.window.get("kind") == "chunked_attention"

    @property
    def module(self) -> str:
        """Name of the emitted modeling module."""
        return f"modeling_kvsurgery_{self.name}"

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
        `k_proj`.
        """
        config = text_config(config)
        if layer in self.sources(config) and part.startswith(("self_attn.k_proj.", "self_attn.v_proj.")):
            return False
        switch = self.full_attention.get("keys_are_values")
        if switch is None or not part.startswith("self_attn.v_proj.") or not self._value(config, switch):
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
            raise UnsupportedModel(f"config.json: {query_heads} query heads of {head_dim} are not a sensible width")
        return ModelDimensions(layers, query_heads, kv_heads, head_dim)

    def hidden(self, config: Mapping[str, Any]) -> int:
        """Width of the hidden state."""
        return self._number(text_config(config), "hidden_size")

    def is_beyond(self, layer: int | None, config: Mapping[str, Any]) -> bool:
        """Whether a layer follows the model's last one and is copied: it predicts further tokens.

        Raises:
            UnsupportedModel: the model has no such layer.
        """
        config = text_config(config)
        layers = self._number(config, "num_hidden_layers")
        if layer is None or layer < layers:
            return False
        beyond = self._value(config, self.layers_beyond) if self.layers_beyond else 0
        if type(beyond) is not int or layer >= layers + beyond:
            raise UnsupportedModel(f"tensors of layer {layer} lie beyond the {layers} layers of config.json")
        return True

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
        first = len(sliding) - count
        last = {slides: layer for layer, slides in enumerate(sliding[:first])}
        if not last.keys() >= set(sliding):
            raise UnsupportedModel(f"config.json: {self.sharing} is {count}, which leaves a kind of layers no KV cache")
        return {layer: last[sliding[layer]] for layer in range(first, len(sliding))}

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

    def role(self, tensor: str) -> Role:
        """The role of a tensor.

        Raises:
            UnsupportedModel: the family has no tensor of this name.
        """
        name = next((tensor.removeprefix(prefix) for prefix in self.prefixes if tensor.startswith(prefix)), tensor)
        match = LAYER.fullmatch(name)
        if match:
            layer, part = int(match[1]), match[2]
            for shapes in (self.permute, self.optional):
                if part in shapes:
                    return Role(layer, part, shapes[part], required=shapes is self.permute)
            if self._copied_in_layer.fullmatch(part):
                return Role(layer, part)
        elif self._copied_in_model.fullmatch(name):
            return Role(None, name)
        raise UnsupportedModel(f"tensor {tensor!r} is not known in family {self.name}; conversion would be a guess")

    def _refuse(self, config: Mapping[str, Any]) -> None:
        for key, reason in self.refusals.items():
            value = config.get(key)
            if isinstance(reason, Mapping):  # of some values only
                reason = reason.get(str(value))
            if value and reason:
                raise UnsupportedModel(f"config.json has {key}: {reason}")

    def _of_full_attention(self, config: Mapping[str, Any]) -> dict[str, int]:
        """The dimensions that layers with full attention have of their own.

        They lie under keys of the family, or in `per_layer_config`, which transformers 5 writes in their place.
        """
        if not self.full_attention:
            return {}
        if "per_layer_config" not in config:
            keys = {"head_dim": self.full_attention["head_dim"]}
            if self._value(config, self.full_attention["keys_are_values"]):
                keys["num_key_value_heads"] = self.full_attention["num_key_value_heads"]
            own = {name: self._value(config, key) for name, key in keys.items()}
            return {name: value for name, value in own.items() if value is not None}
        layers = {} if config["per_layer_config"] is None else config["per_layer_config"]  # null: all are alike
        names = "head_dim", "num_key_value_heads"
        whole = {name: self._number(config, name) for name in names}
        windows = self.windows(config)
        try:
            given = {int(layer): {**whole, **own} for layer, own in layers.items()}
            shapes = [given.pop(layer, whole) for layer in range(len(windows))]
        except (AttributeError, TypeError, ValueError):
            given, shapes = {}, [{}]
        full, sliding = (
            [shape for shape, window in zip(shapes, windows, strict=False) if (window is None) == is_full]
            for is_full in (True, False)
        )
        if given or any(shape.keys() != {*names} for shape in shapes):
            raise UnsupportedModel(f"config.json: per_layer_config must give layers {' and '.join(names)} only")
        if any(shape != full[0] for shape in full) or any(shape != whole for shape in sliding):
            raise UnsupportedModel("config.json: per_layer_config gives layers of one kind heads of several shapes")
        return full[0] if full else {}

    def _with_text(self, config: Mapping[str, Any]) -> Family:
        """This family with all that is known of the heads of its text model, which has this config."""
        name = config.get("model_type")
        if name not in self.text:
            raise UnsupportedModel(
                f"the text model of a {self.name} must be one of {', '.join(self.text)}; text_config is of {name!r}"
            )
        text = load_family(name)
        text._refuse(config)
        copied = text.copy_model + self.copy_model
        return replace(
            text,
            name=self.name,
            classes=self.classes,
            modeling=self.modeling,
            copy_model=copied,
            prefixes=self.prefixes,
            text=self.text,
        )

    def _sliding_layers(self, config: Mapping[str, Any]) -> tuple[list[bool], Any]:
        """Whether each layer has no full attention, and the window or the chunk of those that have none; 0 is linear
        attention."""
        layers, window = self._number(config, "num_hidden_layers"), self.window
        if window is None:
            return [False] * layers, None
        enabled = "enabled_by" not in window or self._value(config, window["enabled_by"])
        size = self._value(config, self._window_size) if enabled else None
        if self.has_linear_layers:
            size = 0
        types = config.get("layer_types") if window.get("layer_types") else None
        if types is None and size is not None and window.get("layer_types") == "required":
            raise UnsupportedModel("config.json has a sliding window; add layer_types, which say where it applies")
        if types is not None:
            known = ("full_attention", window.get("kind", "sliding_attention"))
            if not isinstance(types, list) or len(types) != layers or any(item not in known for item in types):
                raise UnsupportedModel(f"config.json: layer_types must be {layers} times {' or '.join(known)}")
            # stock code takes the last layer of a family with two kinds of heads for one with full attention
            kinds = [*types[:-1], "full_attention"] if self.full_attention else types
            return [item != "full_attention" for item in kinds], size
        if size is None:
            return [False] * layers, size
        flags = self._value(config, window["layers"]) if "layers" in window else None
        if flags:
            if not isinstance(flags, list) or len(flags) < layers:
                raise UnsupportedModel(
                    f"config.json: {window['layers']} must have a number for each of {layers} layers"
                )
            return [bool(flag) for flag in flags[:layers]], size
        first = self._value(config, window["from_layer"]) if "from_layer" in window else 0
        every = window.get("full_every")
        if isinstance(every, str):
            every = self._number(config, every)
        if type(first) is not int:
            raise UnsupportedModel(f"config.json: {window['from_layer']} is {first!r}, not a number of layers")
        sliding = [layer >= first and (every is None or (layer + 1) % every != 0) for layer in range(layers)]
        return [*sliding[:-1], False] if self.full_attention else sliding, size

    @property
    def _window_size(self) -> str:
        """What a config calls the size of windows or chunks."""
        return (self.window or {}).get("size", "sliding_window")

    def _value(self, config: Mapping[str, Any], key: str) -> Any:
        return config.get(key, self.defaults.get(key))

    def _number(self, config: Mapping[str, Any], key: str, most: int = MAX_DIMENSION) -> int:
        value = config.get(key)
        if value is None:
            value = self.defaults.get(key)
        if type(value) is not int or not 0 < value <= most:
            raise UnsupportedModel(f"config.json: {key} is {value!r}, not a number between 1 and {most}")
        return value

    @cached_property
    def _copied_in_layer(self) -> re.Pattern[str]:
        return _any_of(self.copy_layer)

    @cached_property
    def _copied_in_model(self) -> re.Pattern[str]:
        return _any_of(self.copy_model)


@cache
def supported() -> tuple[str, ...]:
    """The supported values of `model_type`."""
    return tuple(sorted(path.stem for path in PATCHES.glob("*.toml")))


def _unsupported(config: Mapping[str, Any]) -> str:
    """Why there is no patch, after the name of a family; `config` is that of the text model."""
    if config.get("kv_lora_rank"):
        return "caches one latent for all heads (MLA), so no KV head can keep less than another"
    return f"is not supported; supported: {', '.join(supported())}"


@cache
def load_family(name: str) -> Family:
    """The family of a patch, by its `model_type`."""
    path = PATCHES / f"{name}.toml"
    patch = tomllib.loads(path.read_text(encoding="utf-8"))
    text = patch.get("text", {})
    title = patch["modeling"]["title"]
    no_reform, no_measure = (patch.get(room, {}).get("refused") for room in ("reform", "measure"))
    return Family(
        name=name,
        classes=patch["classes"],
        modeling=Modeling(**({"module": name} | patch["modeling"])),
        defaults=patch.get("defaults", {}),
        refusals={**_ALWAYS_REFUSED, **patch.get("refuse", {})},
        window=patch.get("windows"),
        full_attention=patch.get("full_attention", {}),
        permute=_shapes(patch.get("permute", {})),
        optional=_shapes(patch.get("permute_if_present", {})),
        copy_layer=tuple(patch["copy"].get("layer", ())),
        copy_model=tuple(patch["copy"]["model"]),
        layers_beyond=patch["copy"].get("layers_beyond"),
        prefixes=tuple(text.get("prefixes", ("model.",))),
        text=tuple(text.get("families", ())),
        replicated=patch.get("parallel", {}).get("attention") == "replicated",
        rope_by_type=patch.get("rope", {}).get("by_layer_type", False),
        rope_parameters_only=patch.get("rope", {}).get("parameters_only", False),
        sharing=patch.get("sharing", {}).get("layers"),
        no_reform=f"REFORM does not cover {title}: {no_reform}" if no_reform else None,
        no_measure=f"the heads of {title} cannot be measured: {no_measure}" if no_measure else None,
    )


_ALWAYS_REFUSED = {"quantization_config": "its weights are quantized; give the original 16- or 32-bit checkpoint"}


def _shapes(table: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {part: tuple(shape) for part, shape in table.items()}


def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    patterns = (re.escape(name).replace(r"\*\*", ".+").replace(r"\*", "(?:0|[1-9][0-9]{0,6})") for name in names)
    return re.compile("|".join(patterns))
