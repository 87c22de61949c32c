from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from kvsurgery.checkpoint import headers
from kvsurgery.checkpoint.headers import read_shard
from kvsurgery.errors import CheckpointError
from tests.helpers.families import make
from tests.helpers.shards import noise_shard, raw_shard


def entry(shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32", **extra: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra}


def test_agrees_with_safetensors(tmp_path: Path) -> None:
    path = make("llama", tmp_path / "llama") / "model.safetensors"
    shard = read_shard(path)
    content = path.read_bytes()
    reference = dict(safetensors.deserialize(content))
    assert {tensor.name for tensor in shard.tensors} == reference.keys()
    for tensor in shard.tensors:
        expected = reference[tensor.name]
        assert (tensor.dtype, list(tensor.shape)) == (expected["dtype"], expected["shape"])
        assert content[tensor.start : tensor.end] == bytes(expected["data"])
    assert content.startswith(shard.header)
    assert shard.size == len(content)
    assert [tensor.start for tensor in shard.tensors] == sorted(tensor.start for tensor in shard.tensors)


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    path = noise_shard(tmp_path / "x.safetensors", {"a": [], "b": [0, 3], "c": [2]})
    assert [(tensor.name, tensor.size) for tensor in read_shard(path).tensors] == [("a", 4), ("b", 0), ("c", 8)]
    assert read_shard(raw_shard(tmp_path / "y.safetensors", {})).tensors == ()


DUPLICATE = b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2)
BAD_HEADERS = {
    "not-json": b'{"a": ',
    "not-utf8": b'{"\xff": 1}',
    "not-an-object": b"[1, 2]",
    "leading-space": b' {"a":%b}' % json.dumps(entry()).encode(),
    "deeply-nested": b'{"a":' * 50_000,
    "huge-number": b'{"a": {"dtype": "F32", "shape": [%b], "data_offsets": [0, 8]}}' % (b"9" * 5000),
    "nan": b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}',
    "duplicate-name": DUPLICATE,
    "entry-is-a-list": {"a": [1]},
    "extra-key": {"a": entry(offset=0)},
    "missing-key": {"a": {"dtype": "F32", "shape": [2]}},
    "metadata-not-strings": {"__metadata__": {"format": 1}, "a": entry()},
    "metadata-not-an-object": {"__metadata__": "pt", "a": entry()},
    "unknown-dtype": {"a": entry(dtype="F33")},
    "dtype-not-a-string": {"a": entry(dtype=["F32"])},
    "shape-not-a-list": {"a": entry(shape="2")},
    "negative-shape": {"a": entry(shape=[-1, -2])},
    "float-shape": {"a": entry(shape=[2.0])},
    "boolean-shape": {"a": entry(shape=[True, 2])},
    "size-differs-from-shape": {"a": entry(shape=[3])},
    "overflowing-shape": {"a": entry(shape=[2**62, 4, 2])},
    "one-offset": {"a": entry(offsets=[8])},
    "three-offsets": {"a": entry(offsets=[0, 4, 8])},
    "negative-offset": {"a": entry(offsets=[-8, 0])},
    "reversed-offsets": {"a": entry(offsets=[8, 0])},
    "overlap": {"a": entry(), "b": entry(shape=[1], offsets=[4, 8])},
    "same-place-twice": {"a": entry(), "b": entry()},
    "hole": {"a": entry(shape=[1], offsets=[0, 4]), "b": entry(shape=[0], offsets=[8, 8])},
    "hole-at-the-start": {"a": entry(shape=[1], offsets=[4, 8])},
    "bytes-left-over": {"a": entry(shape=[1], offsets=[0, 4])},
    "beyond-the-end": {"a": entry(shape=[3], offsets=[0, 12])},
    "half-a-byte": {"a": entry(dtype="F4", shape=[15], offsets=[0, 8])},
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_bad_header_is_refused_by_name(tmp_path: Path, header: dict | bytes) -> None:
    path = raw_shard(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_shard(path)


@pytest.mark.parametrize("length", [0, 7, 8, 20, 100])
def test_truncated_anywhere(tmp_path: Path, length: int) -> None:
    path = noise_shard(tmp_path / "model.safetensors", {"a": [2]})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match="truncated"):
        read_shard(path)


def test_header_larger_than_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="truncated"):
        read_shard(raw_shard(tmp_path / "x", {"a": entry()}, bytes(8), length=2**63))


def test_oversized_header_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "MAX_HEADER_BYTES", 10)
    with pytest.raises(CheckpointError, match="at most 10"):
        read_shard(noise_shard(tmp_path / "x", {"a": [2]}))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_shard(tmp_path / "x")


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, header: bytes, length: int) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    raw_shard(path, b"{" + header, length=length)
    try:
        shard = read_shard(path)
    except CheckpointError:
        return
    assert shard.size == path.stat().st_size
