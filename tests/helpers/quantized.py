"""Random quantized weights in the layouts of other libraries, and the matrices that they stand for.

Written from the formats' descriptions, without the product's own tables: what a conversion moves is compared with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight codes stands at each place of an integer
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Format:
    """A layout: what config.json says, how a weight of outputs x inputs is drawn, and what it stands for."""

    config: dict[str, Any]
    draw: Callable[[int, int, torch.Generator], Tensors]
    matrix: Callable[[Tensors], torch.Tensor]


def pack(codes: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Codes as the bits of 32-bit integers along an axis, lowest first, without gaps."""
    rows = codes.movedim(axis, -1)
    stream = (rows[..., None] >> torch.arange(bits)) & 1
    words = stream.flatten(-2).unflatten(-1, (-1, 32)).to(torch.int64)
    packed = (words << torch.arange(32)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).movedim(-1, axis).contiguous()


def unpack(packed: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    words = packed.movedim(axis, -1).to(torch.int64)
    stream = (words[..., None] >> torch.arange(32)) & 1
    codes = (stream.flatten(-2).unflatten(-1, (-1, bits)) << torch.arange(bits)).sum(-1)
    return codes.movedim(-1, axis)


def _codes(draw: torch.Generator, bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(1 << bits, shape, generator=draw)


def _scales(draw: torch.Generator, *shape: int) -> torch.Tensor:
    return 0.5 + torch.rand(shape, generator=draw)


def _floats(draw: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=draw).to(FP8)


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """Two codes of 4 bits in a byte, the first one low."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()


def _blocks(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def fp8(is_block: bool) -> Format:
    def draw(outputs: int, inputs: int, draw: torch.Generator) -> Tensors:
        shape = (-(-outputs // 128), -(-inputs // 128)) if is_block else ()
        tensors = {".weight": _floats(draw, outputs, inputs), ".weight_scale_inv": _scales(draw, *shape)}
        return tensors if is_block else tensors | {".activation_scale": _scales(draw)}

    def matrix(tensors: Tensors) -> torch.Tensor:
        weight, scale = tensors[".weight"].float(), tensors[".weight_scale_inv"]
        return weight * (_blocks(scale, weight) if is_block else scale)

    block = [128, 128] if is_block else None
    return Format({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}, draw, matrix)


def gptq(bits: int, group: int, act_order: bool) -> Format:
    def draw(outputs: int, inputs: int, draw: torch.Generator) -> Tensors:
        size = inputs if group == -1 else group
        groups = torch.arange(inputs, dtype=torch.int32) // size
        if act_order:
            groups = groups[torch.randperm(inputs, generator=draw)]
        return {
            ".qweight": pack(_codes(draw, bits, inputs, outputs), bits, 0),
            ".qzeros": pack(_codes(draw, bits, inputs // size, outputs), bits, 1),
            ".scales": _scales(draw, inputs // size, outputs),
            ".g_idx": groups,
        }

    def matrix(tensors: Tensors) -> torch.Tensor:
        groups = tensors[".g_idx"].long()
        codes = unpack(tensors[".qweight"], bits, 0) - unpack(tensors[".qzeros"], bits, 1)[groups]
        return (codes * tensors[".scales"][groups]).T

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    return Format(config, draw, matrix)


def awq() -> Format:
    def spread(packed: torch.Tensor) -> torch.Tensor:
        return unpack(packed, 4, 1).unflatten(1, (-1, 8))[..., torch.tensor(AWQ_ORDER).argsort()].flatten(1)

    def draw(outputs: int, inputs: int, draw: torch.Generator) -> Tensors:
        return {
            ".qweight": pack(_codes(draw, 4, inputs, outputs), 4, 1),
            ".qzeros": pack(_codes(draw, 4, inputs // 64, outputs), 4, 1),
            ".scales": _scales(draw, inputs // 64, outputs),
        }

    def matrix(tensors: Tensors) -> torch.Tensor:
        zeros, scales = (each.repeat_interleave(64, 0) for each in (spread(tensors[".qzeros"]), tensors[".scales"]))
        return ((spread(tensors[".qweight"]) - zeros) * scales).T

    return Format({"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 64}, draw, matrix)


def compressed(strategy: str, bits: int, kind: str, group: int | None = None, **options: Any) -> Format:
    symmetric = options.get("symmetric", True)

    def draw(outputs: int, inputs: int, draw: torch.Generator) -> Tensors:
        if bits == 8:
            weight = _floats(draw, outputs, inputs)
            if kind == "int":
                weight = _codes(draw, 8, outputs, inputs).sub(128).to(torch.int8)
            shape = {"tensor": (1,), "channel": (outputs, 1), "block": (-(-outputs // 128), -(-inputs // 128))}[
                strategy
            ]
            return {".weight": weight, ".weight_scale": _scales(draw, *shape)}
        count = inputs // (group or inputs)
        codes = _codes(draw, bits, outputs, inputs)
        tensors = {".weight_scale": _scales(draw, outputs, count)}
        if kind == "float":
            scale = (
                tensors[".weight_scale"].to(FP8)
                if group == 16
                else _codes(draw, 3, outputs, count).add(124).to(torch.uint8)
            )
            extra = {".weight_global_scale": _scales(draw, 1)} if group == 16 else {}
            return {".weight_packed": _bytes(codes), ".weight_scale": scale, **extra}
        tensors |= {".weight_packed": pack(codes, bits, 1), ".weight_shape": torch.tensor([outputs, inputs])}
        if not symmetric:
            tensors[".weight_zero_point"] = pack(_codes(draw, bits, outputs, count), bits, 0)
        if options.get("actorder"):
            order = torch.randperm(inputs, generator=draw)
            tensors[".weight_g_idx"] = (torch.arange(inputs, dtype=torch.int32) // group)[order]
        return tensors

    def matrix(tensors: Tensors) -> torch.Tensor:
        scale = tensors[".weight_scale"].float()
        if bits == 8:
            weight = tensors[".weight"].float()
            return weight * (_blocks(scale, weight) if strategy == "block" else scale)
        if kind == "float":
            values = FP4[_nibbles(tensors[".weight_packed"])]
            scale = scale / tensors[".weight_global_scale"] if group == 16 else 2.0 ** (scale - 127)
            return values * scale.repeat_interleave(group, 1)
        codes = unpack(tensors[".weight_packed"], bits, 1)
        groups = torch.arange(codes.shape[1]) // (group or codes.shape[1])
        if ".weight_g_idx" in tensors:
            groups = tensors[".weight_g_idx"].long()
        zeros = torch.full(scale.shape, 1 << (bits - 1))
        if ".weight_zero_point" in tensors:
            zeros = unpack(tensors[".weight_zero_point"], bits, 0)
        return (codes - zeros[:, groups]) * scale[:, groups]

    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group, **options}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    weights.setdefault("symmetric", True)
    dynamic = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}
    activations = dynamic if bits == 8 else None
    config = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": _format(bits, kind, group),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        "ignore": ["lm_head"],
    }
    return Format(config, draw, matrix)


def _format(bits: int, kind: str, group: int | None) -> str:
    """What compressed-tensors calls the tensors of a layout."""
    if bits == 8:
        return f"{kind}-quantized"
    if kind == "int":
        return "pack-quantized"
    return "nvfp4-pack-quantized" if group == 16 else "mxfp4-pack-quantized"


def modelopt(algorithm: str) -> Format:
    def draw(outputs: int, inputs: int, draw: torch.Generator) -> Tensors:
        if algorithm == "W4A16_AWQ":
            codes = _codes(draw, 4, outputs, inputs)
            return {
                ".weight": (codes[::2] | codes[1::2] << 4).to(torch.uint8),
                ".weight_scale": _scales(draw, outputs, inputs // 64),
                ".pre_quant_scale": _scales(draw, inputs),
            }
        if algorithm == "NVFP4":
            return {
                ".weight": _bytes(_codes(draw, 4, outputs, inputs)),
                ".weight_scale": _scales(draw, outputs, inputs // 16).to(FP8),
                ".weight_scale_2": _scales(draw),
                ".input_scale": _scales(draw),
            }
        shape = (-(-outputs // 128), 1, -(-inputs // 128), 1) if algorithm == "FP8_PB_WO" else ()
        return {".weight": _floats(draw, outputs, inputs), ".weight_scale": _scales(draw, *shape)}

    def matrix(tensors: Tensors) -> torch.Tensor:
        weight, scale = tensors[".weight"], tensors[".weight_scale"].float()
        if algorithm == "W4A16_AWQ":
            codes = torch.stack([weight & 15, weight >> 4], 1).flatten(0, 1).long()
            return (codes - 16 * (codes > 7)) * scale.repeat_interleave(64, 1) * tensors[".pre_quant_scale"]
        if algorithm == "NVFP4":
            return FP4[_nibbles(weight)] * scale.repeat_interleave(16, 1) * tensors[".weight_scale_2"]
        return weight.float() * (_blocks(scale[:, 0, :, 0], weight) if algorithm == "FP8_PB_WO" else scale)

    config = {"quant_method": "modelopt", "quant_algo": algorithm}
    return Format(config | ({"group_size": 64} if algorithm == "W4A16_AWQ" else {}), draw, matrix)


def bitsandbytes(kind: str, nested: bool = False) -> Format:
    """Blocks of 64 codes with a scale; nested scales are codes with one for 256 of them."""
    state = f".weight.quant_state.bitsandbytes__{kind}"

    def draw(outputs: int, inputs: int, draw: torch.Generator) -> Tensors:
        count = outputs * inputs
        facts = json.dumps({"shape": [outputs, inputs], "nested_offset": 0.25}).encode()
        tensors = {
            ".weight": torch.randint(256, (count // 2, 1), generator=draw, dtype=torch.uint8),
            ".weight.quant_map": _scales(draw, 16),
            ".weight.absmax": _scales(draw, count // 64),
            state: torch.tensor([*facts], dtype=torch.uint8),
        }
        if nested:
            tensors[".weight.absmax"] = torch.randint(256, (count // 64,), generator=draw, dtype=torch.uint8)
            tensors[".weight.nested_absmax"] = _scales(draw, -(-count // 16384))
            tensors[".weight.nested_quant_map"] = _scales(draw, 256)
        return tensors

    def matrix(tensors: Tensors) -> torch.Tensor:
        facts = json.loads(bytes(tensors[state].tolist()))
        packed, scale = tensors[".weight"].flatten(), tensors[".weight.absmax"]
        if nested:
            inner = tensors[".weight.nested_absmax"].repeat_interleave(256)[: len(scale)]
            scale = tensors[".weight.nested_quant_map"][scale.long()] * inner + facts["nested_offset"]
        codes = torch.stack([packed >> 4, packed & 15], -1).flatten().long()
        return (tensors[".weight.quant_map"][codes] * scale.repeat_interleave(64)).view(facts["shape"])

    return Format({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}, draw, matrix)


def by_output(config: dict[str, Any], codes: str, scales: str, width: int = 0) -> Format:
    """INT8 with a scale for each output, in a tensor of one axis or two."""

    def draw(outputs: int, inputs: int, draw: torch.Generator) -> Tensors:
        weight = _codes(draw, 8, outputs, inputs).sub(128).to(torch.int8)
        return {codes: weight, scales: _scales(draw, outputs, *[1] * width)}

    def matrix(tensors: Tensors) -> torch.Tensor:
        return tensors[codes].float() * tensors[scales].view(-1, 1)

    return Format(config, draw, matrix)


FORMATS = {
    "fp8-block": fp8(True),
    "fp8-tensor": fp8(False),
    "gptq-4": gptq(4, 64, False),
    "gptq-3": gptq(3, 32, False),
    "gptq-8-row": gptq(8, -1, False),
    "gptq-act-order": gptq(4, 32, True),
    "awq": awq(),
    "compressed-fp8-tensor": compressed("tensor", 8, "float"),
    "compressed-fp8-channel": compressed("channel", 8, "float"),
    "compressed-fp8-block": compressed("block", 8, "float"),
    "compressed-int8": compressed("channel", 8, "int"),
    "compressed-int4": compressed("group", 4, "int", 64),
    "compressed-int4-row": compressed("channel", 4, "int"),
    "compressed-int4-asymmetric": compressed("group", 4, "int", 32, symmetric=False),
    "compressed-int3": compressed("group", 3, "int", 64),
    "compressed-int4-act-order": compressed("group", 4, "int", 32, actorder="group"),
    "compressed-nvfp4": compressed("tensor_group", 4, "float", 16),
    "compressed-mxfp4": compressed("group", 4, "float", 32),
    "modelopt-fp8": modelopt("FP8"),
    "modelopt-fp8-block": modelopt("FP8_PB_WO"),
    "modelopt-nvfp4": modelopt("NVFP4"),
    "modelopt-int4-awq": modelopt("W4A16_AWQ"),
    "bitsandbytes-nf4": bitsandbytes("nf4"),
    "bitsandbytes-fp4-nested": bitsandbytes("fp4", nested=True),
    "bitsandbytes-int8": by_output({"quant_method": "bitsandbytes", "load_in_8bit": True}, ".weight", ".SCB"),
    "torchao-int8": by_output(
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
        "._weight_qdata",
        "._weight_scale",
        width=1,
    ),
}


def quantize(folder: Path, name: str, seed: int = 0, skipped: tuple[str, ...] = ("lm_head",)) -> None:
    """Replace the weights of a checkpoint's projections by random ones in a layout; `skipped` modules stay."""
    layout = FORMATS[name]
    draw = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for key, weight in load_file(folder / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if key.endswith("proj.weight") and not any(part in key for part in skipped):
            tensors |= {module + suffix: tensor for suffix, tensor in layout.draw(*weight.shape, draw).items()}
        else:
            tensors[key] = weight.bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"dtype": "bfloat16", "quantization_config": layout.config})
    )


def matrices(folder: Path, name: str) -> Tensors:
    """By module, the matrices that a checkpoint in a layout stands for, and all other tensors by name."""
    layout = FORMATS[name]
    stored = load_file(folder / "model.safetensors")
    main = next(
        suffix
        for suffix in (".qweight", ".weight_packed", "._weight_qdata", ".weight")
        if suffix in layout.draw(128, 128, torch.Generator())
    )
    result: Tensors = {}
    seen: set[str] = set()
    for key, tensor in stored.items():
        module = key.removesuffix(main)
        if key.endswith(main) and tensor.dtype not in (torch.float32, torch.bfloat16):
            own = {
                other.removeprefix(module): value for other, value in stored.items() if other.startswith(f"{module}.")
            }
            result[module] = layout.matrix({suffix: value for suffix, value in own.items() if suffix != ".bias"})
            seen |= {module + suffix for suffix in own if suffix != ".bias"}
    return result | {key: tensor for key, tensor in stored.items() if key not in seen}
