"""Sources that change: while they are read, before a run goes on, after a conversion."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsurgery.conversion.plan import plan_surgery
from kvsurgery.conversion.revert import revert
from kvsurgery.conversion.verify import verify
from kvsurgery.errors import CheckpointError, OutputError
from tests.conversion.interrupting import interrupt, interrupted_at, undisturbed
from tests.helpers import shards
from tests.helpers.shards import FILES, convert_llama, tree


def test_source_that_changed_after_its_conversion(source: Path, out: Path) -> None:
    convert_llama(source, out)
    shard = source / "model-00001-of-00003.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"x")
    with pytest.raises(OutputError, match="newer than its conversion"):
        convert_llama(source, out)


def replaced(path: Path) -> None:
    """Another file of the same size and times has the name."""
    other, status = path.with_name(".other"), path.stat()
    other.write_bytes(path.read_bytes()[:-1] + b"?")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def rewritten(path: Path) -> None:
    """The file has other bytes in place, written a moment later."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


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


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "tokenizer.json"])
def test_other_permissions_are_no_change(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    interrupt(source, out, "model-00003-of-00003.safetensors", monkeypatch)
    (source / name).chmod(0o400)
    os.link(source / name, source.with_name("a second name"))
    report = convert_llama(source, out, progress=lambda count: (source / name).chmod(0o440))
    assert report.resumed > 0
    assert tree(out) == undisturbed(source)


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
