from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.checkpoint.headers import read_shard
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.conversion import engine
from kvsurgery.conversion.engine import Target, move_bytes
from kvsurgery.conversion.plan import plan_moves, unmoved
from kvsurgery.errors import CheckpointError, Mismatch
from tests.helpers.shards import SIZES, noise_shard

HEAD_DIM = 3
PROJECTIONS = {
    "llama": {
        "q_proj.weight": ("q", "hidden"),
        "q_proj.bias": ("q",),
        "k_proj.weight": ("k", "hidden"),
        "k_proj.bias": ("k",),
        "v_proj.weight": ("k", "hidden"),
        "v_proj.bias": ("k",),
        "o_proj.weight": ("hidden", "q"),
        "o_proj.bias": ("hidden",),
    },
    "olmo2": {
        "q_proj.weight": ("q", "hidden"),
        "q_norm.weight": ("q",),
        "k_proj.weight": ("k", "hidden"),
        "k_norm.weight": ("k",),
        "v_proj.weight": ("k", "hidden"),
        "o_proj.weight": ("hidden", "q"),
    },
    "qwen3": {
        "q_proj.weight": ("q", "hidden"),
        "q_norm.weight": ("head",),
        "k_proj.weight": ("k", "hidden"),
        "k_norm.weight": ("head",),
        "v_proj.weight": ("k", "hidden"),
        "o_proj.weight": ("hidden", "q"),
    },
    "phi3": {"qkv_proj.weight": ("qkk", "hidden"), "o_proj.weight": ("hidden", "q")},
}


def heads_moved(array: np.ndarray, symbols: Sequence[str], order: Sequence[int]) -> np.ndarray:
    """The reference: split an axis into its KV heads, or groups, with numpy."""
    if symbols[0] == "qkk":
        group = array.shape[0] // len(order) - 2 * HEAD_DIM
        borders = [group * len(order), (group + HEAD_DIM) * len(order)]
        return np.concatenate([heads_moved(part, ("q", "hidden"), order) for part in np.split(array, borders)])
    for axis, symbol in enumerate(symbols):
        if symbol in ("q", "k"):
            heads = np.split(array, len(order), axis)
            return np.concatenate([heads[head] for head in order], axis)
    return array


@st.composite
def surgeries(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 5))
    return {
        "family": draw(st.sampled_from(sorted(PROJECTIONS))),
        "dtype": draw(st.sampled_from(["F16", "BF16", "F32", "F64"])),
        "kv_heads": kv_heads,
        "group": draw(st.integers(1, 3)),
        "hidden": draw(st.integers(1, 9)),
        "orders": draw(st.lists(st.permutations(range(kv_heads)), min_size=1, max_size=3)),
        "jobs": draw(st.integers(1, 3)),
        "window": draw(st.integers(600, 2000)),
    }


@given(surgeries())
def test_any_surgery_equals_numpy_and_can_be_undone(
    tmp_path_factory: pytest.TempPathFactory, surgery: dict[str, Any]
) -> None:
    kv_heads, jobs = surgery["kv_heads"], surgery["jobs"]
    query_heads = kv_heads * surgery["group"]
    sizes = {
        "q": query_heads * HEAD_DIM,
        "k": kv_heads * HEAD_DIM,
        "qkk": (query_heads + 2 * kv_heads) * HEAD_DIM,
        "hidden": surgery["hidden"],
        "head": HEAD_DIM,
    }
    projections = PROJECTIONS[surgery["family"]]
    shapes = {
        f"model.layers.{layer}.self_attn.{name}": [sizes[symbol] for symbol in symbols]
        for layer in range(len(surgery["orders"]))
        for name, symbols in projections.items()
    }
    folder = tmp_path_factory.mktemp("m")
    config = {
        "model_type": surgery["family"],
        "num_hidden_layers": len(surgery["orders"]),
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": surgery["hidden"],
        "head_dim": HEAD_DIM,
    }
    (folder / "config.json").write_text(json.dumps(config))
    source = noise_shard(folder / "model.safetensors", {**shapes, "model.norm.weight": [7]}, surgery["dtype"])
    checkpoint = Checkpoint.open(folder)
    moves = plan_moves(checkpoint.tensors, checkpoint.model, surgery["orders"])

    with pytest.MonkeyPatch.context() as patch:
        # windows far smaller than tensors, so that runs and rows lie across their borders
        patch.setattr(engine, "WINDOW", surgery["window"])
        hashes = written(folder / "moved", source, moves, jobs=jobs)
        back = written(folder / "back", folder / "moved", moves, jobs=jobs, inverse=True, expected=hashes)
        assert move_bytes(read_shard(folder / "moved"), moves, jobs=jobs, inverse=True) == hashes == back

    assert (folder / "back").read_bytes() == source.read_bytes()
    before, after = (dict(safetensors.deserialize(path.read_bytes())) for path in (source, folder / "moved"))
    assert before.keys() == after.keys()
    for name, entry in before.items():
        assert hashes[name] == blake3(bytes(entry["data"])).hexdigest()
        if name == "model.norm.weight":
            assert after[name] == entry
            continue
        layer, part = int(name.split(".")[2]), name.split("self_attn.")[1]
        array = np.frombuffer(entry["data"], f"V{SIZES[surgery['dtype']]}").reshape(entry["shape"])
        expected = heads_moved(array, projections[part], surgery["orders"][layer])
        assert bytes(after[name]["data"]) == expected.tobytes()


def written(path: Path, source: Path, moves: dict[str, Any], **options: Any) -> dict[str, str]:
    with open(path, "wb") as file:
        return move_bytes(read_shard(source), moves, Target(file.fileno()), **options)


def test_progress_adds_up(tmp_path: Path) -> None:
    source = noise_shard(tmp_path / "x", {"a": [100], "b": [0], "c": [3]})
    shard = read_shard(source)
    done: list[int] = []
    move_bytes(shard, {tensor.name: unmoved(tensor) for tensor in shard.tensors}, progress=done.append)
    assert sum(done) == source.stat().st_size


def test_first_failure_is_the_one_raised(tmp_path: Path) -> None:
    source = noise_shard(tmp_path / "x", {f"t{index}": [50] for index in range(40)})
    shard = read_shard(source)
    moves = {tensor.name: unmoved(tensor) for tensor in shard.tensors}
    hashes = move_bytes(shard, moves)
    with pytest.raises(Mismatch, match="t17"):
        move_bytes(shard, moves, expected={**hashes, "t17": "0" * 64}, jobs=3)
    with pytest.raises(Mismatch, match="t5"):
        move_bytes(shard, moves, expected={name: digest for name, digest in hashes.items() if name != "t5"})


def test_shard_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    source = noise_shard(tmp_path / "x", {"a": [100]})
    shard = read_shard(source)
    os.truncate(source, source.stat().st_size - 4)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        move_bytes(shard, {"a": unmoved(shard.tensors[0])})
    source.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        move_bytes(shard, {"a": unmoved(shard.tensors[0])})


def test_short_reads_and_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = noise_shard(tmp_path / "x", {"a": [1000]})
    shard = read_shard(source)
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:17]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: math.ceil(len(data) / 2)], at))
    written(tmp_path / "y", source, {"a": unmoved(shard.tensors[0])})
    assert (tmp_path / "y").read_bytes() == source.read_bytes()
