from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvsurgery.checkpoint.source import Checkpoint, read_config
from kvsurgery.errors import CheckpointError, UnsupportedModel
from tests.helpers.families import make
from tests.helpers.shards import LLAMA, llama_checkpoint, llama_shapes, noise_shard

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return llama_checkpoint(tmp_path / "m", shards=3)


def edit_index(folder: Path, **names: object) -> None:
    """Change or (None) remove entries of the weight map."""
    content = json.loads((folder / INDEX).read_text())
    for tensor, name in names.items():
        if name is None:
            del content["weight_map"][tensor]
        else:
            content["weight_map"][tensor] = name
    (folder / INDEX).write_text(json.dumps(content))


@pytest.mark.parametrize("shard", ["5GB", "40KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_saves(tmp_path: Path, shard: str, tied: bool) -> None:
    folder = make("llama", tmp_path / "llama", shard=shard, tie_word_embeddings=tied)
    checkpoint = Checkpoint.open(folder)
    assert (len(checkpoint.shards) > 1) == (shard == "40KB")
    assert (checkpoint.index is None) == (shard == "5GB")
    assert checkpoint.has_output is not tied
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.name == "llama"
    assert checkpoint.size == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    folder = llama_checkpoint(tmp_path / "blobs", shards=2)
    snapshot = tmp_path / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(os.path.relpath(path, snapshot))
    checkpoint = Checkpoint.open(snapshot, "org/model", "0a1b")
    assert [tensor.name for tensor in checkpoint.tensors] == [t.name for t in Checkpoint.open(folder).tensors]
    assert (checkpoint.name, checkpoint.revision) == ("org/model", "0a1b")


def test_index_of_a_single_file(tmp_path: Path) -> None:
    folder = llama_checkpoint(tmp_path / "m")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(llama_shapes(), "model.safetensors")}))
    assert Checkpoint.open(folder).index is not None


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "..", "", "x.bin", 3, None, ["x.safetensors"]],
    ids=str,
)
def test_index_names_only_files_of_the_folder(sharded: Path, name: object) -> None:
    content = json.loads((sharded / INDEX).read_text())
    content["weight_map"]["lm_head.weight"] = name
    (sharded / INDEX).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="not a file of this folder"):
        Checkpoint.open(sharded)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors is missing"):
        Checkpoint.open(sharded)


def test_link_to_nothing_is_a_missing_shard(sharded: Path) -> None:
    path = sharded / "model-00002-of-00003.safetensors"
    path.unlink()
    path.symlink_to("../blobs/gone")
    with pytest.raises(CheckpointError, match="is missing"):
        Checkpoint.open(sharded)


def test_tensor_in_another_shard_than_the_index_says(sharded: Path) -> None:
    edit_index(sharded, **{"lm_head.weight": "model-00002-of-00003.safetensors"})
    with pytest.raises(CheckpointError, match=r"'lm_head.weight'.*it is in model-00001"):
        Checkpoint.open(sharded)


def test_tensor_that_no_shard_has(sharded: Path) -> None:
    edit_index(sharded, ghost="model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"'ghost'.*it is in no shard"):
        Checkpoint.open(sharded)


def test_tensor_that_the_index_omits(sharded: Path) -> None:
    edit_index(sharded, **{"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"does not name 'lm_head.weight'"):
        Checkpoint.open(sharded)


def test_tensor_in_two_shards(sharded: Path) -> None:
    noise_shard(sharded / "extra.safetensors", {"lm_head.weight": [1], "extra": [1]})
    edit_index(sharded, extra="extra.safetensors")
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' is in both"):
        Checkpoint.open(sharded)


def test_single_file_beside_other_shards(sharded: Path) -> None:
    noise_shard(sharded / "model.safetensors", {"a": [1]})
    with pytest.raises(CheckpointError, match="both"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"weight_map": []}', '{"weight_map": {}}'])
def test_broken_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=r"index.json"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_broken_config(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


def test_weights_that_another_file_says_are_quantized(tmp_path: Path) -> None:
    """ModelOpt's file of before 0.31 is refused without its copy in config.json, which newer versions write."""
    config = json.loads((llama_checkpoint(tmp_path / "m") / "config.json").read_text())
    (tmp_path / "m" / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(UnsupportedModel, match=r"hf_quant_config\.json(.|\n)*ModelOpt 0\.31"):
        read_config(tmp_path / "m")
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path / "m") == config


def test_no_folder_and_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(CheckpointError, match=r"no model.safetensors"):
        Checkpoint.open(tmp_path)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin(.|\n)*from_pretrained(.|\n)*save_pretrained"):
        Checkpoint.open(tmp_path)


def test_adapter_is_refused(tmp_path: Path) -> None:
    folder = llama_checkpoint(tmp_path / "m")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="adapter"):
        Checkpoint.open(folder)
