"""A conversion that stops in the middle goes on with the same command."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from kvsurgery.checkpoint.journal import JOURNAL
from kvsurgery.errors import OutputError
from tests.conversion.interrupting import interrupt, undisturbed
from tests.helpers.shards import FILES, convert_llama, tree


@pytest.mark.parametrize(
    "where", ["kv_generation.py", "model-00002-of-00003.safetensors", "kvsurgery.json", "config.json"]
)
def test_failure_in_the_middle(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    interrupt(source, out, where, monkeypatch)
    names = tree(out)
    assert JOURNAL in names
    assert "config.json" not in names
    assert not [name for name in names if name.endswith(".part")]
    for auto in (AutoConfig, AutoModelForCausalLM):
        with pytest.raises((OSError, ValueError), match=r"config\.json"):
            auto.from_pretrained(out)
    convert_llama(source, out)
    assert tree(out) == undisturbed(source)


def test_write_error_inside_a_shard(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, calls = os.pwrite, []

    def full(*args: object) -> int:
        calls.append(args)
        if len(calls) > 25:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match="No space left"):
        convert_llama(source, out)
    assert (out / "model-00001-of-00003.safetensors").exists()
    assert not (out / "model-00003-of-00003.safetensors").exists()
    assert not list(out.glob("*.part"))


def test_finished_shards_are_kept(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(source, out, "model-00003-of-00003.safetensors", monkeypatch)
    kept = [out / f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2)]
    before = [path.stat().st_mtime_ns for path in kept]
    done: list[int] = []
    report = convert_llama(source, out, progress=done.append)
    assert [path.stat().st_mtime_ns for path in kept] == before
    assert sum(done) == report.size


def test_finished_shard_that_was_lost_is_written_again(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(source, out, "model-00003-of-00003.safetensors", monkeypatch)
    (out / "model-00001-of-00003.safetensors").unlink()
    os.truncate(out / "model-00002-of-00003.safetensors", 100)
    convert_llama(source, out)
    assert tree(out) == undisturbed(source)


@pytest.mark.parametrize("what", ["source", "policy", "emitted"])
def test_unfinished_conversion_of_something_else(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    interrupt(source, out, "config.json", monkeypatch)
    before = tree(out)
    options = {
        "source": {},
        "policy": {"orders": [(0, 1, 2), (1, 0, 2)]},
        "emitted": {"files": {**FILES, "kv_generation.py": b"changed"}},
    }[what]
    if what == "source":
        os.utime(source / "model-00001-of-00003.safetensors", (1, 1))
    with pytest.raises(OutputError, match=f"unfinished run with another .*{what}"):
        convert_llama(source, out, **options)
    assert tree(out) == before


@pytest.mark.parametrize("content", [b"", b"{}\n", b'{"fingerprint": 3}\n', b"\xff\n", b"[1]\n"])
def test_damaged_journal(source: Path, out: Path, content: bytes) -> None:
    out.mkdir()
    (out / JOURNAL).write_bytes(content)
    with pytest.raises(OutputError, match="damaged"):
        convert_llama(source, out)


def test_torn_line_of_the_journal(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(source, out, "config.json", monkeypatch)
    raw = (out / JOURNAL).read_bytes()
    (out / JOURNAL).write_bytes(raw[:-20])
    convert_llama(source, out)
    assert tree(out) == undisturbed(source)


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: lines + b'{"shard": ["x"], "tensors": {"a": "b"}}\n',
        lambda lines: lines + b"[" * 100_000 + b"\n",
        lambda lines: lines + b'{"shard": "../x.safetensors", "tensors": {}}\n',
        lambda lines: re.sub(rb'": "[0-9a-f]{3}', b'": "fff', lines),
        lambda lines: re.sub(rb'": "[0-9a-f]{64}"', b'": 5', lines),
    ],
    ids=["list", "nested", "outside", "digits", "number"],
)
def test_shards_of_a_changed_journal_are_written_again(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    interrupt(source, out, "config.json", monkeypatch)
    first, end, lines = (out / JOURNAL).read_bytes().partition(b"\n")
    (out / JOURNAL).write_bytes(first + end + damage(lines))
    convert_llama(source, out)
    assert tree(out) == undisturbed(source)
