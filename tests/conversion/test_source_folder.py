"""Files of the source that are no ordinary files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvsurgery.checkpoint.source import INDEX
from kvsurgery.conversion.revert import revert
from kvsurgery.conversion.verify import verify
from kvsurgery.errors import CheckpointError
from tests.helpers.shards import convert_llama


def test_link_to_nothing_among_the_side_files(source: Path, out: Path) -> None:
    (source / "vocab.json").symlink_to("../blobs/gone")
    with pytest.raises(CheckpointError, match=r"vocab\.json is a broken link"):
        convert_llama(source, out)
    assert not out.exists()


def test_links_to_files_of_the_folder_are_copied_as_files(source: Path, out: Path) -> None:
    (source / "vocab.json").symlink_to("tokenizer.json")
    (source / "tokens").mkdir()
    (source / "tokens" / "vocab.json").symlink_to("../vocab.json")
    convert_llama(source, out)
    assert (out / "vocab.json").read_text() == (out / "tokens" / "vocab.json").read_text() == "{}"
    assert not (out / "vocab.json").is_symlink()


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("vocab.json", "/proc/self/environ"),
        ("vocab.json", "../secret"),
        ("README.md", "../secret"),
        ("config.json", "../secret"),
        ("model-00002-of-00003.safetensors", "../secret"),
        (INDEX, "../secret"),
        ("custom.py", "../secret"),
        ("additional_chat_templates/secret.jinja", "../../secret"),
        ("vocab.json", "first"),
        ("vocab.json", ".env"),
    ],
)
def test_links_out_of_the_folder_are_refused(source: Path, out: Path, name: str, target: str) -> None:
    path, secret = source / name, source.with_name("secret")
    shutil.copy(path if path.exists() else source / "config.json", secret)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    if target == "first":
        (source / "first").symlink_to(".second")
        (source / ".second").symlink_to("../secret")
    with pytest.raises(CheckpointError, match=f"{'first' if target == 'first' else name} is a link to"):
        convert_llama(source, out)
    assert not out.exists()


def test_a_snapshot_of_the_hub_cache_has_links_to_its_own_blobs(source: Path, out: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0a1b", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(source, blobs)
    (snapshot / "additional_chat_templates").mkdir()
    shutil.move(blobs / "additional_chat_templates" / "tool.jinja", blobs / "tool")
    (snapshot / "additional_chat_templates" / "tool.jinja").symlink_to("../../../blobs/tool")
    for path in blobs.iterdir():
        if path.is_file():
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    convert_llama(snapshot, out)
    (tmp_path / "models--c--d" / "blobs").mkdir(parents=True)
    (tmp_path / "models--c--d" / "blobs" / "x").write_text("x")
    (snapshot / "other.json").symlink_to("../../../models--c--d/blobs/x")
    with pytest.raises(CheckpointError, match=r"other\.json is a link to"):
        convert_llama(snapshot, tmp_path / "out-2")


def test_a_folder_with_the_name_of_an_emitted_file(source: Path, out: Path) -> None:
    (source / "kv_generation.py").mkdir()
    (source / "kv_generation.py" / "words.txt").write_text("words")
    with pytest.raises(CheckpointError, match=r"kv_generation\.py is a folder, and conversion writes a file"):
        convert_llama(source, out)
    assert not out.exists()


def test_folders_in_folders(source: Path, out: Path) -> None:
    deep = source / "deep"
    for folder in ["d" * 200] * 6:
        deep /= folder
    deep.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="move it out of the checkpoint"):
        convert_llama(source, out)
    shutil.rmtree(source / "deep")
    source.joinpath(*["d"] * 60).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="move it out of the checkpoint"):
        convert_llama(source, out)
    assert not out.exists()


def test_names_that_are_no_text(source: Path, out: Path) -> None:
    names = ["line\nbreak.txt", os.fsdecode(b"latin-\xe9.txt"), "license"]
    for name in names:
        (source / name).write_text(name.encode(errors="replace").decode())
    convert_llama(source, out)
    verify(out, source)
    revert(out, out.with_name("back"))
    assert all((out.with_name("back") / name).is_file() for name in names)


@pytest.mark.parametrize("name", ["README.md", "generation_config.json", "tokenizer.json", "config.json", "pipe"])
def test_pipes_are_refused_and_not_read(source: Path, out: Path, name: str) -> None:
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        convert_llama(source, out)
    assert not out.exists()
