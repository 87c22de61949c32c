from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvsurgery.checkpoint.provenance import Provenance
from kvsurgery.conversion.verify import verify
from kvsurgery.errors import CheckpointError, Mismatch
from tests.helpers.families import EVERY
from tests.helpers.shards import llama_checkpoint, tree


def flip(path: Path, place: int = -1) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def change_provenance(folder: Path, **changes: object) -> None:
    """Change what is recorded, checksum included."""
    record = replace(Provenance.read(folder), **changes)
    (folder / "kvsurgery.json").write_bytes(record.serialize())


@pytest.mark.parametrize("name", EVERY)
def test_conversions_of_every_family_are_sound(checkpoint, mixed, name: str) -> None:
    report = verify(mixed(name).folder, checkpoint(name))
    assert report.unrecorded == ()
    assert report.provenance.source == checkpoint(name).name


def test_counts(source: Path, converted: Path) -> None:
    report = verify(converted)
    assert report.tensors == 21
    # the card and the picture may be edited
    unhashed = {"README.md", "picture.png", "kvsurgery.json"}
    names = {name for name in tree(converted) if not name.endswith(".safetensors")}
    assert report.files == len(names - unhashed)
    assert report.size == sum(path.stat().st_size for path in source.glob("*.safetensors"))


def test_progress_adds_up(source: Path, converted: Path) -> None:
    done: list[int] = []
    verify(converted, source, progress=done.append)
    assert sum(done) == 2 * verify(converted).size


def test_every_byte_of_every_shard_counts(converted: Path) -> None:
    path = converted / "model-00002-of-00003.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for place in [*range(0, header, 41), *range(header, len(content), 97), len(content) - 1]:
        flip(path, place)
        with pytest.raises(Mismatch):
            verify(converted)
        path.write_bytes(content)
    verify(converted)


def test_mismatch_names_the_tensor(converted: Path) -> None:
    flip(converted / "model-00001-of-00003.safetensors")
    with pytest.raises(Mismatch, match=r"^model\.layers\.1\.self_attn\.o_proj\.weight in .*model-00001"):
        verify(converted)
    assert Mismatch.exit_code == 3


@pytest.mark.parametrize("name", ["config.json", "kv_generation.py", "generation_config.json", "tokenizer.json"])
def test_mismatch_names_the_file(converted: Path, name: str) -> None:
    flip(converted / name)
    with pytest.raises(Mismatch, match=f"{name} was changed"):
        verify(converted)
    (converted / name).unlink()
    with pytest.raises(Mismatch, match=f"{name} is missing"):
        verify(converted)


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "model.safetensors.index.json"])
def test_missing_and_truncated_weights(converted: Path, name: str) -> None:
    content = (converted / name).read_bytes()
    (converted / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(Mismatch, match=name):
        verify(converted)
    (converted / name).unlink()
    with pytest.raises(Mismatch, match=name):
        verify(converted)


def test_exchanged_shards(converted: Path) -> None:
    first, second = (converted / f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2))
    first.rename(converted / "x")
    second.rename(first)
    (converted / "x").rename(second)
    with pytest.raises(Mismatch):
        verify(converted)


def test_card_and_pictures_may_be_edited(converted: Path) -> None:
    (converted / "README.md").write_text("better words")
    (converted / "picture.png").unlink()
    verify(converted)


def test_files_that_conversion_did_not_write_are_named(converted: Path) -> None:
    (converted / "custom_generate").mkdir()
    (converted / "custom_generate" / "generate.py").write_text("import os")
    (converted / ".gitattributes").write_text("")
    assert verify(converted).unrecorded == ("custom_generate/generate.py",)


@pytest.mark.parametrize("name", ["model-00003-of-00003.safetensors", "tokenizer.json", "modeling_custom.py"])
def test_another_source(source: Path, converted: Path, name: str) -> None:
    flip(source / name)
    verify(converted)
    with pytest.raises(Mismatch, match="source"):
        verify(converted, source)
    (source / name).unlink()
    with pytest.raises((Mismatch, CheckpointError), match=f"{name} is missing"):
        verify(converted, source)


def test_an_edited_picture_is_no_damage_but_not_the_sources(source: Path, converted: Path) -> None:
    (converted / "picture.png").write_bytes(b"another")
    verify(converted, source)
    (source / "picture.png").write_bytes(b"another")
    with pytest.raises(Mismatch, match=r"picture\.png is not what was converted"):
        verify(converted, source)


def test_a_source_is_looked_at_before_tensors_are_hashed(converted: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty/config\.json"):
        verify(converted, tmp_path / "empty", progress=lambda done: pytest.fail("tensors were hashed"))


def test_a_source_that_was_converted_itself(converted: Path) -> None:
    with pytest.raises(CheckpointError, match="is a converted checkpoint; give the original"):
        verify(converted, converted)


def test_source_split_otherwise(converted: Path, tmp_path: Path) -> None:
    other = llama_checkpoint(tmp_path / "other", shards=2)
    with pytest.raises(Mismatch, match="is not what was converted"):
        verify(converted, other)


def test_what_was_never_converted(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="was not converted by kvsurgery"):
        verify(source)
    with pytest.raises(CheckpointError, match="not a folder"):
        verify(tmp_path / "nowhere")


def test_permutation_that_is_not_the_recorded_one(converted: Path) -> None:
    change_provenance(converted, permutation=((2, 1, 0), (1, 0, 2)))
    with pytest.raises(Mismatch, match=r"layers\.0\.self_attn"):
        verify(converted)


def test_tensor_without_a_record(converted: Path) -> None:
    tensors = dict(Provenance.read(converted).tensors)
    recorded = tensors.pop("lm_head.weight")
    change_provenance(converted, tensors=tensors)
    with pytest.raises(Mismatch, match=r"lm_head\.weight"):
        verify(converted)
    change_provenance(converted, tensors={**tensors, "lm_head.weight": recorded, "ghost": recorded})
    with pytest.raises(Mismatch, match="ghost"):
        verify(converted)
