"""The published profiles on models of the shapes they were measured on, against heads picked by hand."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsurgery.conversion.engine import Target, move_bytes
from kvsurgery.conversion.prepared import PreparedConversion
from kvsurgery.policy.evidence import Evidence
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from tests.helpers.command import done
from tests.helpers.shards import SIZES, tree

PROFILES = Path(os.environ.get("KVSURGERY_SHARED", Path(__file__).parents[2] / "shared")) / "profiles"
pytestmark = pytest.mark.skipif(
    not PROFILES.is_dir(), reason=f"no {PROFILES}: set KVSURGERY_SHARED to a folder with the published profiles"
)

# lengths that KV bytes are given for, by the model's positions
SHOWN = {1 << 20: (32 << 10, 128 << 10, 512 << 10, 1 << 20), 32 << 10: (512, 2 << 10, 8 << 10, 32 << 10)}
# config.json as published
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 1048576,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 3580165449.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.39.1",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "type": "linear"},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.31.0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0",
    "use_cache": True,
    "vocab_size": 32000,
}
HEAD_DIM = 128
# folder of the DuoAttention gates -> config, the `total_size` of the published index, streaming KV heads by default
DUO = {
    "Llama-3-8B-Instruct-Gradient-1048k": (LLAMA_3_8B, 16_060_522_496, 128),
    "Mistral-7B-Instruct-v0.2": (MISTRAL_7B, 14_483_464_192, 128),
    "Llama-2-7B-32K-Instruct": (LLAMA_2_7B, 13_476_831_232, 768),
}
HEADKV = {"headkv-r": "Llama-3-8B-Instruct_R.json", "headkv-r2": "Llama-3-8B-Instruct_R2.json"}


def shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Every tensor of such a model."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[f"num_{kind}_heads"] * HEAD_DIM for kind in ("attention", "key_value"))
    layer = {
        "input_layernorm": [hidden],
        "mlp.down_proj": [hidden, inner],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "post_attention_layernorm": [hidden],
        "self_attn.k_proj": [kv, hidden],
        "self_attn.o_proj": [hidden, q],
        "self_attn.q_proj": [q, hidden],
        "self_attn.v_proj": [kv, hidden],
    }
    result = {"model.embed_tokens.weight": [config["vocab_size"], hidden]}
    for index in range(config["num_hidden_layers"]):
        result |= {f"model.layers.{index}.{part}.weight": shape for part, shape in layer.items()}
    return result | {"model.norm.weight": [hidden], "lm_head.weight": [config["vocab_size"], hidden]}


def make(folder: Path, config: Mapping[str, Any], shards: Sequence[Sequence[str]], noise: Sequence[int]) -> Path:
    """A bf16 checkpoint of holes, but for random bytes in the shards `noise`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    every, weights = shapes(config), {}
    for place, names in enumerate(shards):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            begin, end = end, end + math.prod(every[name]) * SIZES["BF16"]
            header[name] = {"dtype": "BF16", "shape": every[name], "data_offsets": [begin, end]}
        raw = json.dumps(header).encode()
        file_name = f"model-{place + 1:05d}-of-{len(shards):05d}.safetensors"
        with open(folder / file_name, "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            if place in noise:
                file.write(np.random.default_rng(place).bytes(end))
            file.truncate(8 + len(raw) + end)
        weights |= dict.fromkeys(names, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder


def read(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a file: their elements' bits as uint16."""
    content = np.memmap(path, np.uint8, "r")
    base = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:base].tobytes())
    del header["__metadata__"]
    result = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        result[name] = content[base + begin : base + end].view("<u2").reshape(entry["shape"])
    return result


def orders(scores: np.ndarray, full: int) -> list[list[int]]:
    """Per layer, the KV heads: the `full` best of the model, then the others, each in their order."""
    places = [(-score, layer, head) for (layer, head), score in np.ndenumerate(scores)]
    best = {(layer, head) for _, layer, head in sorted(places)[:full]}
    layers, heads = scores.shape
    return [sorted(range(heads), key=lambda head: ((layer, head) not in best, head)) for layer in range(layers)]


def check_layer(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], layer: int, order: list[int]
) -> None:
    """All heads of a layer lie where the order says: rows of q, k and v, columns of o."""
    prefix = f"model.layers.{layer}.self_attn."
    group = len(before[f"{prefix}q_proj.weight"]) // len(before[f"{prefix}k_proj.weight"])
    for place, head in enumerate(order):
        for part, width in (("q", group * HEAD_DIM), ("k", HEAD_DIM), ("v", HEAD_DIM), ("o", group * HEAD_DIM)):
            old, new = (tensors[f"{prefix}{part}_proj.weight"] for tensors in (before, after))
            if part == "o":
                old, new = old.T, new.T
            there, here = slice(head * width, (head + 1) * width), slice(place * width, (place + 1) * width)
            np.testing.assert_array_equal(new[here], old[there], f"{prefix}{part}, head {head} at {place}")


def small(folder: Path, config: Mapping[str, Any]) -> Path:
    """A checkpoint of random bytes with all the heads of a model, but narrow, in three shards."""
    config = {**config, "hidden_size": 64, "intermediate_size": 16, "vocab_size": 16, "head_dim": HEAD_DIM}
    names = [*shapes(config)]
    third = len(names) // 3 + 1
    return make(folder, config, [names[start : start + third] for start in range(0, len(names), third)], range(3))


def converted(folder: Path, profile: Path, out: Path, *options: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The facts that `convert --json` prints, and the tensors it wrote."""
    facts = json.loads(done("convert", folder, "--profile", profile, "--out", out, "--json", *options).out)
    return facts, {name: tensor for path in out.glob("*.safetensors") for name, tensor in read(path).items()}


@pytest.mark.parametrize("name", DUO)
def test_duo(tmp_path: Path, name: str) -> None:
    config, _, streaming = DUO[name]
    source = small(tmp_path / "source", config)
    done("profile", "import", "duo", PROFILES / "duo" / name, "--model", source, "-o", tmp_path / "profile")
    facts, after = converted(source, tmp_path / "profile", tmp_path / "out")
    heads = 32 * config["num_key_value_heads"]
    assert (facts["kv_heads"]["eligible"], facts["kv_heads"]["streaming"]) == (heads, streaming)

    gates = np.loadtxt(PROFILES / "duo" / name / "full_attention_heads.tsv").clip(0, 1)
    expected = orders(gates, heads - streaming)
    before = {name: tensor for path in source.glob("*.safetensors") for name, tensor in read(path).items()}
    assert before.keys() == after.keys()
    for layer in range(32):
        check_layer(before, after, layer, expected[layer])
    for tensor, content in before.items():
        if "self_attn" not in tensor:
            np.testing.assert_array_equal(after[tensor], content, tensor)

    for row, length in zip(facts["kv_bytes"], SHOWN[config["max_position_embeddings"]], strict=True):
        element = 2 * HEAD_DIM * 2
        assert (row["tokens"], row["before"]) == (length, heads * length * element)
        # full heads keep everything, the others 64 sinks and 256 recent tokens
        assert row["after"] == ((heads - streaming) * length + streaming * 320) * element
    assert row["after"] / row["before"] == pytest.approx(1 - streaming / heads, abs=1e-2)

    done("verify", tmp_path / "out", "--source", source)
    done("revert", tmp_path / "out", "--out", tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("method", HEADKV)
def test_headkv(tmp_path: Path, method: str, reduce: str) -> None:
    source, file = small(tmp_path / "source", LLAMA_3_8B), PROFILES / "headkv" / HEADKV[method]
    profile = tmp_path / "profile"
    done("profile", "import", "headkv", file, "--method", method, "--model", source, "-o", profile)
    facts, after = converted(
        source, profile, tmp_path / "out", "--full-heads", 64, "--budget", 120, "--group-reduce", reduce
    )
    assert facts["policy"]["group_reduce"] == reduce
    assert sum(layer["full"] for layer in facts["layers"]) == 64
    assert sum(sum(layer["budgets"]) for layer in facts["layers"]) == 120 * (256 - 64)

    trials = json.loads(file.read_text())
    scores = np.float32([[np.mean(trials[f"{layer}-{head}"]) for head in range(32)] for layer in range(32)])
    groups = np.float64(scores).reshape(32, 8, 4)
    expected = orders(np.float32(groups.mean(-1) if reduce == "mean" else groups.max(-1)), 64)
    before = {name: tensor for path in source.glob("*.safetensors") for name, tensor in read(path).items()}
    for layer in range(32):
        check_layer(before, after, layer, expected[layer])
    assert [layer["full"] for layer in facts["layers"]] != [2] * 32


@pytest.mark.parametrize("name", DUO)
def test_full_size(tmp_path: Path, name: str) -> None:
    """The plan of the model as published, and one layer of it moved; the rest of the files are holes."""
    config, total_size, streaming = DUO[name]
    layer, names = 14, [*shapes(config)]
    attention = [tensor for tensor in names if tensor.startswith(f"model.layers.{layer}.self_attn.")]
    rest = [tensor for tensor in names if tensor not in attention]
    shards = [rest[:100], rest[100:200], rest[200:], attention]
    source = make(tmp_path / "source", config, shards, noise=[3])
    assert sum(path.stat().st_blocks * 512 for path in source.iterdir()) < 200 << 20
    profile = tmp_path / "profile"
    done("profile", "import", "duo", PROFILES / "duo" / name, "--model", source, "-o", profile)

    plan = json.loads(done("convert", source, "--profile", profile, "--dry-run", "--json").out)
    assert plan["kv_heads"]["streaming"] == streaming
    assert plan["tensors"]["moved"] <= 4 * 32

    prepared = PreparedConversion.prepare(source, Recipe(), Evidence(HeadProfile.load(profile)))
    assert sum(tensor.size for tensor in prepared.checkpoint.tensors) == total_size
    shard = prepared.checkpoint.shards[3]
    with open(tmp_path / "moved", "wb") as file:
        move_bytes(shard, prepared.plan.moves, Target(file.fileno()))
    gates = np.loadtxt(PROFILES / "duo" / name / "full_attention_heads.tsv").clip(0, 1)
    expected = orders(gates, 32 * config["num_key_value_heads"] - streaming)[layer]
    assert expected != sorted(expected)
    check_layer(read(shard.path), read(tmp_path / "moved"), layer, expected)
