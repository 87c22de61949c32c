"""The folder that a conversion fills: what may be in it, what is replaced, and who writes it."""

from __future__ import annotations

import builtins
import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsurgery.checkpoint.journal import Journal
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.conversion.revert import revert
from kvsurgery.errors import KVSurgeryError, OutputError
from tests.conversion.interrupting import interrupted_at, undisturbed
from tests.helpers.shards import FILES, convert_llama, tree


@pytest.mark.parametrize(
    "options",
    [{"orders": [(0, 1, 2), (1, 0, 2)]}, {"files": {**FILES, "kv_generation.py": b"changed"}}],
    ids=["policy", "files"],
)
def test_finished_conversion_of_something_else(source: Path, out: Path, options: dict) -> None:
    convert_llama(source, out)
    before = tree(out)
    with pytest.raises(OutputError, match="another conversion"):
        convert_llama(source, out, **options)
    assert tree(out) == before


def test_out_that_is_not_ours(source: Path, out: Path) -> None:
    out.mkdir()
    (out / "thesis.tex").write_text("important")
    with pytest.raises(OutputError, match="not empty"):
        convert_llama(source, out)
    assert tree(out) == {"thesis.tex": b"important"}


def test_out_that_is_the_source_or_inside_it(source: Path, tmp_path: Path) -> None:
    before = tree(source)
    (tmp_path / "link").symlink_to(source)
    for place in (source, source / "out", tmp_path / "link", tmp_path / "link" / "deep" / "out"):
        with pytest.raises(OutputError, match="is the source or inside it"):
            convert_llama(source, place)
    assert tree(source) == before


def test_out_that_is_a_file(source: Path, out: Path) -> None:
    out.write_text("a file")
    for place in (out, out / "deeper"):
        with pytest.raises(OutputError):
            convert_llama(source, place)
    assert out.read_text() == "a file"


def test_too_little_disk(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=9_000))
    with pytest.raises(OutputError, match=r"needs .* but only 8\.79 KiB are free"):
        convert_llama(source, out)
    assert not out.exists()


def unreadable(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of this name can be opened, whoever asks."""
    opened = builtins.open

    def refuse(path: Path, *arguments: object, **options: object) -> object:
        if path == shard:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(builtins, "open", refuse)


def full(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has no room, even after what is replaced is gone."""
    usage = shutil.disk_usage(shard.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=-60_000))


@pytest.mark.parametrize(
    ("prevent", "words"),
    [(unreadable, r"cannot read .*00002-of-00003\.safetensors"), (full, "needs .* are free there")],
)
def test_what_is_replaced_stays_where_its_replacement_is_refused(
    source: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    prevent: Callable[[Path, pytest.MonkeyPatch], None],
    words: str,
) -> None:
    convert_llama(source, out)
    before, checkpoint = tree(out), Checkpoint.open(source)
    prevent(source / "model-00002-of-00003.safetensors", monkeypatch)
    monkeypatch.setattr(Checkpoint, "open", lambda folder: checkpoint)
    with pytest.raises(KVSurgeryError, match=words):
        convert_llama(source, out, orders=((0, 1, 2), (1, 0, 2)), overwrite=True)
    monkeypatch.undo()
    assert tree(out) == before


def test_no_permission(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # root may write anywhere, so the answer is made up
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(OutputError, match="no permission"):
        convert_llama(source, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "size"), [("model-00002-of-00003.safetensors", 100), ("tokenizer.json", None), ("kv_generation.py", None)]
)
def test_a_finished_conversion_that_lacks_something(source: Path, out: Path, name: str, size: int | None) -> None:
    convert_llama(source, out)
    (out / "picture.png").unlink()
    assert convert_llama(source, out).already_done
    (out / name).unlink() if size is None else os.truncate(out / name, size)
    with pytest.raises(OutputError, match=f"{name} is missing.*; `overwrite` .*, or choose another"):
        convert_llama(source, out)


def test_overwriting_an_update_that_was_interrupted(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_llama(source, out)
    (out / "notes.md").write_text("my own words")
    (source / "picture.png").write_text("other pixels")
    interrupted_at(1, monkeypatch, lambda: convert_llama(source, out))
    (source / "picture.png").write_text("pixels once more")
    with pytest.raises(OutputError, match=r"did not write \(notes.md\)"):
        convert_llama(source, out, overwrite=True)
    (out / "notes.md").rename(out.with_name("notes.md"))
    convert_llama(source, out, overwrite=True)
    assert tree(out) == undisturbed(source)


@pytest.mark.parametrize("count", [2, 6, 12])
def test_a_removal_that_was_interrupted_goes_on(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    convert_llama(source, out)
    (out / "model-00002-of-00003.safetensors").unlink()
    unlink, removed = os.unlink, []

    def stop(path: Path) -> None:
        removed.append(path)
        if len(removed) == count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr("kvsurgery.conversion.replacing.os.unlink", stop)
        with pytest.raises(OutputError, match="cannot remove"):
            convert_llama(source, out, overwrite=True)
    assert len(removed) == count
    convert_llama(source, out, overwrite=True)
    assert tree(out) == undisturbed(source)


def test_two_conversions_at_once(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.mkdir()
    journal = Journal.open(out, {"source": "another process"})
    with pytest.raises(OutputError, match="another process"):
        convert_llama(source, out)
    journal.close()


RACER = """
import sys
from collections.abc import Callable
from pathlib import Path
from kvsurgery.errors import KVSurgeryError
from kvsurgery.conversion.revert import revert
from tests.helpers.shards import convert_llama
source, out, how = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
orders = {"same": ((2, 0, 1), (1, 0, 2)), "other": ((0, 1, 2), (1, 0, 2))}
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    try:
        report = revert(source, out) if how == "revert" else convert_llama(source, out, orders=orders[how])
        print("done" if report.already_done else "written", flush=True)
    except KVSurgeryError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize("second", ["other", "revert"])
def test_processes_that_write_one_folder(source: Path, out: Path, tmp_path: Path, second: str) -> None:
    """Each of them tries again and again; one conversion is written, once, and the others are told."""
    places = {"same": source, "other": source, "revert": tmp_path / "undisturbed"}
    expected = {"same": undisturbed(source)}
    convert_llama(source, tmp_path / "other", orders=((0, 1, 2), (1, 0, 2)))
    expected["other"] = tree(tmp_path / "other")
    revert(places["revert"], tmp_path / "back")
    expected["revert"] = tree(tmp_path / "back")
    kinds = ["same", second, second, "same"]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(places[kind]), str(out), kind],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for kind in kinds
    ]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * len(racers)
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    results = [racer.communicate() for racer in racers]
    assert [error for _, error in results] == [""] * len(racers)
    lines = [line for text, _ in results for line in text.splitlines()]
    assert lines.count("written") == 1
    told = "another process is writing|holds another conversion|is not empty|holds an unfinished run"
    assert all(line in ("written", "done") or re.search(told, line) for line in lines)
    winner = next(kind for kind, (text, _) in zip(kinds, results, strict=True) if "written" in text.splitlines())
    assert tree(out) == expected[winner]
