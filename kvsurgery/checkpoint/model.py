"""`Model`: the family and the config of a checkpoint, and the facts that follow from both."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvsurgery.checkpoint.experts import EXPERTS
from kvsurgery.checkpoint.family import load_family, load_module, supported
from kvsurgery.checkpoint.headers import Tensor
from kvsurgery.checkpoint.model_attention import ModelAttention
from kvsurgery.checkpoint.patch import Experts, Module
from kvsurgery.checkpoint.patterns import matches
from kvsurgery.checkpoint.quantization import Quantization
from kvsurgery.checkpoint.role import Role
from kvsurgery.errors import UnsupportedModel
from kvsurgery.templates.kv_layout import text_config

MAX_COUNT = 1 << 12  # experts of a layer; larger numbers in a config are nonsense
LM_HEAD = "lm_head.weight"
EMBEDDINGS = "embed_tokens.weight", ".embeddings.weight"  # how names of an embedding end
OUTPUT_LAYER = "lm_head."
TIED = "tie_word_embeddings"


@dataclass(frozen=True, eq=False)
class Model(ModelAttention):
    """A stock model: its attention, the tensors of its checkpoint, and their quantization, if any."""

    quantization: Quantization | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Model:
        """The model of a stock config.

        Raises:
            UnsupportedModel: no patch for this `model_type`, an already converted model, or a trait that surgery
                does not cover, such as an unknown layout of quantized weights.
        """
        text = text_config(config)
        name = config.get("model_type")
        if name not in supported():
            raise UnsupportedModel(f"model_type {name!r} {_unsupported(text)}")
        if "kv_surgery" in config:
            raise UnsupportedModel("this checkpoint is already converted; give the original, or `kvsurgery revert` it")
        family = load_family(name)
        architectures = config.get("architectures") or list(family.classes.values())
        if not isinstance(architectures, list) or any(name not in family.classes.values() for name in architectures):
            raise UnsupportedModel(
                f"architectures {architectures} is not supported; a {name} checkpoint must be one of "
                f"{', '.join(dict.fromkeys(family.classes.values()))}"
            )
        family.refuse(config)
        return cls(family.with_text(text) if family.text else family, config, Quantization.of(config))

    def role(self, tensor: Tensor) -> Role:
        """The role of a tensor.

        Raises:
            UnsupportedModel: the model has no tensor of this name.
        """
        if self.quantization is None:
            return self.family.role(tensor.name)
        return self.quantization.role(self.family, tensor)

    def plain_weight(self, tensor: Tensor) -> tuple[str, tuple[int, ...]]:
        """The name and the shape of the weight that a tensor holds, quantized or not."""
        if self.quantization is None:
            return tensor.name, tensor.shape
        return self.quantization.plain_weight(tensor, self.hidden)

    def is_beyond(self, layer: int | None) -> bool:
        """Whether a layer lies beyond the model's last one (multi-token prediction); such a layer is copied.

        Raises:
            UnsupportedModel: the model has no such layer.
        """
        layers = self._number("num_hidden_layers")
        if layer is None or layer < layers:
            return False
        beyond = self.family.copied.layers_beyond
        extra_layers = self._value(beyond) if beyond else 0
        if type(extra_layers) is not int or layer >= layers + extra_layers:
            raise UnsupportedModel(f"tensors of layer {layer} lie beyond the {layers} layers of config.json")
        return True

    @property
    def is_tied(self) -> bool:
        """Whether the stock class uses the embedding as the output layer if none is stored."""
        tied = self._value(TIED)
        if not self.family.text:
            return bool(tied)
        # transformers 5 reads the config around that of the text model, transformers 4 the latter
        outer_tied = self.config.get(TIED, self.family.outer_defaults.get(TIED))
        return bool(outer_tied or (tied and self.family.modeling.oldest is None))

    @property
    def has_output(self) -> bool:
        """Whether the stock class has an output layer, of its own or of the embedding."""
        model, *_, generator = self.family.classes.values()
        [architecture, *_] = self.config.get("architectures") or [generator]
        return architecture != model or model == generator

    def missing(self, tensors: Iterable[str]) -> Iterator[str]:
        """Names of missing tensors, which the stock class would initialize at random, given the names that exist.

        Raises:
            UnsupportedModel: a tensor is unknown, or a number in the config is not plausible.
        """
        names = tensors if self.quantization is None else self.quantization.plain_names(self.family, tensors)
        roles = {name: self.family.role(name) for name in names}
        parts = {(role.layer, role.part) for role in roles.values()}
        prefix = next((name.partition("layers.")[0] for name, role in roles.items() if role.layer is not None), "")
        outer_prefix = next(filter(prefix.startswith, ("language_model.", "model.")), "")
        for part in self._missing_text(parts):
            own_prefix = outer_prefix.removeprefix("model.") if part.startswith(OUTPUT_LAYER) else prefix
            yield own_prefix + part
        for start, section, kind in self._modules():
            module = load_module(kind)
            if module is not None:
                names = {part.removeprefix(start) for layer, part in parts if layer is None and part.startswith(start)}
                absent = missing_beside(module, section, names)
                yield from (f"{outer_prefix.removeprefix('language_model.')}{start}{name}" for name in absent)

    @property
    def unknown_modules(self) -> dict[str, str]:
        """By prefix, the types of towers and projectors whose missing tensors `missing` cannot name."""
        return {start: kind for start, _, kind in self._modules() if load_module(kind) is None}

    def _modules(self) -> Iterator[tuple[str, Mapping[str, Any], str]]:
        """The prefix, config and type of each tower and projector."""
        for start, place in self.family.beside.items():
            section = self.config.get(place["section"]) if "section" in place else self.config
            if isinstance(section, Mapping):
                yield start, section, place.get("module") or str(section.get("model_type", place["default"]))

    def _missing_text(self, parts: Collection[tuple[int | None, str]]) -> Iterator[str]:
        """Missing tensors of the text model, without prefix; `parts` are the layers and names of existing tensors."""
        family = self.family
        for layer in range(self._number("num_hidden_layers")):
            for part in (*family.permute, *family.optional, *family.copied.layer):
                if self._in_layer(part, layer):
                    yield from (f"layers.{layer}.{name}" for name in self._absent(part, layer, parts))
        for part in family.copied.model:
            is_absent = part.startswith(OUTPUT_LAYER) and (not self.has_output or (part == LM_HEAD and self.is_tied))
            if self._applies(part) and not is_absent:
                yield from self._absent(part, None, parts)

    def _absent(self, part: str, layer: int | None, parts: Collection[tuple[int | None, str]]) -> list[str]:
        """The missing names of a tensor, or of the tensors that may replace it."""
        absent = [name for name in self._numbered(part) if (layer, name) not in parts]
        if not absent or part not in self.family.instead:
            return absent
        others = [name for pattern in self.family.instead[part] for name in self._numbered(pattern)]
        absent_others = [name for name in others if (layer, name) not in parts]
        alternatives = (pattern.replace("*", "0") for patterns in self.family.instead.values() for pattern in patterns)
        return absent_others if any((layer, name) in parts for name in alternatives) else absent

    def _numbered(self, pattern: str) -> list[str]:
        """The names of a pattern with numbers for `*`; none for `**`, because its number of names is unknown."""
        if "**" in pattern:
            return []
        if "*" not in pattern:
            return [pattern]
        key, _, less = self.family.numbers[pattern.partition(".*.")[0]].partition(" - ")
        count = self._number(self._spelling(key), MAX_COUNT) - int(less or 0)
        return [pattern.replace("*", str(number)) for number in range(count)]

    def _in_layer(self, part: str, layer: int) -> bool:
        """Whether the stock class has this tensor in a layer."""
        if not self._applies(part) or not self.has_part(part, layer):
            return False
        if self.family.experts is None:
            return True
        if matches(part, self.family.experts.tensors):
            return self._has_experts(layer)
        return not (matches(part, self.family.experts.dense) and self._has_experts(layer))

    def _applies(self, part: str) -> bool:
        """Whether the config requires a tensor that only some models have."""
        keys = [key for key, patterns in self.family.when.items() if matches(part, patterns)]
        return all(self._value(key) for key in keys) if keys else part not in self.family.optional

    def _has_experts(self, layer: int) -> bool:
        rules = self.family.experts or Experts()
        if rules.enabled_by and not self._value(self._spelling(rules.enabled_by)):
            return False
        if rules.types and self._value(rules.types) is not None:
            types = self._list(rules.types)
            layers = self._number("num_hidden_layers")
            if len(types) != layers or any(kind not in ("sparse", "dense") for kind in types):
                raise UnsupportedModel(f"config.json: {rules.types} must be {layers} times sparse or dense")
            return types[layer] == "sparse"
        if rules.dense_layers and layer in self._list(rules.dense_layers):
            return False
        if rules.layers and self._value(rules.layers) is not None:
            return layer in self._list(rules.layers)
        first_layer = self._value(rules.from_layer) if isinstance(rules.from_layer, str) else rules.from_layer or 0
        if type(first_layer) is not int:
            raise UnsupportedModel(f"config.json: {rules.from_layer} is {first_layer!r}, not a number of layers")
        return layer >= first_layer and (not rules.every or (layer + 1) % self._number(rules.every) == 0)

    def _list(self, key: str) -> list[Any]:
        value = self._value(key) or []
        if not isinstance(value, list):
            raise UnsupportedModel(f"config.json: {key} is {value!r}, not a list of layers")
        return value

    def _spelling(self, key: str) -> str:
        """The spelling of a key in the config; transformers 5 has one name for experts in all families."""
        others = EXPERTS if key in EXPERTS else ()
        return next((name for name in (key, *others) if name in self.text), key)


def missing_beside(module: Module, config: Mapping[str, Any], names: Collection[str]) -> Iterator[str]:
    """Names of missing tensors of a tower or a projector with this config, which would be initialized at random."""
    settings = {**module.defaults, **config}
    required = [*module.model]
    if module.number:
        count = settings.get(module.number)
        count = len(count) if isinstance(count, list) else count
        if type(count) is not int or not 0 <= count <= MAX_COUNT:
            raise UnsupportedModel(f"config.json: {module.number} is {count!r}, not a number of layers")
        required += (f"{module.layers}.{layer}.{name}" for layer in range(count) for name in module.layer)
    unset = [pattern for key, patterns in module.when.items() if not settings.get(key) for pattern in patterns]
    has_prefix = bool(module.optional_prefix) and any(name.startswith(module.optional_prefix) for name in names)
    prefix = module.optional_prefix if has_prefix else ""
    yield from (prefix + name for name in required if not matches(name, unset) and prefix + name not in names)


def unsupported_heads(config: Mapping[str, Any]) -> str | None:
    """Why no patch can describe the heads of a text model with this config, as text that follows its name."""
    if config.get("kv_lora_rank"):
        return "caches one latent for all heads (MLA), so no KV head can keep less than another"
    if any(name.startswith("index") and name.endswith(("topk", "topk_blocks", "budget")) for name in config):
        return "selects the tokens that a query sees by an indexer, whose keys the emitted cache does not hold"
    if config.get("v_head_dim") not in (None, config.get("head_dim")):
        return "has values of another size than keys (v_head_dim), and the emitted cache holds both in one size"
    counts = config.get("num_attention_heads_per_layer")
    in_some_layers = config.get("num_sliding_attention_heads") or config.get("attention_other_setting")
    if in_some_layers or (isinstance(counts, list) and counts != counts[:1] * len(counts)):
        return "has another number of query heads in some layers, which a patch cannot say yet"
    return None


def _unsupported(config: Mapping[str, Any]) -> str:
    """The reason why a family has no patch, as text that follows its name; `config` is that of the text model."""
    return unsupported_heads(config) or f"is not supported; supported: {', '.join(supported())}"
