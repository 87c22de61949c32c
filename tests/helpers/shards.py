"""Hand-made safetensors files, for what `save_pretrained` would never write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.conversion.convert import ConvertReport, convert
from kvsurgery.conversion.plan import plan_surgery
from kvsurgery.policy.policy import Policy
from kvsurgery.recipe import Recipe
from kvsurgery.templates.kv_layout import KVLayout, LayerLayout

# bytes per element
SIZES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}


def raw_shard(path: Path, header: Mapping[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """A file of this header and these tensor bytes, right or not; `length` overrides the header's size."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def noise_shard(path: Path, tensors: Mapping[str, Sequence[int]], dtype: str = "F32", seed: int = 0) -> Path:
    """A sound file of tensors of these shapes, filled with random bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return raw_shard(path, header, np.random.default_rng(seed).bytes(end))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 12,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "vocab_size": 10,
}


def llama_shapes(layers: int = 2) -> dict[str, list[int]]:
    """The tensors of a checkpoint of config `LLAMA`."""
    shapes = {"lm_head.weight": [10, 12], "model.embed_tokens.weight": [10, 12], "model.norm.weight": [12]}
    for layer in range(layers):
        for part, shape in {
            "input_layernorm.weight": [12],
            "mlp.down_proj.weight": [12, 8],
            "mlp.gate_proj.weight": [8, 12],
            "mlp.up_proj.weight": [8, 12],
            "post_attention_layernorm.weight": [12],
            "self_attn.k_proj.weight": [12, 12],
            "self_attn.o_proj.weight": [12, 24],
            "self_attn.q_proj.weight": [24, 12],
            "self_attn.v_proj.weight": [12, 12],
        }.items():
            shapes[f"model.layers.{layer}.{part}"] = shape
    return shapes


def llama_checkpoint(folder: Path, shards: int = 1, dtype: str = "F32", **config: Any) -> Path:
    """A Llama checkpoint of random bytes, with side files of every kind that conversion treats differently."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    shapes = llama_shapes()
    if shards == 1:
        noise_shard(folder / "model.safetensors", shapes, dtype)
    else:
        names = {}
        for shard in range(shards):
            name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = dict(list(shapes.items())[shard::shards])
            noise_shard(folder / name, part, dtype, seed=shard)
            names |= dict.fromkeys(part, name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    for name, content in {
        "README.md": "original card",
        "generation_config.json": '{"cache_implementation": "static", "do_sample": true}',
        "tokenizer.json": "{}",
        "LICENSE": "do what you like",
        "picture.png": "pixels",
        "additional_chat_templates/tool.jinja": "{{ tools }}",
        "modeling_custom.py": "raise SystemExit",
        ".gitattributes": "*.safetensors filter=lfs",
        ".env": "SECRET=1",
        ".cache/huggingface/download": "x",
        "pytorch_model.bin": "pickle",
        "original/consolidated.00.pth": "pickle",
        "onnx/model.onnx": "graph",
        "model.Q4_K.gguf": "quantized",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


FILES = {
    "README.md": b"converted card",
    "generation_config.json": b'{"do_sample": true}',
    "kv_generation.py": b"pass",
    "config.json": b'{"model_type": "llama", "kv_surgery": {}}',
}


def convert_llama(
    folder: Path, out: Path, orders: Sequence[Sequence[int]] = ((2, 0, 1), (1, 0, 2)), **options: Any
) -> ConvertReport:
    """Convert a checkpoint of `llama_checkpoint` with stand-ins for the emitted files."""
    checkpoint = Checkpoint.open(folder)
    layers = tuple(LayerLayout(((1, len(order) - 1),), 2, 4, order=tuple(order)) for order in orders)
    policy = Policy(KVLayout(layers, 4), Recipe(), {"full_heads": 2})
    files = options.pop("files", FILES)
    return convert(checkpoint, plan_surgery(checkpoint, policy), out, files, **options)
