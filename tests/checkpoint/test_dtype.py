"""The dtype that a checkpoint is loaded in, beside what transformers loads with `dtype="auto"`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from kvsurgery import inspect
from kvsurgery.checkpoint.dtype import loading_dtype
from kvsurgery.checkpoint.source import Checkpoint, read_config
from kvsurgery.errors import UnsupportedModel
from kvsurgery.templates.kv_layout import KVLayout
from tests.helpers.families import make
from tests.helpers.surgery import convert_folder

KEYS = ("dtype", "torch_dtype")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("stock") / "llama", num_hidden_layers=1)


def edited(source: Path, folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a checkpoint without any dtype in its config, which is then edited."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in KEYS:
            section.pop(key, None)
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("half", ["lm_head", "model.embed_tokens", "model.layers", ""])
@pytest.mark.parametrize("shards", [1, 2])
def test_mixed_weights(llama: Path, tmp_path: Path, half: str, shards: int) -> None:
    folder = edited(llama, tmp_path / "m", lambda config: None)
    weights = load_file(folder / "model.safetensors")
    weights = {name: weight.bfloat16() if name.startswith(half) else weight for name, weight in weights.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        (folder / "model.safetensors").unlink()
        files = {name: f"model-{1 + ('layers' not in name)}.safetensors" for name in weights}
        for file in {*files.values()}:
            save_file({name: weights[name] for name in weights if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    checkpoint = Checkpoint.open(folder)
    dtype = str(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype).removeprefix("torch.")
    assert loading_dtype(checkpoint.config, checkpoint.shards) == dtype


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"torch_dtype": "half"},
        {"dtype": None, "torch_dtype": "double"},
        {"dtype": "float16", "torch_dtype": "float32"},
    ],
    ids=str,
)
def test_settings(llama: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = edited(llama, tmp_path / "m", lambda config: config.update(settings))
    checkpoint = Checkpoint.open(folder)
    dtype = str(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype).removeprefix("torch.")
    assert loading_dtype(checkpoint.config, checkpoint.shards) == dtype


@pytest.mark.parametrize("value", ["auto", "fp16", "torch.bfloat16", "int8", "float8_e4m3fn", 3, {"": "bfloat16"}, []])
def test_what_transformers_cannot_load(llama: Path, tmp_path: Path, value: object) -> None:
    folder = edited(llama, tmp_path / "m", lambda config: config.update(dtype=value))
    with pytest.raises(UnsupportedModel, match=r"dtype is .*bfloat16"):
        convert_folder(folder, tmp_path / "out", sparsity=0.5)
    assert not (tmp_path / "out").exists()
    assert "dtype" in str(inspect(folder).problem)


def predicted_and_held(folder: Path, auto: Any) -> tuple[int, int]:
    """KV bytes that a converted checkpoint's card is computed from, and those of the cache of its loaded model."""
    [row, *_] = inspect(folder).surgery.kv_bytes
    model = auto.from_pretrained(folder, dtype="auto", trust_remote_code=True)
    weight = next(weight for name, weight in model.named_parameters() if "k_proj" in name and "vision" not in name)
    layout = KVLayout.from_config(read_config(folder))
    return row["after"], layout.kv_bytes(1, row["tokens"], itemsize=weight.dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predicted_bytes_without_a_dtype(llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = edited(llama, tmp_path / "m", lambda config: None)
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight.to(dtype) for name, weight in weights.items()}, folder / "model.safetensors")
    out = convert_folder(folder, tmp_path / "out", sparsity=0.5).folder
    predicted, held = predicted_and_held(out, AutoModelForCausalLM)
    assert predicted == held
    assert read_config(out)["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("outer", [None, "float32", "bfloat16"])
def test_a_text_model_with_a_dtype_of_its_own(
    checkpoint: Callable[[str], Path], tmp_path: Path, outer: str | None
) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["dtype"] = outer
        config["text_config"]["torch_dtype"] = "float16"

    folder = edited(checkpoint("pixtral"), tmp_path / "m", edit)
    out = convert_folder(folder, tmp_path / "out", sparsity=0.5).folder
    predicted, held = predicted_and_held(out, AutoModelForImageTextToText)
    assert predicted == held
