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

from kvsurgery.checkpoint.attention_rules import AttentionRules
from kvsurgery.checkpoint.role import Role
from kvsurgery.errors import UnsupportedModel
from kvsurgery.system.resources import PATCHES
from kvsurgery.templates.kv_layout import text_config

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
class Family(AttentionRules):
    """One model family; `name` is the `model_type` of its config, `classes` the model class of each auto class.

    `prefixes` may come before the names of tensors, the longest first; `text` are the families that its text model may
    be of, where it has one inside. Where attention is `replicated`, every process of tensor parallelism has all heads.
    `layers_beyond` is the config key that counts layers after the last one, which are copied. `no_reform` says why
    REFORM cannot read long prompts, where it cannot, and `no_measure` why heads cannot be measured. With
    `rope_by_type`, scaled RoPE is not that of sliding layers; with `rope_parameters_only`, no transformers 4 reads it.
    """

    name: str
    classes: Mapping[str, str]
    modeling: Modeling
    refusals: Mapping[str, str | Mapping[str, str]]
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
    def module(self) -> str:
        """Name of the emitted modeling module."""
        return f"modeling_kvsurgery_{self.name}"

    def is_beyond(self, layer: int | None, config: Mapping[str, Any]) -> bool:
        """Whether a layer follows the model's last one and is copied: it predicts further tokens.

        Raises:
            UnsupportedModel: the model has no such layer.
        """
        config = text_config(config)
        layers = self._number(config, "num_hidden_layers")
        if layer is None or layer < layers:
            return False
        extra_layers = self._value(config, self.layers_beyond) if self.layers_beyond else 0
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

    def _refuse(self, config: Mapping[str, Any]) -> None:
        if not config.get("is_causal", True):
            raise UnsupportedModel(f"config.json has is_causal {config['is_causal']!r}: {_NOT_CAUSAL}")
        for key, reason in self.refusals.items():
            value = config.get(key)
            if isinstance(reason, Mapping):  # of some values only
                reason = reason.get(str(value))
            if value and reason:
                raise UnsupportedModel(f"config.json has {key}: {reason}")

    def _with_text(self, config: Mapping[str, Any]) -> Family:
        """This family with all that is known of the heads of its text model, which has this config."""
        name = config.get("model_type")
        if name not in self.text:
            raise UnsupportedModel(
                f"the text model of a {self.name} must be one of {', '.join(self.text)}; text_config is of {name!r}"
            )
        text = load_family(name)
        text._refuse(config)
        copied_tensors = text.copy_model + self.copy_model
        return replace(
            text,
            name=self.name,
            classes=self.classes,
            modeling=self.modeling,
            copy_model=copied_tensors,
            prefixes=self.prefixes,
            text=self.text,
        )

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
    no_reform, no_measure = (patch.get(section, {}).get("refused") for section in ("reform", "measure"))
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


_NOT_CAUSAL = "there is no KV cache without causal attention"
_ALWAYS_REFUSED = {
    "quantization_config": "its weights are quantized; give the original 16- or 32-bit checkpoint",
    "use_bidirectional_attention": _NOT_CAUSAL,
}


def _shapes(table: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {part: tuple(shape) for part, shape in table.items()}


def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    patterns = (re.escape(name).replace(r"\*\*", ".+").replace(r"\*", "(?:0|[1-9][0-9]{0,6})") for name in names)
    return re.compile("|".join(patterns))
