from __future__ import annotations

import json
import math
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.head_profile import HeadProfile
from tests.helpers.hub_repo import Blob
from tests.helpers.hub_server import serve
from tests.helpers.shards import raw_shard

MIB = 1 << 20
# not getrusage: its peak starts with the parent's, and the parent has loaded torch
RUN = """
from kvsurgery.cli import cli
cli(standalone_mode=False)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
SHAPES = {
    "model.embed_tokens.weight": [131072, 1024],
    "model.layers.0.self_attn.q_proj.weight": [8192, 1024],
    "model.layers.0.self_attn.k_proj.weight": [2048, 1024],
    "model.layers.0.self_attn.v_proj.weight": [2048, 1024],
    "model.layers.0.self_attn.o_proj.weight": [1024, 8192],
    "model.layers.0.input_layernorm.weight": [1024],
    "model.layers.0.post_attention_layernorm.weight": [1024],
    "model.layers.0.mlp.gate_proj.weight": [32768, 1024],
    "model.layers.0.mlp.up_proj.weight": [32768, 1024],
    "model.layers.0.mlp.down_proj.weight": [1024, 32768],
    "model.norm.weight": [1024],
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """A checkpoint of 530 MiB and its profile; the weights are a hole, which takes no room but reads like any bytes."""
    source = tmp_path / "source"
    source.mkdir()
    header, end = {}, 0
    for name, shape in SHAPES.items():
        begin, end = end, end + math.prod(shape) * 2
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}
    assert end > 400 * MIB
    weights = raw_shard(source / "model.safetensors", header)
    os.truncate(weights, weights.stat().st_size + end)
    (source / "config.json").write_text(json.dumps(CONFIG))
    scores = np.random.default_rng(0).random((1, 16))
    HeadProfile(scores, "duo", "kv", "m", ModelDimensions(1, 64, 16, 128)).save(tmp_path / "p")
    return source


def peak(folder: Path, source: str | Path, *options: str, **environment: str) -> int:
    """Bytes of memory that a conversion took at most."""
    arguments = ["convert", str(source), "--profile", str(folder / "p"), "--out", str(folder / "out"), *options]
    command = [sys.executable, "-c", RUN, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    return int(result.stdout.split()[-2]) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["4", "32"])
def test_peak_memory_does_not_follow_the_size(tmp_path: Path, sparse: Path, jobs: str) -> None:
    assert peak(tmp_path, sparse, "--jobs", jobs) < 160 * MIB


@pytest.mark.slow
def test_nor_does_it_when_streaming(tmp_path: Path, sparse: Path) -> None:
    with serve() as hub, open(sparse / "model.safetensors", "rb") as file:
        repo = hub.create("surgeon/sparse")
        weights = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        repo.commit(
            {"config.json": Blob((sparse / "config.json").read_bytes()), "model.safetensors": Blob(weights, "0" * 64)},
            "main",
        )
        options = hub.client_environment(tmp_path)
        assert peak(tmp_path, "surgeon/sparse", "--stream", "--jobs", "16", **options) < 160 * MIB
    # seven tensors, of which norms would be fetched with their neighbors
    assert sum(path.endswith("model.safetensors") for path, _, _ in hub.ranges) <= 2 + len(SHAPES)
    # nothing of the weights lies in the cache
    assert sum(path.stat().st_size for path in (tmp_path / "hf").rglob("*") if path.is_file()) < MIB
