from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvsurgery.checkpoint.side_files import MAX_KEPT_BYTES, side_files


def files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "LICENSE",
        "NOTICE.txt",
        "USE_POLICY.md",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "additional_chat_templates/rag.jinja",
        "1_Pooling/config.json",
        "merges.txt",
        "preprocessor_config.json",
        "figures/heads.png",
        "Something Nobody Thought Of.tsv",
    ],
)
def test_copied(tmp_path: Path, name: str) -> None:
    assert side_files(files(tmp_path, name), [], []).copied == (name,)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json",
        "model.safetensors.index.fp32.json",
        "consolidated.safetensors",
        "tf_model.h5",
        "flax_model.msgpack",
        "optimizer.PT",
        "training_args.bin",
        "Model.Q4_K_M.GGUF",
        ".env",
        "model.safetensors.part",
        "tokenizer.json.lock",
        "kvsurgery.json",
    ],
)
def test_left_out(tmp_path: Path, name: str) -> None:
    sides = side_files(files(tmp_path, name), [], [])
    assert (sides.copied, sides.originals, sides.left_out) == ((), {}, (name,))


@pytest.mark.parametrize("folder", ["original", "onnx", ".git", ".cache", "checkpoint-500", "__pycache__", "Metal"])
def test_left_out_folders(tmp_path: Path, folder: str) -> None:
    sides = side_files(files(tmp_path, f"{folder}/config.json", f"{folder}/tokenizer.json"), [], [])
    assert (sides.copied, sides.originals, sides.left_out) == ((), {}, (f"{folder}/",))


def test_weights_are_none_of_them(tmp_path: Path) -> None:
    files(tmp_path, "model.safetensors", "model.safetensors.index.json", "other.safetensors")
    sides = side_files(tmp_path, ["model.safetensors", "model.safetensors.index.json"], [])
    assert (sides.copied, sides.left_out) == ((), ("other.safetensors",))


def test_replaced_files_and_code_are_kept(tmp_path: Path) -> None:
    files(tmp_path, "config.json", "modeling.py", "tools/run.py", ".gitattributes", "tokenizer.json")
    (tmp_path / "huge.py").write_bytes(bytes(MAX_KEPT_BYTES + 1))
    sides = side_files(tmp_path, [], ["config.json", "README.md"])
    assert sides.originals == {
        name: name.encode() for name in (".gitattributes", "config.json", "modeling.py", "tools/run.py")
    }
    assert sides.copied == ("tokenizer.json",)
    assert sides.left_out == ("huge.py",)


def test_order_does_not_depend_on_the_disk(tmp_path: Path) -> None:
    names = ["b.txt", "a/z.txt", "a.txt", "C.txt", "a/b/c.txt"]
    first = side_files(files(tmp_path / "1", *names), [], []).copied
    second = side_files(files(tmp_path / "2", *reversed(names)), [], []).copied
    assert first == second


def test_what_is_neither_file_nor_folder(tmp_path: Path) -> None:
    files(tmp_path, "elsewhere/tokenizer.json", "m/a.txt")
    os.mkfifo(tmp_path / "m" / "pipe")
    (tmp_path / "m" / "linked").symlink_to(tmp_path / "elsewhere")
    sides = side_files(tmp_path / "m", [], [])
    assert (sides.copied, sides.left_out) == (("a.txt",), ("linked/",))
