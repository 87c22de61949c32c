"""Quantized weights: the tensors of a module's weight in each layout, and the heads along their axes.

A file in `patches/quantization/` describes one layout. `weight` is the suffix of the name of the codes, in place of
`plain`, and `beside` lists further tensors of a module with codes. `tensors` gives the axes of each tensor: those of
the `outputs` and the `inputs` of the weight, `one`, or `other`; the number after a slash is how many of them lie in one
element. If all rows follow one another in one axis, the tensor is `flat`. A tensor without axes is copied. `packages`
are the packages that transformers needs to load the layout; if `transformers` is false, it computes something else.

Nothing is quantized again: whole elements move, so heads whose weights do not fill whole elements cannot.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from kvsurgery.checkpoint.family import Family
from kvsurgery.checkpoint.headers import Tensor
from kvsurgery.checkpoint.patch import Table
from kvsurgery.checkpoint.role import ATTENTION_DTYPES, ONE, Role
from kvsurgery.errors import CheckpointError, PolicyError, UnsupportedModel, short
from kvsurgery.system.resources import PATCHES
from kvsurgery.system.typed_toml import read_table

FOLDER = PATCHES / "quantization"
KEY = "quantization_config"
ORIGINAL = "give the 16-bit original"
AXES = {"outputs": 0, "inputs": 1}
FLAT = "flat"
# what scales of attention's states are called, and which heads may have one each
STATE_SCALES = {
    f"{state}_{part}": heads
    for state, heads in (("q", "query_heads"), ("k", "kv_heads"), ("v", "kv_heads"))
    for part in ("scale", "zero_point")
}
INTEGER = 32  # bits of the integers that codes are packed into
# ModelOpt's algorithms and their layouts
MODELOPT = {
    "FP8": "modelopt-fp8",
    "FP8_PB_WO": "modelopt-fp8-block",
    "NVFP4": "modelopt-nvfp4",
    "W4A16_AWQ": "modelopt-int4-awq",
}
# configurations of torchao whose weights have one scale for each output
TORCHAO = (
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
)


@dataclass(frozen=True)
class Layout(Table):
    """A file of `patches/quantization/`, described in this module."""

    title: str
    weight: str
    beside: tuple[str, ...]
    tensors: Mapping[str, tuple[str, ...]]
    plain: str = ".weight"
    packages: tuple[str, ...] = ()
    transformers: bool = True


@dataclass(frozen=True)
class Quantization:
    """How the weights of one checkpoint are quantized.

    Attributes:
        layout: its layout.
        numbers: by the name after a slash in the layout, the number of outputs or inputs in one element; None if all
            of them lie in one element.
    """

    layout: Layout
    numbers: Mapping[str, Fraction | None]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Quantization | None:
        """The quantization that a config.json describes; None for unquantized weights.

        Raises:
            UnsupportedModel: a layout that is not known here, or cannot be reordered.
            CheckpointError: a setting is missing or not plausible.
        """
        settings = config.get(KEY)
        if settings is None:
            return None
        if not isinstance(settings, Mapping):
            raise CheckpointError(f"config.json: {KEY} should be an object, not {short(settings)}")
        method = settings.get("quant_method")
        reader = _READERS.get(method) if isinstance(method, str) else None
        if reader is None:
            raise UnsupportedModel(
                f"its weights are quantized by {short(method)}; converted are {', '.join(_READERS)}; {ORIGINAL}"
            )
        name, numbers = reader(settings)
        return cls(load_layout(name), numbers)

    def role(self, family: Family, tensor: Tensor) -> Role:
        """The role of a tensor.

        Raises:
            UnsupportedModel: the family has no tensor of this name in this layout.
        """
        if heads := _state_heads(family, tensor.name):
            is_one = math.prod(tensor.shape) == 1
            return Role(*family.place(tensor.name), () if is_one else (heads, *[ONE] * (len(tensor.shape) - 1)))
        suffix = self._suffix(tensor.name)
        if suffix is None or (suffix == self.layout.plain and tensor.dtype in ATTENTION_DTYPES):
            return family.role(tensor.name)
        weight = tensor.name.removesuffix(suffix) + self.layout.plain
        role = family.role(weight)
        part = role.part if suffix == self.layout.weight else role.part.removesuffix(self.layout.plain) + suffix
        axes = self.layout.tensors[suffix]
        if len(role.shape) != 2 or not axes:
            return Role(role.layer, part)
        shape: list[str] = []
        per: list[Fraction] = []
        for axis in axes:
            name, _, unit = axis.partition("/")
            number = self.numbers[unit] if unit else Fraction(1)
            if name == FLAT:
                return Role(role.layer, part, role.shape, flat=number)
            symbol = role.shape[AXES[name]] if name in AXES else name
            shape.append(ONE if number is None else symbol)
            per.append(number or Fraction(1))
        return Role(role.layer, part, tuple(shape), tuple(per))

    def plain_weight(self, tensor: Tensor, hidden: int) -> tuple[str, tuple[int, ...]]:
        """The name of the weight that a tensor of codes stands for, and its outputs and inputs, as far as known.

        If rows follow one another in one axis, the codes may also be those of the transposed weight, with rows of
        `hidden`.
        """
        suffix = self._suffix(tensor.name)
        if suffix is None or suffix != self.layout.weight:
            return tensor.name, tensor.shape
        plain_name = tensor.name.removesuffix(suffix) + self.layout.plain
        if self.layout.tensors[suffix][0].startswith(FLAT):
            is_packed = tensor.dtype not in ATTENTION_DTYPES
            unit = self.layout.tensors[suffix][0].partition("/")[2]
            count = math.prod(tensor.shape) * (self.numbers[unit] or 1)
            return plain_name, (hidden, int(count) // hidden) if is_packed else tensor.shape
        lengths: dict[str, int] = {}
        for axis, length in zip(self.layout.tensors[suffix], tensor.shape, strict=False):
            name, _, unit = axis.partition("/")
            is_packed = unit and tensor.dtype not in ATTENTION_DTYPES
            lengths[name] = int(length * (self.numbers[unit] or 1)) if is_packed else length
        shape = tuple(lengths[name] for name in AXES if name in lengths)
        return plain_name, shape

    def plain_names(self, family: Family, tensors: Iterable[str]) -> list[str]:
        """The names of the weights that tensors of the layout stand for, without the tensors beside the codes."""
        names: list[str] = []
        for name in tensors:
            suffix = self._suffix(name)
            if suffix == self.layout.weight:
                names.append(name.removesuffix(suffix) + self.layout.plain)
            elif suffix is None and not _state_heads(family, name):
                names.append(name)
        return names

    def check_complete(self, tensors: Iterable[Tensor]) -> None:
        """Check that each module with codes has its scales and other required tensors.

        Raises:
            CheckpointError: a tensor is missing.
        """
        dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        for name, dtype in dtypes.items():
            if self._suffix(name) != self.layout.weight or dtype in ATTENTION_DTYPES:
                continue
            for suffix in self.layout.beside:
                needed = name.removesuffix(self.layout.weight) + suffix
                if needed not in dtypes:
                    raise CheckpointError(f"{needed} is missing, and {name} is {dtype}; is the checkpoint complete?")

    def _suffix(self, name: str) -> str | None:
        """What the name of a tensor of the layout ends with."""
        return next((suffix for suffix in sorted(self.layout.tensors, key=len)[::-1] if name.endswith(suffix)), None)


def _state_heads(family: Family, name: str) -> str | None:
    """The heads that may each have a scale in a tensor of this name; None if it has no scales of attention states."""
    layer, part = family.place(name)
    modules = {known.partition(".")[0] for known in family.permute}
    if layer is None or part.partition(".")[0] not in modules:
        return None
    return STATE_SCALES.get(part.rpartition(".")[2])


def check_known(config: Mapping[str, Any], source: object) -> None:
    """Check that the installed transformers knows the quantization method of a checkpoint.

    transformers only warns about an unknown method, and reads the codes as weights.

    Args:
        config: the config of the checkpoint.
        source: its name in an error.

    Raises:
        UnsupportedModel: the method is unknown.
    """
    settings = config.get(KEY)
    if not isinstance(settings, Mapping) or settings.get("quant_method") is None:
        return
    from transformers import __version__
    from transformers.quantizers.auto import AutoHfQuantizer

    if not AutoHfQuantizer.supports_quant_method(dict(settings)):
        raise UnsupportedModel(
            f"transformers {__version__} takes the codes of {source} for weights, as it does not know the method "
            f"{short(settings['quant_method'])}; serve it with vLLM, or {ORIGINAL}"
        )


@cache
def load_layout(name: str) -> Layout:
    """A layout by the name of its file."""
    path = FOLDER / f"{name}.toml"
    try:
        return read_table(Layout, tomllib.loads(path.read_text(encoding="utf-8")))
    except (PolicyError, tomllib.TOMLDecodeError) as error:
        raise UnsupportedModel(f"{path}: {error}") from error


def _fp8(settings: Mapping[str, Any]) -> tuple[str, dict[str, Fraction | None]]:
    block = settings.get("weight_block_size")
    if block is None:
        return "fp8-tensor", {}
    return "fp8-block", _block(block, "weight_block_size")


def _compressed_tensors(settings: Mapping[str, Any]) -> tuple[str, dict[str, Fraction | None]]:
    for name in ("transform_config", "sparsity_config"):
        if settings.get(name):
            raise UnsupportedModel(f"config.json: {KEY} has {name}, which is not converted; {ORIGINAL}")
    if settings.get("quantization_status", "compressed") != "compressed":
        raise UnsupportedModel(
            f"config.json: {KEY} has the status {short(settings['quantization_status'])}; compress the checkpoint first"
        )
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"config.json: {KEY} has no config_groups")
    first, *others = map(_scheme, groups.values())
    if any(other != first for other in others):
        raise UnsupportedModel(f"config.json: {KEY} has config_groups of several layouts; {ORIGINAL}")
    name, bits, is_float, size, block = first
    numbers: dict[str, Fraction | None] = {"packed": Fraction(8 if is_float else INTEGER, bits)}
    if name == "block":
        numbers |= _block(block, "block_structure")
    if name in ("group", "act-order"):
        numbers["group"] = _group(size)
    return f"compressed-tensors-{name}", numbers


def _scheme(group: Any) -> tuple[str, int, bool, Any, Any]:
    """The layout, bits, whether codes are floats, group size and block of a config group of compressed-tensors."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"config.json: {KEY} has a config group without weights")
    strategy = weights.get("strategy")
    names = {"tensor": "tensor", "channel": "channel", "block": "block", "group": "group", "tensor_group": "group"}
    if not isinstance(strategy, str) or strategy not in names:
        raise UnsupportedModel(f"config.json: {KEY} has the strategy {short(strategy)}; {ORIGINAL}")
    bits = _number(weights, "num_bits")
    name = names[strategy]
    if name == "channel" and bits < 8:  # packed as groups are, with one group a row
        return "group", bits, weights.get("type") == "float", -1, None
    if name == "group" and weights.get("actorder") in ("group", True):
        name = "act-order"
    return name, bits, weights.get("type") == "float", weights.get("group_size"), weights.get("block_structure")


def _gptq(settings: Mapping[str, Any]) -> tuple[str, dict[str, Fraction | None]]:
    kind = settings.get("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(
            f"its weights are in GPTQ's format {short(kind)}; converted are gptq and gptq_v2; {ORIGINAL}"
        )
    numbers = {"packed": Fraction(INTEGER, _number(settings, "bits")), "group": _group(settings.get("group_size"))}
    return "gptq-act-order" if settings.get("desc_act") else "gptq", numbers


def _awq(settings: Mapping[str, Any]) -> tuple[str, dict[str, Fraction | None]]:
    kind = str(settings.get("version", "gemm")).lower()
    if kind != "gemm":
        raise UnsupportedModel(f"its weights are in AWQ's version {short(kind)}; converted is gemm; {ORIGINAL}")
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise UnsupportedModel(f"its weights are quantized by AWQ in {short(bits)} bits; converted are 4; {ORIGINAL}")
    size = settings.get("group_size", settings.get("q_group_size"))
    return "awq", {"packed": Fraction(INTEGER, 4), "group": _group(size)}


def _modelopt(settings: Mapping[str, Any]) -> tuple[str, dict[str, Fraction | None]]:
    algorithm = settings.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in MODELOPT:
        raise UnsupportedModel(
            f"its weights are in ModelOpt's {short(algorithm)}; converted are {', '.join(MODELOPT)}; {ORIGINAL}"
        )
    size = settings.get("group_size", 128 if algorithm == "W4A16_AWQ" else 16)
    return MODELOPT[algorithm], {"packed": Fraction(2), "group": _group(size), "block": Fraction(128)}


def _bitsandbytes(settings: Mapping[str, Any]) -> tuple[str, dict[str, Fraction | None]]:
    if settings.get("load_in_8bit"):
        return "bitsandbytes-int8", {}
    if not settings.get("load_in_4bit"):
        raise CheckpointError(f"config.json: {KEY} of bitsandbytes has neither load_in_4bit nor load_in_8bit")
    storage = settings.get("bnb_4bit_quant_storage", "uint8")
    if storage != "uint8":
        raise UnsupportedModel(
            f"config.json: {KEY} has bnb_4bit_quant_storage {short(storage)}; converted is uint8; {ORIGINAL}"
        )
    return "bitsandbytes-4bit", {"packed": Fraction(2), "block": Fraction(64), "nested": Fraction(64 * 256)}


def _torchao(settings: Mapping[str, Any]) -> tuple[str, dict[str, Fraction | None]]:
    kinds = settings.get("quant_type")
    kind = kinds.get("default") if isinstance(kinds, Mapping) else None
    name = kind.get("_type") if isinstance(kind, Mapping) else None
    if not isinstance(name, str) or name not in TORCHAO:
        raise UnsupportedModel(
            f"its weights are in torchao's {short(name)}; converted are {', '.join(TORCHAO)}; {ORIGINAL}"
        )
    return "torchao", {}


def _mxfp4(settings: Mapping[str, Any]) -> tuple[str, dict[str, Fraction | None]]:
    return "mxfp4", {"group": Fraction(32)}


_READERS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
}


def _number(settings: Mapping[str, Any], name: str) -> int:
    value = settings.get(name)
    if type(value) is not int or not 1 <= value <= 8:
        raise CheckpointError(f"config.json: {name} of {KEY} should be 1 to 8 bits, not {short(value)}")
    return value


def _group(size: Any) -> Fraction | None:
    """The number of inputs in a group; None if all are in one group."""
    if size == -1:
        return None
    if type(size) is not int or not 1 <= size <= 1 << 20:
        raise CheckpointError(f"config.json: group_size of {KEY} should be a number of inputs, not {short(size)}")
    return Fraction(size)


def _block(block: Any, name: str) -> dict[str, Fraction | None]:
    sizes = list(block) if isinstance(block, list | tuple) else []
    if len(sizes) != 2 or any(type(size) is not int or not 1 <= size <= 1 << 20 for size in sizes):
        raise CheckpointError(f"config.json: {name} of {KEY} should be two numbers, not {short(block)}")
    return dict(zip(("rows", "columns"), map(Fraction, sizes), strict=True))
