from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from kvsurgery.checkpoint.journal import JOURNAL
from kvsurgery.conversion.revert import revert
from kvsurgery.errors import CheckpointError, Mismatch, OutputError
from tests.helpers.families import EVERY, make
from tests.helpers.shards import tree
from tests.helpers.surgery import convert_folder

# what conversion neither copies nor keeps
LOST = {".env", ".cache/huggingface/download", "pytorch_model.bin", "original/consolidated.00.pth", "onnx/model.onnx"}
LOST |= {"model.Q4_K.gguf"}


def checksums(folder: Path) -> dict[str, str]:
    return {name: sha256(content).hexdigest() for name, content in tree(folder).items()}


@pytest.mark.parametrize("name", EVERY)
def test_every_file_of_every_family_comes_back(checkpoint, mixed, tmp_path: Path, name: str) -> None:
    assert checksums(mixed(name).folder) != checksums(checkpoint(name))
    revert(mixed(name).folder, tmp_path / "back")
    assert checksums(tmp_path / "back") == checksums(checkpoint(name))


@pytest.mark.parametrize("shard", ["5GB", "40KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_shards_and_tied_weights_come_back(tmp_path: Path, shard: str, tied: bool) -> None:
    source = make("llama", tmp_path / "source", shard=shard, tie_word_embeddings=tied)
    converted = convert_folder(source, tmp_path / "converted")
    revert(converted.folder, tmp_path / "back")
    assert checksums(tmp_path / "back") == checksums(source)


def test_side_files_come_back(source: Path, converted: Path, tmp_path: Path) -> None:
    shutil.move(source, tmp_path / "gone")
    report = revert(converted, tmp_path / "back")
    before = tree(tmp_path / "gone")
    assert tree(tmp_path / "back") == {name: content for name, content in before.items() if name not in LOST}
    assert {name.rstrip("/").split("/")[0] for name in report.left_out} == {name.split("/")[0] for name in LOST}
    assert report.source == "source"


def test_edited_card_is_no_obstacle(source: Path, converted: Path, tmp_path: Path) -> None:
    (converted / "README.md").write_text("my own words")
    (converted / "config.json").write_text("{}")
    revert(converted, tmp_path / "back")
    assert (tmp_path / "back" / "README.md").read_text() == "original card"


def test_repeating_a_finished_revert(converted: Path, tmp_path: Path) -> None:
    assert not revert(converted, tmp_path / "back").already_done
    before = tree(tmp_path / "back")
    assert revert(converted, tmp_path / "back").already_done
    (tmp_path / "back" / "model-00002-of-00003.safetensors").write_bytes(
        before["model-00002-of-00003.safetensors"][:-1] + b"?"
    )
    with pytest.raises(OutputError, match="not empty"):
        revert(converted, tmp_path / "back")


@pytest.mark.parametrize("name", ["model-00003-of-00003.safetensors", "tokenizer.json", "picture.png"])
def test_changed_bytes_leave_nothing_behind(converted: Path, tmp_path: Path, name: str) -> None:
    content = bytearray((converted / name).read_bytes())
    content[-1] ^= 1
    (converted / name).write_bytes(content)
    with pytest.raises(Mismatch, match=name):
        revert(converted, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(Mismatch, match=name):
        revert(converted, tmp_path / "empty")
    assert tree(tmp_path / "empty") == {}


def test_nothing_is_left_of_an_interrupted_run_that_finds_damage(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But what the run did not write stays, whatever its journal says."""
    back, weights = tmp_path / "back", converted / "model-00003-of-00003.safetensors"
    (tmp_path / "mine.safetensors").write_text("mine")
    content, status = bytearray(weights.read_bytes()), weights.stat()
    interrupted_at(12, monkeypatch, lambda: revert(converted, back))
    (back / "notes").mkdir()
    (back / "notes" / "mine.txt").write_text("mine")
    with (back / JOURNAL).open("a") as journal:
        journal.write('{"shard": "../mine.safetensors", "tensors": {"a": "b"}}\n')
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(Mismatch, match=weights.name):
        revert(converted, back)
    assert tree(back) == {"notes/mine.txt": b"mine"}
    assert (tmp_path / "mine.safetensors").read_text() == "mine"


@pytest.mark.parametrize("name", ["model-00003-of-00003.safetensors", "tokenizer.json", "picture.png"])
def test_missing_file(converted: Path, tmp_path: Path, name: str) -> None:
    (converted / name).unlink()
    with pytest.raises(Mismatch, match=f"{name} is missing"):
        revert(converted, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_save_pretrained_wrote_again_is_refused(mixed, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixed("llama").folder, trust_remote_code=True)
    model.save_pretrained(tmp_path / "again", max_shard_size="40KB")
    with pytest.raises(CheckpointError, match="save_pretrained"):
        revert(tmp_path / "again", tmp_path / "back")
    # into the same folder, beside the old provenance
    over = shutil.copytree(mixed("llama").folder, tmp_path / "over")
    (over / "model.safetensors").unlink()
    model.save_pretrained(over, max_shard_size="40KB")
    with pytest.raises(Mismatch, match="save_pretrained"):
        revert(over, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("place", ["", "out", "../converted/deep/out"])
def test_out_inside_the_converted_folder(converted: Path, place: str) -> None:
    before = tree(converted)
    with pytest.raises(OutputError, match="inside it"):
        revert(converted, converted / place)
    assert tree(converted) == before


def test_names_in_the_provenance_stay_in_the_folder(converted: Path, tmp_path: Path) -> None:
    content = json.loads((converted / "kvsurgery.json").read_text())
    content["originals"]["../escaped"] = ""
    (converted / "kvsurgery.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="escaped"):
        revert(converted, tmp_path / "back")
    assert not (tmp_path / "escaped").exists()


def interrupted_at(count: int, monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """Run until the disk is full, when so many files would have got their names."""
    replace, calls = os.replace, []

    def full(start: Path, end: Path) -> None:
        calls.append(end)
        if len(calls) == count:
            raise OSError(28, "No space left on device")
        replace(start, end)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OutputError, match="rerun the same command to resume"):
            run()


def test_resumes(converted: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    back = tmp_path / "back"
    interrupted_at(12, monkeypatch, lambda: revert(converted, back))
    assert not (back / "config.json").exists()
    kept = back / "model-00001-of-00003.safetensors"
    before = kept.stat().st_mtime_ns
    revert(converted, back)
    assert kept.stat().st_mtime_ns == before
    assert checksums(back) == {name: value for name, value in checksums(source).items() if name not in LOST}
