from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from transformers import AutoConfig, AutoModelForCausalLM

from kvsurgery.checkpoint.journal import JOURNAL, Journal
from kvsurgery.conversion.output import Output
from kvsurgery.conversion.plan import plan_surgery
from kvsurgery.conversion.revert import revert
from kvsurgery.conversion.verify import verify
from kvsurgery.errors import CheckpointError, OutputError
from tests.helpers import shards
from tests.helpers.shards import FILES, convert_llama, tree

INDEX = "model.safetensors.index.json"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_what_is_written(source: Path, out: Path) -> None:
    report = convert_llama(source, out)
    before, after = tree(source), tree(out)
    shards = {name for name in before if name.endswith(".safetensors")}
    copied = {"tokenizer.json", "LICENSE", "picture.png", "additional_chat_templates/tool.jinja", INDEX}
    assert after.keys() == shards | copied | FILES.keys() | {"kvsurgery.json"}
    assert {name: after[name] for name in copied} == {name: before[name] for name in copied}
    assert {name: after[name] for name in FILES} == FILES
    assert all(len(after[name]) == len(before[name]) for name in shards)
    assert {".env", ".cache/", "pytorch_model.bin", "original/", "onnx/", "model.Q4_K.gguf"} == set(report.left_out)
    assert (report.tensors, report.moved) == (21, 8)
    assert report.size == sum(len(before[name]) for name in shards)


def test_secrets_are_not_taken_along(source: Path, out: Path) -> None:
    convert_llama(source, out)
    kept = json.loads((out / "kvsurgery.json").read_text())["originals"]
    assert kept.keys() == {".gitattributes", "README.md", "config.json", "generation_config.json", "modeling_custom.py"}
    assert b"SECRET" not in b"".join(tree(out).values())


def test_provenance_hashes_are_of_the_source(source: Path, out: Path) -> None:
    convert_llama(source, out)
    provenance = json.loads((out / "kvsurgery.json").read_text())
    assert provenance["source"] == "source"
    assert provenance["permutation"] == [[2, 0, 1], [1, 0, 2]]
    assert provenance["copied"]["LICENSE"] == blake3(b"do what you like").hexdigest()
    assert provenance["emitted"]["kv_generation.py"] == blake3(b"pass").hexdigest()
    assert provenance["emitted"]["README.md"] is None
    assert provenance["copied"]["picture.png"] == blake3((source / "picture.png").read_bytes()).hexdigest()
    for name, digest in provenance["headers"].items():
        raw = (source / name).read_bytes()
        assert digest == blake3(raw[: 8 + int.from_bytes(raw[:8], "little")]).hexdigest()


@pytest.mark.parametrize("jobs", [1, 8])
def test_the_same_input_gives_the_same_bytes(source: Path, out: Path, tmp_path: Path, jobs: int) -> None:
    convert_llama(source, out, jobs=jobs)
    elsewhere = tmp_path / "elsewhere" / "source"
    shutil.copytree(source, elsewhere)
    convert_llama(elsewhere, tmp_path / "deep" / "down" / "out")
    assert tree(out) == tree(tmp_path / "deep" / "down" / "out")


def test_modes_are_left_to_the_umask(source: Path, out: Path) -> None:
    before = os.umask(0o027)
    try:
        convert_llama(source, out)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*") if path.is_file()} == {0o640}


def test_repeating_a_finished_conversion(source: Path, out: Path) -> None:
    convert_llama(source, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert convert_llama(source, out).already_done
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


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


def test_source_that_changed_after_its_conversion(source: Path, out: Path) -> None:
    convert_llama(source, out)
    shard = source / "model-00001-of-00003.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"x")
    with pytest.raises(OutputError, match="newer than its conversion"):
        convert_llama(source, out)


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


def test_no_permission(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # root may write anywhere, so the answer is made up
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(OutputError, match="no permission"):
        convert_llama(source, out)
    assert not out.exists()


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


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The disk is full when the file `name` gets written."""
    write, shard = Output.write, Output.shard

    def full(output: Output, wanted: str) -> None:
        if wanted == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Output, "write", lambda self, name, content: full(self, name) or write(self, name, content))
    monkeypatch.setattr(
        Output, "shard", lambda self, item, *args, **kw: full(self, item.name) or shard(self, item, *args, **kw)
    )


def interrupt(source: Path, out: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert until the disk is full, when the file `name` gets written."""
    with monkeypatch.context() as patch:
        fail_at(patch, name)
        with pytest.raises(OutputError, match="No space left on device; rerun the same command to resume"):
            convert_llama(source, out)


def interrupted_at(count: int, monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """Run until the disk is full, when file number `count` would have got its name."""
    replace, calls = os.replace, []

    def full(start: Path, end: Path) -> None:
        calls.append(end)
        if len(calls) == count + 1:  # the first is the journal
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(start, end)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OutputError, match="rerun the same command to resume"):
            run()


def undisturbed(source: Path) -> dict[str, bytes]:
    """The files of a conversion that nothing interrupts."""
    convert_llama(source, source.with_name("undisturbed"))
    return tree(source.with_name("undisturbed"))


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


def test_a_folder_with_the_name_of_an_emitted_file(source: Path, out: Path) -> None:
    (source / "kv_generation.py").mkdir()
    (source / "kv_generation.py" / "words.txt").write_text("words")
    with pytest.raises(CheckpointError, match=r"kv_generation\.py is a folder, and conversion writes a file"):
        convert_llama(source, out)
    assert not out.exists()


def test_two_conversions_at_once(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.mkdir()
    journal = Journal.open(out, {"source": "another process"})
    with pytest.raises(OutputError, match="another process"):
        convert_llama(source, out)
    journal.close()


def replaced(path: Path) -> None:
    """Another file of the same size and times has the name."""
    other, status = path.with_name(".other"), path.stat()
    other.write_bytes(path.read_bytes()[:-1] + b"?")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def rewritten(path: Path) -> None:
    """The file has other bytes in place, and its old times."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [replaced, rewritten, os.utime, Path.unlink, Path.touch])
@pytest.mark.parametrize(
    "name",
    [
        "model-00001-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "config.json",
        "tokenizer.json",
        "new.json",
    ],
)
@pytest.mark.parametrize("moment", ["planned", "reading"])
def test_source_that_changes_while_it_is_read(
    source: Path, out: Path, name: str, change: Callable[[Path], None], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, moments = source / name, []
    if not path.exists() and change is not Path.touch:
        pytest.skip("there is nothing to change")

    def change_once() -> None:
        if not moments:
            moments.append(name)
            change(path)

    if moment == "planned":
        with monkeypatch.context() as patch:
            patch.setattr(shards, "plan_surgery", lambda *arguments: change_once() or plan_surgery(*arguments))
            with pytest.raises(
                CheckpointError, match=rf"{name}.*changed while it was read|cannot read .*{name}|{name} is not JSON"
            ):
                convert_llama(source, out)
    else:
        with pytest.raises(
            CheckpointError, match=rf"{name}.*changed while it was read|cannot read .*{name}|{name} is not JSON"
        ):
            convert_llama(source, out, progress=lambda count: change_once())
    assert not (out / "config.json").exists()
    if path.exists() and name != "config.json":  # the command that the message advises
        convert_llama(source, out)
        verify(out, source)


@pytest.mark.parametrize("change", [replaced, rewritten])
@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "tokenizer.json"])
def test_a_source_that_changed_is_not_resumed(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Path], None]
) -> None:
    interrupt(source, out, "model-00003-of-00003.safetensors", monkeypatch)
    change(source / name)
    with pytest.raises(OutputError, match="unfinished run with another source"):
        convert_llama(source, out)
    assert not (out / "config.json").exists()


def change_side_files(source: Path) -> None:
    """Change, add and remove files beside the weights."""
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates" / "tool.jinja").unlink()
    (source / "LICENSE").write_text("do what you must")
    (source / "modeling_custom.py").write_text("pass")
    (source / "picture.png").write_text("other pixels")
    (source / "flax_model.msgpack").write_text("other weights")


@pytest.mark.parametrize("kill", [None, *range(1, 7)])
def test_side_files_that_changed_are_written_again(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, kill: int | None
) -> None:
    convert_llama(source, out)
    shard = out / "model-00001-of-00003.safetensors"
    before = shard.stat().st_mtime_ns
    (out / "README.md").write_text("my own words")
    change_side_files(source)
    if kill is None:
        report = convert_llama(source, out)
        assert not report.already_done
        assert set(report.updated) == {
            "LICENSE",
            "additional_chat_templates/tool.jinja",
            "chat_template.jinja",
            "kvsurgery.json",
            "picture.png",
        }
        assert (out / "README.md").read_text() == "my own words"
    else:
        interrupted_at(kill, monkeypatch, lambda: convert_llama(source, out))
        assert not (out / "config.json").exists()
        convert_llama(source, out)
    assert shard.stat().st_mtime_ns == before
    assert not (out / "additional_chat_templates").exists()
    verify(out, source)
    revert(out, out.with_name("back"))
    assert (out.with_name("back") / "modeling_custom.py").read_text() == "pass"
    assert convert_llama(source, out).already_done
    (out / "README.md").write_bytes(FILES["README.md"])
    assert tree(out) == undisturbed(source)


def test_a_card_that_changed_in_the_source(source: Path, out: Path) -> None:
    convert_llama(source, out)
    (source / "README.md").write_text("another card")
    assert convert_llama(source, out, files={**FILES, "README.md": b"card of another"}).updated == (
        "README.md",
        "kvsurgery.json",
    )
    assert (out / "README.md").read_bytes() == b"card of another"


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


RACER = """
import sys
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
