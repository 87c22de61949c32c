from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsurgery.checkpoint.provenance import PROVENANCE, Provenance, is_editable
from kvsurgery.errors import CheckpointError

HASH = "0123456789abcdef" * 4
RECORD = Provenance(
    tool="0.1.0",
    source="org/model",
    revision=None,
    family="llama",
    permutation=((1, 0), (0, 1)),
    profile=HASH,
    policy=HASH,
    options={"sparsity": 0.5},
    headers={"model.safetensors": HASH},
    tensors={"lm_head.weight": HASH},
    emitted={"config.json": HASH, "README.md": None},
    copied={"tokenizer.json": HASH, "chat/tool.jinja": HASH},
    originals={"config.json": b"{}", "README.md": b"\xff\x00"},
    left_out=("original/",),
)


def read(folder: Path, content: Any) -> Provenance:
    (folder / PROVENANCE).write_text(content if isinstance(content, str) else json.dumps(content))
    return Provenance.read(folder)


def test_round_trip(tmp_path: Path) -> None:
    found = read(tmp_path, RECORD.serialize().decode())
    assert found == RECORD
    assert found.serialize() == RECORD.serialize()


def test_people_may_edit_cards_and_pictures() -> None:
    assert is_editable("README.md")
    assert is_editable("docs/Picture.PNG")
    assert not is_editable("config.json")


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 2},
        {"version": None},
        {"unknown": 1},
        {"tool": 1},
        {"source": None},
        {"revision": 3},
        {"policy": None},
        {"profile": HASH[1:]},
        {"options": []},
        {"permutation": [[0.0]]},
        {"permutation": [0]},
        {"permutation": {}},
        {"headers": {"model.safetensors": None}},
        {"headers": {"../model.safetensors": HASH}},
        {"tensors": {"a": HASH.upper()}},
        {"emitted": {"/etc/passwd": HASH}},
        {"copied": {"a//b": HASH}},
        {"copied": {"a/./b": HASH}},
        {"copied": {"": HASH}},
        {"copied": {"x.part": HASH}},
        {"copied": {".kvsurgery-journal": HASH}},
        {"copied": {"config.json": HASH}},
        {"originals": {"config.json": "e30=", "a/../../b": ""}},
        {"originals": {"config.json": "e30=", "kvsurgery.json": ""}},
        {"originals": {"config.json": "not base64"}},
        {"originals": {"config.json": 1}},
        {"originals": {}},
        {"left_out": [1]},
    ],
    ids=str,
)
def test_nothing_in_the_file_is_trusted(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        read(tmp_path, {**json.loads(RECORD.serialize()), **change})


@pytest.mark.parametrize("field", ["tool", "tensors", "left_out", "version"])
def test_missing_field(tmp_path: Path, field: str) -> None:
    content = json.loads(RECORD.serialize())
    del content[field]
    with pytest.raises(CheckpointError, match="damaged"):
        read(tmp_path, content)


@pytest.mark.parametrize("content", ["", "[]", "3", "{", "[" * 100_000])
def test_no_json(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        read(tmp_path, content)
