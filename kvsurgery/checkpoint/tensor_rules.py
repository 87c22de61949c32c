"""`TensorRules`: the tensors of a family's checkpoints, each with its role, and which of them a config asks for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from kvsurgery.checkpoint.attention_rules import AttentionRules
from kvsurgery.checkpoint.experts import EXPERTS
from kvsurgery.checkpoint.patch import Copied, Experts, Module
from kvsurgery.checkpoint.role import Role
from kvsurgery.errors import UnsupportedModel
from kvsurgery.templates.kv_layout import text_config

LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,6})\.(.+)", re.DOTALL)
MAX_COUNT = 1 << 12  # experts of a layer; larger numbers in a config are nonsense
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class TensorRules(AttentionRules):
    """Which tensors a checkpoint of a family has.

    Attributes:
        name: the `model_type` of the family's config.
        permute: shapes of tensors with heads; those of `optional` only some checkpoints have.
        copied: tensors that are copied.
        when: by config key, patterns of the tensors that a model has only if its value is true.
        experts: which layers have experts, None where that does not decide which tensors they have.
        instead: by tensor, those that a checkpoint may have in its place, `*` for each expert.
        numbers: by the beginning of a name with `*`, the config key of their number.
        prefixes: these may come before the names, the longest first.
    """

    name: str
    permute: Mapping[str, tuple[str, ...]]
    optional: Mapping[str, tuple[str, ...]]
    copied: Copied
    when: Mapping[str, tuple[str, ...]]
    experts: Experts | None
    instead: Mapping[str, tuple[str, ...]]
    numbers: Mapping[str, str]
    prefixes: tuple[str, ...]

    def is_beyond(self, layer: int | None, config: Mapping[str, Any]) -> bool:
        """Whether a layer follows the model's last one and is copied: it predicts further tokens.

        Raises:
            UnsupportedModel: the model has no such layer.
        """
        config = text_config(config)
        layers = self._number(config, "num_hidden_layers")
        if layer is None or layer < layers:
            return False
        beyond = self.copied.layers_beyond
        extra_layers = self._value(config, beyond) if beyond else 0
        if type(extra_layers) is not int or layer >= layers + extra_layers:
            raise UnsupportedModel(f"tensors of layer {layer} lie beyond the {layers} layers of config.json")
        return True

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
                    return Role(layer, part, shapes[part])
            if self._copied_in_layer.fullmatch(part):
                return Role(layer, part)
        elif self._copied_in_model.fullmatch(name):
            return Role(None, name)
        raise UnsupportedModel(f"tensor {tensor!r} is not known in family {self.name}; conversion would be a guess")

    def missing_text(
        self, config: Mapping[str, Any], parts: Collection[tuple[int | None, str]], has_output: bool
    ) -> Iterator[str]:
        """Names, without prefix, of the tensors that the stock class would initialize at random in the text model.

        Args:
            config: config.json.
            parts: layer and name inside it of every tensor that is there.
            has_output: whether the stock class has an output layer of its own.

        Raises:
            UnsupportedModel: a number in the config is no sensible one.
        """
        text = text_config(config)
        for layer in range(self._number(text, "num_hidden_layers")):
            for part in (*self.permute, *self.optional, *self.copied.layer):
                if self._in_layer(part, layer, text):
                    yield from (f"layers.{layer}.{name}" for name in self._absent(part, layer, text, parts))
        for part in self.copied.model:
            if self._applies(part, text) and (part != LM_HEAD or has_output):
                yield from self._absent(part, None, text, parts)

    def _absent(
        self, part: str, layer: int | None, config: Mapping[str, Any], parts: Collection[tuple[int | None, str]]
    ) -> list[str]:
        """What is missing of a tensor, or of those that may be there in its place."""
        absent = [name for name in self._numbered(part, config) if (layer, name) not in parts]
        if not absent or part not in self.instead:
            return absent
        others = [name for pattern in self.instead[part] for name in self._numbered(pattern, config)]
        absent_others = [name for name in others if (layer, name) not in parts]
        alternatives = (pattern.replace("*", "0") for patterns in self.instead.values() for pattern in patterns)
        return absent_others if any((layer, name) in parts for name in alternatives) else absent

    def _numbered(self, pattern: str, config: Mapping[str, Any]) -> list[str]:
        """The names of a pattern with a number for `*`; none for `**`, since a pattern does not say how many."""
        if "**" in pattern:
            return []
        if "*" not in pattern:
            return [pattern]
        key, _, less = self.numbers[pattern.partition(".*.")[0]].partition(" - ")
        count = self._number(config, _spelling(key, config), MAX_COUNT) - int(less or 0)
        return [pattern.replace("*", str(number)) for number in range(count)]

    def _in_layer(self, part: str, layer: int, config: Mapping[str, Any]) -> bool:
        """Whether the stock class has this tensor in a layer."""
        if not self._applies(part, config) or not self.has_part(part, layer, config):
            return False
        if self.experts is None:
            return True
        if _matches(part, self.experts.tensors):
            return self._has_experts(layer, config)
        return not (_matches(part, self.experts.dense) and self._has_experts(layer, config))

    def _applies(self, part: str, config: Mapping[str, Any]) -> bool:
        """Whether the config asks for a tensor that only some models have."""
        keys = [key for key, patterns in self.when.items() if _matches(part, patterns)]
        return all(self._value(config, key) for key in keys) if keys else part not in self.optional

    def _has_experts(self, layer: int, config: Mapping[str, Any]) -> bool:
        rules = self.experts or Experts()
        if rules.enabled_by and not self._value(config, _spelling(rules.enabled_by, config)):
            return False
        if rules.dense_layers and layer in self._list(config, rules.dense_layers):
            return False
        if rules.layers and self._value(config, rules.layers) is not None:
            return layer in self._list(config, rules.layers)
        first_layer = self._value(config, rules.from_layer) if rules.from_layer else 0
        if type(first_layer) is not int:
            raise UnsupportedModel(f"config.json: {rules.from_layer} is {first_layer!r}, not a number of layers")
        return layer >= first_layer and (not rules.every or (layer + 1) % self._number(config, rules.every) == 0)

    def _list(self, config: Mapping[str, Any], key: str) -> list[Any]:
        value = self._value(config, key) or []
        if not isinstance(value, list):
            raise UnsupportedModel(f"config.json: {key} is {value!r}, not a list of layers")
        return value

    @cached_property
    def _copied_in_layer(self) -> re.Pattern[str]:
        parts = (name for names in self.instead.values() for name in names)
        return _any_of((*self.copied.layer, *self.copied.unread, *parts))

    @cached_property
    def _copied_in_model(self) -> re.Pattern[str]:
        return _any_of(self.copied.model)


def missing_beside(module: Module, config: Mapping[str, Any], names: Collection[str]) -> Iterator[str]:
    """Names of the tensors that a tower or a projector with this config would initialize at random."""
    settings = {**module.defaults, **config}
    required = [*module.model]
    if module.number:
        count = settings.get(module.number)
        if type(count) is not int or not 0 <= count <= MAX_COUNT:
            raise UnsupportedModel(f"config.json: {module.number} is {count!r}, not a number of layers")
        required += (f"{module.layers}.{layer}.{name}" for layer in range(count) for name in module.layer)
    unset = [pattern for key, patterns in module.when.items() if not settings.get(key) for pattern in patterns]
    has_prefix = bool(module.optional_prefix) and any(name.startswith(module.optional_prefix) for name in names)
    prefix = module.optional_prefix if has_prefix else ""
    yield from (prefix + name for name in required if not _matches(name, unset) and prefix + name not in names)


def _spelling(key: str, config: Mapping[str, Any]) -> str:
    """The key by which a config has what this one is; transformers 5 has one name for experts in all families."""
    others = EXPERTS if key in EXPERTS else ()
    return next((name for name in (key, *others) if name in config), key)


def _matches(part: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(part, pattern) for pattern in patterns)


def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    patterns = (re.escape(name).replace(r"\*\*", ".+").replace(r"\*", "(?:0|[1-9][0-9]{0,6})") for name in names)
    return re.compile("|".join(patterns))
