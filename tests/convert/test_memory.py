from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvsurgery.dimensions import ModelDimensions
from kvsurgery.score.profile import HeadProfile
from tests.shards import raw_shard

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
    "model.layers.0.mlp.up_proj.weight": [32768, 1024],
    "model.layers.0.mlp.down_proj.weight": [1024, 32768],
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["4", "32"])
def test_peak_memory_does_not_follow_the_size(tmp_path: Path, jobs: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    header, end = {}, 0
    for name, shape in SHAPES.items():
        begin, end = end, end + math.prod(shape) * 2
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}
    weights = raw_shard(source / "model.safetensors", header)
    # a hole, which takes no room but is read like any bytes
    os.truncate(weights, weights.stat().st_size + end)
    (source / "config.json").write_text(json.dumps(CONFIG))
    scores = np.random.default_rng(0).random((1, 16))
    HeadProfile(scores, "duo", "kv", "m", ModelDimensions(1, 64, 16, 128)).save(tmp_path / "p")

    arguments = ["convert", str(source), "--profile", str(tmp_path / "p"), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", RUN, *arguments, "--jobs", jobs]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert end > 400 * MIB
    assert int(result.stdout.split()[-2]) * 1024 < 160 * MIB
