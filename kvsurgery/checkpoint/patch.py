"""`Patch`: the file of a model family in `patches/` as typed tables, which refuse misspelled names."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from typing import Any, Literal

from kvsurgery.checkpoint.role import HIDDEN, OTHER
from kvsurgery.errors import PolicyError, UnsupportedModel
from kvsurgery.system.resources import PATCHES
from kvsurgery.system.typed_toml import check_types

AUTO_CLASSES = ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText")
# what `layer_types` of a config calls the attention of layers, besides STATES
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
CHUNKED_ATTENTION = "chunked_attention"
SHAPE_SYMBOL = re.compile("hidden|other|query_heads|kv_heads|gated_queries|[qkv]+")
SELF_ATTENTION = "self_attn."  # the attention of a layer, in the tables of permutations
PERMUTATIONS = PATCHES / "shared" / "permutations.toml"
# config keys that are read by these names in every family, and may have a default
COMMON_KEYS = (
    "head_dim",
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class Table:
    """A table of a patch, whose values have the types of its fields."""

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True)
class Modeling(Table):
    """Facts about a family for the emitted modeling code, in addition to the names of its classes.

    Attributes:
        title: the family's name, as people write it.
        attention: what a decoder layer calls its attention.
        module: the package of `transformers.models` with its classes; None for the family's own.
        base_model_prefix: the prefix of the weights' names, if transformers 4 assumes another one.
        weights: emitted classes whose weights transformers 5 converts at load, and the stock class or `model_type`
            whose conversion applies to them.
        image_inputs: arguments of `generate` that become embeddings in the prompt.
        image_types: the argument of `forward` that says which tokens are an image's, if these may see later ones.
        oldest: the first major version of transformers that runs the emitted code, if it is not 4.
    """

    title: str
    attention: str = "self_attn"
    module: str | None = None
    base_model_prefix: str | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    image_inputs: tuple[str, ...] = ()
    image_types: str | None = None
    oldest: int | None = None


@dataclass(frozen=True)
class Windows(Table):
    """The layers without full attention, and their windows.

    Attributes:
        kind: their name in `layer_types`.
        size: config key of their window.
        enabled_by: config key of the switch that enables them.
        layer_types: whether attention reads `layer_types`, or requires it.
        layers: config key of a list with a number for each layer, 0 where it has full attention.
        from_layer: config key of the first layer that slides.
        full_layers: config key of a list of the layers with full attention; null is all.
        full_every: period of layers with full attention, or its config key.
    """

    kind: Literal["sliding_attention", "chunked_attention", "linear_attention", "conv"] = "sliding_attention"
    size: str = "sliding_window"
    enabled_by: str | None = None
    layer_types: bool | Literal["required"] = False
    layers: str | None = None
    from_layer: str | None = None
    full_layers: str | None = None
    full_every: int | str | None = None


@dataclass(frozen=True)
class Layers(Table):
    """How a config without `layer_types` names the kind of each layer.

    Attributes:
        types: config key of a list of kinds.
        pattern: config key of a string with a letter for each layer, which is read if there is no list.
        letters: by letter, the kind of layers that it stands for.
    """

    types: str
    pattern: str
    letters: Mapping[str, str]

    def kinds(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Sequence[Any]:
        """The kinds of all layers by a config.

        Raises:
            UnsupportedModel: what should name them is malformed.
        """
        key = next((key for key in ("layer_types", self.types) if config.get(key) is not None), None)
        pattern = config.get(self.pattern)
        if key is None and pattern is not None:
            if not isinstance(pattern, str) or not {*pattern} <= self.letters.keys():
                letters = " ".join(self.letters)
                raise UnsupportedModel(f"config.json: {self.pattern} is {pattern!r}, with other letters than {letters}")
            return [self.letters[letter] for letter in pattern]
        kinds = defaults[self.types] if key is None else config[key]
        if not isinstance(kinds, list | tuple):
            raise UnsupportedModel(f"config.json: {key} is {kinds!r}, not a list")
        return kinds


@dataclass(frozen=True)
class FullAttention(Table):
    """Config keys of the dimensions that only layers with full attention have.

    `keys_are_values` is the switch for layers without `v_proj`, whose values are made from the projected keys.
    """

    head_dim: str
    num_key_value_heads: str
    keys_are_values: str


@dataclass(frozen=True)
class Experts(Table):
    """The layers with experts, and the tensors of these layers.

    Attributes:
        enabled_by: config key that is 0 or false if no layer has experts.
        from_layer: the first layer with experts, or its config key.
        every: config key of their period.
        layers: config key of a list of the layers with experts, which takes precedence over `every`.
        types: config key of a list that calls each layer sparse or dense, which takes precedence over all others.
        dense_layers: config key of a list of layers without experts.
        tensors, dense: tensors that only layers with, and without, experts have.
    """

    enabled_by: str | None = None
    from_layer: int | str | None = None
    every: str | None = None
    layers: str | None = None
    types: str | None = None
    dense_layers: str | None = None
    tensors: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()


@dataclass(frozen=True)
class Copied(Table):
    """Tensors that are copied: those of the model, of every layer, and those that stock classes do not read.

    `layers_beyond` is the config key for the number of layers after the last one, which are copied too.
    """

    model: tuple[str, ...]
    layer: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    layers_beyond: str | None = None


@dataclass(frozen=True)
class States(Table):
    """The elements of a layer's states: each number is a sum of products of config keys.

    Attributes:
        beside: whether every layer has states beside its attention, not some in place of it.
        convolution: of the last inputs of its convolution, in the dtype of the model.
        recurrence: of its recurrent state, in float32.
    """

    convolution: tuple[str, ...]
    recurrence: tuple[str, ...] = ()
    beside: bool = False

    def keys(self) -> Iterator[str]:
        """The config keys of all factors."""
        for product in (*self.convolution, *self.recurrence):
            yield from (factor for factor in product.split(" * ") if not factor.isdecimal())


@dataclass(frozen=True)
class Text(Table):
    """The families of a text model inside another model, and the prefixes of its tensors."""

    families: tuple[str, ...]
    prefixes: tuple[str, ...]


@dataclass(frozen=True)
class Module(Table):
    """The file of a tower or a projector beside a text model, in `patches/modules/`: the tensors that it must have.

    Attributes:
        model: names of those outside of layers.
        layer: names inside of each layer.
        layers: where the layers lie.
        number: config key of their number, or of a list with an entry for each.
        defaults: of the module's config class.
        when: by config key, patterns of the tensors that it has only if the value is true.
        optional_prefix: may come before every name.
    """

    model: tuple[str, ...]
    layer: tuple[str, ...] = ()
    layers: str | None = None
    number: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    when: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optional_prefix: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_known(self.defaults, [self.number or "", *self.when], "defaults")
        _check_unique(self.model)
        _check_unique(self.layer)
        _check_patterns(self.when, (*self.model, *self.layer))


@dataclass(frozen=True)
class Parallel(Table):
    """Whether tensor parallelism replicates attention in every process."""

    attention: Literal["replicated"]


@dataclass(frozen=True)
class Refused(Table):
    """The reason why a feature does not cover the family."""

    refused: str


@dataclass(frozen=True)
class Rope(Table):
    """Whether layer types have RoPE of their own, and whether `rope_parameters` is its only spelling."""

    by_layer_type: bool = False
    parameters_only: bool = False


@dataclass(frozen=True)
class Sharing(Table):
    """The config key for the number of last layers, which share the KV cache of earlier ones."""

    layers: str


@dataclass(frozen=True)
class Patch(Table):
    """All tables of the file, explained in `kvsurgery.checkpoint.family`."""

    classes: Mapping[str, str]
    modeling: Modeling
    copy: Copied
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refuse: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("model.",)
    layers: Layers | None = None
    windows: Windows | None = None
    full_attention: FullAttention | None = None
    sharing: Sharing | None = None
    rope: Rope = Rope()
    reform: Refused | None = None
    parallel: Parallel | None = None
    permute: tuple[str, ...] = ()
    permute_if_present: tuple[str, ...] = ()
    when: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    states: States | None = None
    experts: Experts | None = None
    instead: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    text: Text | None = None
    beside: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_known(self.classes, AUTO_CLASSES, "classes")
        _check_known(self.modeling.weights, self.classes.values(), "modeling.weights")
        _check_known(self.defaults, [*COMMON_KEYS, *self._config_keys()], "defaults")
        _check_known(self.permute, permutations(), "permute")
        _check_known(self.permute_if_present, permutations(), "permute_if_present")
        with_heads = (permuted([name], self.modeling.attention) for name in (*self.permute, *self.permute_if_present))
        in_layers = [*chain(*with_heads), *self.copy.layer]
        _check_unique(in_layers)
        _check_unique(self.copy.model)
        tensors = [*in_layers, *self.copy.model]
        _check_known(self.instead, tensors, "instead")
        experts = self.experts or Experts()
        _check_patterns({**self.when, **self.only, "experts": (*experts.tensors, *experts.dense)}, tensors)
        for module in self.beside.values():
            _check_known(module, ("section", "module", "default"), "beside")
        for name in [*tensors, *(name for names in self.instead.values() for name in names)]:
            if "*" in name.replace("**", "") and name.partition(".*.")[0] not in self.numbers:
                raise PolicyError(f"`numbers` does not say how many {name!r} there are")

    def _config_keys(self) -> Iterator[str]:
        """The keys of config.json that the tables name."""
        windows = self.windows or Windows()
        full = self.full_attention
        experts = self.experts or Experts()
        yield from (windows.size, windows.enabled_by or "", windows.layers or "", windows.from_layer or "")
        yield windows.full_layers or ""
        yield self.layers.types if self.layers else ""
        yield from self.states.keys() if self.states else ()
        yield str(windows.full_every)
        yield from vars(full).values() if full else ()
        yield from (value for value in vars(experts).values() if isinstance(value, str))
        yield from (self.sharing.layers if self.sharing else "", self.copy.layers_beyond or "", *self.when)
        yield from (key.partition(" ")[0] for key in self.numbers.values())


@cache
def permutations() -> dict[str, dict[str, tuple[str, ...]]]:
    """The shapes of tensors with heads, by the names that patches give to sets of them."""
    tables = tomllib.loads(PERMUTATIONS.read_text(encoding="utf-8"))
    for part, shape in (item for table in tables.values() for item in table.items()):
        moved_axes = [symbol for symbol in shape if symbol not in (HIDDEN, OTHER)]
        if len(moved_axes) != 1 or not all(map(SHAPE_SYMBOL.fullmatch, shape)):
            raise PolicyError(f"{PERMUTATIONS}: the shape of {part!r} has no axis of heads, or several: {shape}")
    return {name: {part: tuple(shape) for part, shape in table.items()} for name, table in tables.items()}


def permuted(names: Iterable[str], attention: str) -> dict[str, tuple[str, ...]]:
    """The shapes of the tensors in several sets of `permutations`, by their names in layers with this attention."""
    shapes = (item for name in names for item in permutations()[name].items())
    return {part.replace(SELF_ATTENTION, f"{attention}."): shape for part, shape in shapes}


def with_braces_expanded(value: Any) -> Any:
    """Expand `"a.{x,y}"` in the lists of a TOML value to `a.x` and `a.y`.

    Raises:
        PolicyError: unbalanced braces.
    """
    if isinstance(value, dict):
        return {key: with_braces_expanded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [name for item in value for name in (_alternatives(item) if isinstance(item, str) else [item])]
    return value


def _alternatives(name: str) -> list[str]:
    start, opening, rest = name.partition("{")
    choices, closing, end = rest.partition("}")
    if bool(opening) != bool(closing) or "}" in start or "{" in choices:
        raise PolicyError(f"{name!r} has a brace without its pair")
    if not opening:
        return [name]
    return [start + choice + tail for choice in choices.split(",") for tail in _alternatives(end)]


def _check_unique(names: Collection[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise PolicyError(f"{name!r} is listed {count} times")


def _check_patterns(patterns: Mapping[str, Iterable[str]], tensors: Collection[str]) -> None:
    for pattern in (pattern for group in patterns.values() for pattern in group):
        if not any(fnmatchcase(tensor, pattern) for tensor in tensors):
            raise PolicyError(f"{pattern!r} matches no tensor")


def _check_known(names: Iterable[str], known: Iterable[str], table: str) -> None:
    known = [*known]
    for name in names:
        if name not in known:
            matches = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {matches[0]!r}?" if matches else f"known are {', '.join(filter(None, known))}"
            raise PolicyError(f"unknown key {name!r} in `{table}`; {hint}")
