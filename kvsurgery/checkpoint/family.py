"""`Family`: one model family, read from its file in `patches/`.

A patch gives the defaults of config keys, the layers with a sliding window of their own, the config traits that surgery
does not cover, and the role of every tensor. `permute` names sets of tensors with heads. `shared/permutations.toml`
lists these sets with the shapes of their tensors, in letters for the heads along each axis: `["q", "hidden"]` has the
query heads as rows, `["hidden", "q"]` as columns, and `["qkv", "hidden"]` all heads one after another. `query_heads` is
one number for each query head, and `gated_queries` has the rows of each query head and as many rows of its gate.
`*` in a name stands for a number, `**` for anything, and `a.{x,y}` for the two names `a.x` and `a.y`.

Every tensor that a patch lists must be in a checkpoint. Each layer has the tensors of layers, and the config key in
`[numbers]` gives the count for a `*`. Exceptions are `lm_head.weight` if embeddings are tied, names with `**`, those of
`unread` in `[copy]`, and those of `permute_if_present`, unless `[when]` lists them: by config key, patterns of the
tensors that a model has if the key's value is true. `[only]` lists, by what `layer_types` calls layers, patterns of the
tensors that no other layers have. `[experts]` gives the layers with experts, and the tensors that only layers with
experts, or only layers without them, have. `[instead]` lists tensors that may replace another one.

In `[windows]`, `kind` is what `layer_types` calls layers without full attention, `size` the key of their window, and
`layers` that of a list with a number for each layer, 0 where it has full attention. `[layers]` names the config keys
that list the kinds of layers in place of `layer_types`. `[states]` gives the sizes of the states that layers have in
place of a KV cache. `[full_attention]` has the config keys of dimensions that layers with full attention have of their
own, and of the switch for layers without `v_proj`, whose values are made from the projected keys. `[parallel]` says
where transformers' tensor parallelism does not split the heads, `[reform]` why REFORM does not cover a family. `[rope]`
says whether layer types have RoPE of their own, and whether `rope_parameters` is their only spelling, `[sharing]` which
config key counts the last layers that share the KV cache of earlier ones, `[modeling]` is what the emitted code says of
the family. Its `attention` is what layers call their attention, if not `self_attn`, and `prefixes` are those that may
come before the names of tensors, if not `model.` alone.

In the patch of a model that reads images, `[text]` gives the possible families of its text model, and the prefixes of
its tensors; everything about heads then comes from this family, and is read from `text_config`. A text model that
exists only inside this model has no patch: one with `permute` describes it too. `[beside]` names the files in
`modules/` that list the tensors of its towers and projectors.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from kvsurgery.checkpoint.patch import (
    CHUNKED_ATTENTION,
    Copied,
    Experts,
    FullAttention,
    Layers,
    Modeling,
    Module,
    Patch,
    States,
    Table,
    Windows,
    permuted,
    with_braces_expanded,
)
from kvsurgery.checkpoint.role import Role
from kvsurgery.errors import PolicyError, UnsupportedModel
from kvsurgery.system.resources import PATCHES
from kvsurgery.system.typed_toml import read_table

LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,6})\.(.+)", re.DOTALL)
MODULES = PATCHES / "modules"
QUOTE = "'"  # for the backticks of settings, which the command line shows as options

Kind = TypeVar("Kind", bound=Table)


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: the `model_type` of its config.
        classes: the model class of each auto class, the one with an output layer last.
        modeling: facts about the family for the emitted code.
        refusals: by config key, the reason why surgery does not cover it.
        defaults: the config class's defaults for keys that a config leaves out.
        layers: the table `[layers]` of its file, about kinds of layers that `layer_types` does not list.
        window: the table `[windows]` of its file, about layers without full attention.
        full_attention: the table `[full_attention]`; None if all layers have the same number and size of heads.
        sharing: the config key for the number of layers without a KV cache of their own.
        permute: shapes of tensors with heads; only some checkpoints have those of `optional`.
        copied: tensors that are copied.
        when: by config key, patterns of the tensors that a model has only if the key's value is true.
        only: by kind of layers, patterns of the tensors that no other layers have.
        states: sizes of the states of layers without a KV cache; None if there are no such layers.
        experts: the layers with experts; None if that does not decide which tensors a layer has.
        instead: by tensor, the tensors that may replace it in a checkpoint, with `*` for each expert.
        numbers: by the beginning of a name with `*`, the config key of the count.
        prefixes: prefixes that may come before the names, the longest first.
        text: the possible families of its text model, if it has one inside.
        outer_defaults: as `defaults`, for the config around that of the text model.
        beside: by prefix, the towers and projectors beside the text model.
        replicated: whether every process of tensor parallelism has all heads.
        no_reform: the reason why REFORM cannot read long prompts, if it cannot.
        rope_by_type: whether sliding layers do not use the scaled RoPE.
        rope_parameters_only: whether no version of transformers 4 reads it.
    """

    name: str
    classes: Mapping[str, str]
    modeling: Modeling
    refusals: Mapping[str, str | Mapping[str, str]]
    defaults: Mapping[str, Any]
    layers: Layers | None
    window: Windows | None
    full_attention: FullAttention | None
    sharing: str | None
    permute: Mapping[str, tuple[str, ...]]
    optional: Mapping[str, tuple[str, ...]]
    copied: Copied
    when: Mapping[str, tuple[str, ...]]
    only: Mapping[str, tuple[str, ...]]
    states: States | None
    experts: Experts | None
    instead: Mapping[str, tuple[str, ...]]
    numbers: Mapping[str, str]
    prefixes: tuple[str, ...]
    text: tuple[str, ...]
    outer_defaults: Mapping[str, Any]
    beside: Mapping[str, Mapping[str, str]]
    replicated: bool
    no_reform: str | None
    rope_by_type: bool
    rope_parameters_only: bool

    @property
    def module(self) -> str:
        """Name of the emitted modeling module."""
        return f"modeling_kvsurgery_{self.name}"

    @property
    def has_chunked_layers(self) -> bool:
        """Whether the layers without full attention have chunked attention."""
        return self.window is not None and self.window.kind == CHUNKED_ATTENTION

    def role(self, tensor: str) -> Role:
        """The role of a tensor.

        Raises:
            UnsupportedModel: the family has no tensor of this name.
        """
        layer, part = self.place(tensor)
        if layer is None and self._copied_in_model.fullmatch(part):
            return Role(None, part)
        if layer is not None:
            for shapes in (self.permute, self.optional):
                if part in shapes:
                    return Role(layer, part, shapes[part])
            if self._copied_in_layer.fullmatch(part):
                return Role(layer, part)
        raise UnsupportedModel(f"tensor {tensor!r} is not known in family {self.name}; conversion would be a guess")

    def place(self, tensor: str) -> tuple[int | None, str]:
        """The layer of a tensor (None outside the layers) and its name there, even if the family does not have it."""
        name = next((tensor.removeprefix(prefix) for prefix in self.prefixes if tensor.startswith(prefix)), tensor)
        match = LAYER.fullmatch(name)
        return (int(match[1]), match[2]) if match else (None, name)

    def refuse(self, config: Mapping[str, Any]) -> None:
        """Raise UnsupportedModel if a config has a trait that surgery does not cover."""
        if not config.get("is_causal", True):
            raise UnsupportedModel(f"config.json has is_causal {config['is_causal']!r}: {_NOT_CAUSAL}")
        for key, reason in self.refusals.items():
            value = config.get(key)
            if isinstance(reason, Mapping):  # of some values only
                reason = reason.get(str(value))
            if value and reason:
                raise UnsupportedModel(f"config.json has {key}: {reason}")

    def with_text(self, config: Mapping[str, Any]) -> Family:
        """This family with the facts about heads of its text model, which has this config."""
        name = config.get("model_type")
        if name not in self.text:
            raise UnsupportedModel(
                f"the text model of a {self.name} must be one of {', '.join(self.text)}; text_config is of {name!r}"
            )
        if self.permute:
            self.refuse(config)
            return self
        text = load_family(name)
        text.refuse(config)
        return replace(
            text,
            name=self.name,
            classes=self.classes,
            modeling=self.modeling,
            copied=replace(text.copied, model=text.copied.model + self.copied.model),
            prefixes=self.prefixes,
            text=self.text,
            outer_defaults=self.defaults,
            beside=self.beside,
            no_reform=self.no_reform or text.no_reform,
        )

    @cached_property
    def _copied_in_layer(self) -> re.Pattern[str]:
        parts = (name for names in self.instead.values() for name in names)
        return _any_of((*self.copied.layer, *self.copied.unread, *parts))

    @cached_property
    def _copied_in_model(self) -> re.Pattern[str]:
        return _any_of(self.copied.model)


@cache
def supported() -> tuple[str, ...]:
    """The supported values of `model_type`."""
    return tuple(sorted(path.stem for path in PATCHES.glob("*.toml")))


@cache
def load_family(name: str) -> Family:
    """The family of a patch, by its `model_type`."""
    patch = _read(Patch, PATCHES / f"{name}.toml")
    text, title = patch.text, patch.modeling.title
    return Family(
        name=name,
        classes=patch.classes,
        modeling=replace(patch.modeling, module=patch.modeling.module or name),
        defaults=patch.defaults,
        refusals={**_ALWAYS_REFUSED, **patch.refuse},
        layers=patch.layers,
        window=patch.windows,
        full_attention=patch.full_attention,
        permute=permuted(patch.permute, patch.modeling.attention),
        optional=permuted(patch.permute_if_present, patch.modeling.attention),
        copied=patch.copy,
        when=patch.when,
        only=patch.only,
        states=patch.states,
        experts=patch.experts,
        instead=patch.instead,
        numbers=patch.numbers,
        prefixes=text.prefixes if text else patch.prefixes,
        text=text.families if text else (),
        outer_defaults={},
        beside=patch.beside,
        replicated=patch.parallel is not None,
        rope_by_type=patch.rope.by_layer_type,
        rope_parameters_only=patch.rope.parameters_only,
        sharing=patch.sharing.layers if patch.sharing else None,
        no_reform=f"REFORM does not cover {title}: {patch.reform.refused}" if patch.reform else None,
    )


@cache
def load_module(name: str) -> Module | None:
    """Load the tensors of a tower or a projector; None if they are not known."""
    known = {path.stem: path for path in MODULES.glob("*.toml")}
    return _read(Module, known[name]) if name in known else None


def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    patterns = (re.escape(name).replace(r"\*\*", ".+").replace(r"\*", "(?:0|[1-9][0-9]{0,6})") for name in names)
    return re.compile("|".join(patterns))


def _read(kind: type[Kind], path: Path) -> Kind:
    try:
        return read_table(kind, with_braces_expanded(tomllib.loads(path.read_text(encoding="utf-8"))))
    except (PolicyError, tomllib.TOMLDecodeError) as error:
        raise UnsupportedModel(f"{path}: {str(error).replace('`', QUOTE)}") from error


_NOT_CAUSAL = "there is no KV cache without causal attention"
_ALWAYS_REFUSED = {
    "use_bidirectional_attention": _NOT_CAUSAL,
    "output_attentions": "the attention of a conversion returns no weights; remove the key from config.json",
}
