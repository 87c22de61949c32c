"""Conversion against `cp` and `sync` of the same files, taking turns in one run.

    python benchmarks/convert.py --gb 4 --rounds 3

The checkpoint is random bytes in the shapes of Llama-3-8B, with as many layers as the size asks for. Before every turn
the source is dropped from the page cache and the disk is idle. Prints throughput, the ratio, and the peak memory of the
converting process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.head_profile import HeadProfile

HIDDEN, INTERMEDIATE, QUERY_HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
LAYER = {
    "input_layernorm.weight": [HIDDEN],
    "mlp.down_proj.weight": [HIDDEN, INTERMEDIATE],
    "mlp.gate_proj.weight": [INTERMEDIATE, HIDDEN],
    "mlp.up_proj.weight": [INTERMEDIATE, HIDDEN],
    "post_attention_layernorm.weight": [HIDDEN],
    "self_attn.k_proj.weight": [KV_HEADS * HEAD_DIM, HIDDEN],
    "self_attn.o_proj.weight": [HIDDEN, QUERY_HEADS * HEAD_DIM],
    "self_attn.q_proj.weight": [QUERY_HEADS * HEAD_DIM, HIDDEN],
    "self_attn.v_proj.weight": [KV_HEADS * HEAD_DIM, HIDDEN],
}
LAYER_BYTES = sum(2 * int(np.prod(shape)) for shape in LAYER.values())


def write_shard(path: Path, tensors: dict[str, list[int]]) -> None:
    """A bfloat16 shard of random bytes."""
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    noise = os.urandom(1 << 24)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for begin in range(0, end, len(noise)):
            file.write(noise[: end - begin])


def write_checkpoint(folder: Path, layers: int, layers_per_shard: int) -> None:
    """A sharded Llama checkpoint without embeddings."""
    folder.mkdir()
    names = {}
    for first in range(0, layers, layers_per_shard):
        name = f"model-{first // layers_per_shard + 1:05d}.safetensors"
        tensors = {
            f"model.layers.{layer}.{part}": shape
            for layer in range(first, min(first + layers_per_shard, layers))
            for part, shape in LAYER.items()
        }
        write_shard(folder / name, tensors)
        names |= dict.fromkeys(tensors, name)
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 131072,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def timed(command: list[str], source: Path) -> tuple[float, int]:
    """Seconds until a command is done and all is on disk, and its peak memory in bytes."""
    os.sync()
    for path in source.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    os.sync()
    return time.perf_counter() - begin, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers-per-shard", type=int, default=3)
    parser.add_argument("--folder", help="where to write, three times --gb  [default: the temporary folder]")
    arguments = parser.parse_args()
    layers = round(arguments.gb * 1e9 / LAYER_BYTES)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        source, copy, out = (Path(temporary) / name for name in ("source", "copy", "out"))
        write_checkpoint(source, layers, arguments.layers_per_shard)
        scores = np.random.default_rng(0).random((layers, KV_HEADS))
        model = ModelDimensions(layers, QUERY_HEADS, KV_HEADS, HEAD_DIM)
        profile = Path(temporary) / "profile.safetensors"
        HeadProfile(scores, "duo", "kv", "random", model).save(profile)
        size = sum(path.stat().st_size for path in source.iterdir())
        print(f"{size / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} shards, {os.cpu_count()} CPUs")
        converting = [sys.executable, "-m", "kvsurgery", "convert", str(source), "--profile", str(profile)]
        ratios = []
        for _ in range(arguments.rounds):
            copying, _ = timed(["cp", "-r", str(source), str(copy)], source)
            shutil.rmtree(copy)
            seconds, memory = timed([*converting, "--out", str(out)], source)
            shutil.rmtree(out)
            ratios.append(copying / seconds)
            print(
                f"cp + sync {size / copying / 1e9:.2f} GB/s, convert {size / seconds / 1e9:.2f} GB/s, "
                f"ratio {ratios[-1]:.2f}, peak memory {memory / 2**20:.0f} MiB"
            )
        print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
