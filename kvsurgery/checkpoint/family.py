"""`Family`: one model family, read from its file in `patches/`.

A patch says what the family's config assumes for keys left out, which layers have a sliding window of their own, which
config traits surgery does not cover, and the role of every tensor. `permute` names sets of tensors with heads, which
`shared/permutations.toml` lists with their shapes, spelt with the letters of the heads along them: `["q", "hidden"]`
has the query heads as rows, `["hidden", "q"]` as columns, and `["qkv", "hidden"]` all heads one after the other;
`query_heads` is one number for each query head, and `gated_queries` each query head's rows and as many of its gate.
`*` in a name stands for a number, `**` for anything, and `a.{x,y}` for the two names `a.x` and `a.y`.

Every tensor that a patch lists must be in a checkpoint, each layer has those of layers, and as many for a `*` as the
config key in `[numbers]` says. Exceptions are `lm_head.weight` where embeddings are tied, names with `**`, those of
`unread` in `[copy]`, and those of `permute_if_present`, unless `[when]` lists them: by config key, patterns of the
tensors that a model has if the key's value is true. `[experts]` says which layers have experts, and which tensors only
layers with and without them have. `[instead]` has what may be there in place of a tensor.

In `[windows]`, `kind` is what `layer_types` calls layers without full attention, `size` the key of their window, and
`layers` that of a list with a number for each layer, 0 where it has full attention. `[full_attention]` has the config
keys of dimensions that layers with full attention have of their own, and of the switch for layers without `v_proj`,
whose values are made from the projected keys. `[parallel]` says where transformers' tensor parallelism does not split
the heads, `[reform]` why REFORM does not cover a family, `[measure]` why its heads cannot be measured. `[rope]` says
whether layer types have RoPE of their own, and whether `rope_parameters` is their only spelling, `[sharing]` which
config key counts the last layers that share the KV cache of earlier ones, `[modeling]` is what the emitted code says
of the family.

The patch of a model that reads images says in `[text]` which families its text model may be of, and under which names
its tensors lie; all that concerns heads is then that family's, and read from `text_config`. `[beside]` says which files
in `modules/` list the tensors of its towers and projectors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from kvsurgery.checkpoint.patch import Modeling, Module, Patch, Table, permuted, with_braces_expanded
from kvsurgery.checkpoint.tensor_rules import LM_HEAD, TensorRules, missing_beside
from kvsurgery.errors import PolicyError, UnsupportedModel
from kvsurgery.system.resources import PATCHES
from kvsurgery.system.typed_toml import read_table
from kvsurgery.templates.kv_layout import text_config

TIED = "tie_word_embeddings"
MODULES = PATCHES / "modules"
QUOTE = "'"  # for the backticks of settings, which the command line shows as options

Kind = TypeVar("Kind", bound=Table)


@dataclass(frozen=True)
class Family(TensorRules):
    """One model family; `classes` are the model class of each auto class, the one with an output layer last.

    `text` are the families that its text model may be of, where it has one inside, and `outer_defaults` those of
    the config around it; `beside` it, under these prefixes, are towers and projectors. Where attention is
    `replicated`, every process of tensor parallelism has all heads. `no_reform` says why REFORM cannot read long
    prompts, where it cannot, and `no_measure` why heads cannot be measured. With `rope_by_type`, scaled RoPE is not
    that of sliding layers; with `rope_parameters_only`, no transformers 4 reads it.
    """

    classes: Mapping[str, str]
    modeling: Modeling
    refusals: Mapping[str, str | Mapping[str, str]]
    text: tuple[str, ...]
    outer_defaults: Mapping[str, Any]
    beside: Mapping[str, Mapping[str, str]]
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

    def is_tied(self, config: Mapping[str, Any]) -> bool:
        """Whether the stock class makes the output layer of the embedding where none is stored."""
        tied = self._value(text_config(config), TIED)
        if not self.text:
            return bool(tied)
        # transformers 5 reads the config around that of the text model, transformers 4 the latter
        return bool(config.get(TIED, self.outer_defaults.get(TIED)) or (tied and self.modeling.oldest is None))

    def has_output(self, config: Mapping[str, Any]) -> bool:
        """Whether the stock class has an output layer of its own, not the embedding and not none."""
        model, *_, generator = self.classes.values()
        [architecture, *_] = config.get("architectures") or [generator]
        return (architecture != model or model == generator) and not self.is_tied(config)

    def missing(self, config: Mapping[str, Any], tensors: Iterable[str]) -> Iterator[str]:
        """Names of the tensors that the stock class would initialize at random.

        Args:
            config: config.json.
            tensors: names of those that are there.

        Raises:
            UnsupportedModel: a tensor is unknown, or a number in the config is no sensible one.
        """
        roles = {tensor: self.role(tensor) for tensor in tensors}
        parts = {(role.layer, role.part) for role in roles.values()}
        prefix = next((name.partition("layers.")[0] for name, role in roles.items() if role.layer is not None), "")
        outer_prefix = next(filter(prefix.startswith, ("language_model.", "model.")), "")
        for part in self.missing_text(config, parts, self.has_output(config)):
            own_prefix = outer_prefix.removeprefix("model.") if part == LM_HEAD else prefix
            yield own_prefix + part
        for start, section, kind in self._modules(config):
            module = load_module(kind)
            if module is not None:
                names = {part.removeprefix(start) for layer, part in parts if layer is None and part.startswith(start)}
                absent = missing_beside(module, section, names)
                yield from (f"{outer_prefix.removeprefix('language_model.')}{start}{name}" for name in absent)

    def unknown_modules(self, config: Mapping[str, Any]) -> dict[str, str]:
        """By prefix, the types of towers and projectors whose missing tensors `missing` cannot name."""
        return {start: kind for start, _, kind in self._modules(config) if load_module(kind) is None}

    def _modules(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
        """The prefix, config and type of each tower and projector."""
        for start, place in self.beside.items():
            section = config.get(place["section"]) if "section" in place else config
            if isinstance(section, Mapping):
                yield start, section, place.get("module") or str(section.get("model_type", place["default"]))

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
        )


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
    patch = _read(Patch, PATCHES / f"{name}.toml")
    text, title = patch.text, patch.modeling.title
    return Family(
        name=name,
        classes=patch.classes,
        modeling=replace(patch.modeling, module=patch.modeling.module or name),
        defaults=patch.defaults,
        refusals={**_ALWAYS_REFUSED, **patch.refuse},
        window=patch.windows,
        full_attention=patch.full_attention,
        permute=permuted(patch.permute),
        optional=permuted(patch.permute_if_present),
        copied=patch.copy,
        when=patch.when,
        experts=patch.experts,
        instead=patch.instead,
        numbers=patch.numbers,
        prefixes=text.prefixes if text else ("model.",),
        text=text.families if text else (),
        outer_defaults={},
        beside=patch.beside,
        replicated=patch.parallel is not None,
        rope_by_type=patch.rope.by_layer_type,
        rope_parameters_only=patch.rope.parameters_only,
        sharing=patch.sharing.layers if patch.sharing else None,
        no_reform=f"REFORM does not cover {title}: {patch.reform.refused}" if patch.reform else None,
        no_measure=f"the heads of {title} cannot be measured: {patch.measure.refused}" if patch.measure else None,
    )


@cache
def load_module(name: str) -> Module | None:
    """The tensors of a tower or a projector; None: they are not known."""
    known = {path.stem: path for path in MODULES.glob("*.toml")}
    return _read(Module, known[name]) if name in known else None


def _read(kind: type[Kind], path: Path) -> Kind:
    try:
        return read_table(kind, with_braces_expanded(tomllib.loads(path.read_text(encoding="utf-8"))))
    except (PolicyError, tomllib.TOMLDecodeError) as error:
        raise UnsupportedModel(f"{path}: {str(error).replace('`', QUOTE)}") from error


_NOT_CAUSAL = "there is no KV cache without causal attention"
_ALWAYS_REFUSED = {
    "quantization_config": "its weights are quantized; give the original 16- or 32-bit checkpoint",
    "use_bidirectional_attention": _NOT_CAUSAL,
}
