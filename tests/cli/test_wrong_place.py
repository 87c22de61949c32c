"""Results that cannot be written where they were asked for, and terminals that cannot show them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import BARS, CONVERT, PROFILE, done, nothing_happens, refused, save_profile
from tests.helpers.shards import llama_checkpoint, tree


def test_names_that_the_terminal_cannot_show(here: Path) -> None:
    Path("llama").rename("modèle")
    os.rename(PROFILE, b"\xff.safetensors")
    typed = ["kvsurgery", "convert", "modèle", "--profile", os.fsdecode(b"\xff.safetensors"), "--dry-run"]
    for encoding in ("ascii", "utf-8"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", *typed]
        result = subprocess.run(command, env=environment, capture_output=True, check=True)
        assert result.stdout.startswith("modèle".encode(encoding, "backslashreplace"))


@pytest.fixture(params=[False, True], ids=["buffered", "unbuffered"])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """Variables under which Python buffers stdout, and under which it does not."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVSURGERY_"))}
    return {**plain, "PYTHONUNBUFFERED": "1"} if request.param else plain


def run_into(stdout: int, arguments: tuple[str, ...], environment: dict[str, str]) -> tuple[int, list[str]]:
    """Exit code and lines on stderr, without those of progress bars, of a command with this stdout."""
    command = [sys.executable, "-m", "kvsurgery", *arguments]
    result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    return result.returncode, [line for line in lines if not line.startswith(BARS)]


# by click, by rich, and by both after work
PRINTING = [("--help",), ("inspect", "llama", "--json"), ("inspect", "llama"), ("profile", "show", PROFILE), CONVERT]
printing = pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)


@printing
def test_output_that_cannot_be_written(here: Path, environment: dict[str, str], arguments: tuple[str, ...]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    assert run_into(full, arguments, environment) == (1, ["kvsurgery: [Errno 28] No space left on device"])
    os.close(full)
    if arguments == CONVERT:
        done("verify", "out")


@printing
def test_a_reader_that_has_enough(here: Path, environment: dict[str, str], arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    assert run_into(write, arguments, environment) == (1, [])
    os.close(write)


def test_stdout_that_is_closed(here: Path, environment: dict[str, str]) -> None:
    command = 'exec "$0" -m kvsurgery inspect llama >&-'
    subprocess.run(["bash", "-c", command, sys.executable], env=environment, check=True)


class TestOut:
    """`--out` in a wrong place; what lies there stays."""

    @pytest.mark.parametrize(
        ("out", "words"),
        [
            ("taken", "taken is not empty; choose another folder"),
            (PROFILE, f"{PROFILE} is not a folder"),
            (f"{PROFILE}/out", "cannot write"),
            ("llama", "llama is the source or inside it"),
            ("../here/llama", "is the source"),
            ("link", "link is the source"),
            ("llama/deep/out", "llama/deep/out is the source or inside it"),
            ("link/out", "inside it"),
            (".", "not empty"),
            ("dangling", "dangling is not a folder"),
            ("/proc/out", "/proc/out"),
            ("x" * 300, "cannot write xxx.*: File name too long"),
        ],
    )
    def test_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, words: str) -> None:
        here = tmp_path / "here"
        llama_checkpoint(here / "llama", shards=3)
        monkeypatch.chdir(here)
        save_profile()
        (here / "taken").mkdir()
        (here / "taken/notes.txt").write_text("mine")
        (here / "link").symlink_to("llama")
        (here / "dangling").symlink_to("gone")
        nothing_happens(here, words, "convert", "llama", "--profile", PROFILE, "--out", out)

    def test_a_dry_run_says_so_too(self, here: Path) -> None:
        arguments = ("convert", "llama", "--profile", PROFILE, "--out", "llama/deep/out", "--dry-run")
        nothing_happens(here, "llama/deep/out is the source or inside it", *arguments)

    def test_read_only(self, here: Path) -> None:
        Path("locked").mkdir(mode=0o555)
        if os.access("locked", os.W_OK):
            pytest.skip("root may write anywhere")
        nothing_happens(here, "no permission in .*locked", *CONVERT[:-1], "locked/out")

    @pytest.mark.parametrize("command", ["convert", "revert"])
    def test_disk_too_small(self, here: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
        done("convert", "llama", "--profile", PROFILE, "--out", "duo")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 999, 1))
        arguments = CONVERT if command == "convert" else ("revert", "duo", "--out", "out")
        nothing_happens(here, r"out needs [\d.]+ KiB, but only 1 B are free there", *arguments)

    def test_disk_that_fills_up(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            line = refused(*CONVERT)
        assert line.endswith("cannot write out: No space left on device; rerun the same command to resume")
        assert not Path("out/config.json").exists()
        done(*CONVERT)
        done("verify", "out")

    def test_another_conversion_is_kept(self, here: Path) -> None:
        done("convert", "llama", "--profile", PROFILE, "--out", "duo")
        arguments = ("convert", "llama", "--profile", PROFILE, "--out", "duo", "--sparsity", 0.2)
        nothing_happens(here, "duo holds another conversion; choose another folder", *arguments)


class TestOverwrite:
    """`--overwrite` replaces what kvsurgery wrote, and nothing else."""

    OTHER = (*CONVERT, "--sparsity", 0.2, "--overwrite")

    def expected(self, here: Path) -> dict[str, bytes]:
        done("convert", "llama", "--profile", PROFILE, "--sparsity", 0.2, "--out", "expected")
        return tree(here / "expected")

    def test_another_conversion(self, here: Path) -> None:
        done(*CONVERT, "--kv-bits", 8)
        done(*self.OTHER)
        assert tree(here / "out") == self.expected(here)

    def test_an_empty_or_a_new_folder(self, here: Path) -> None:
        Path("out").mkdir()
        done(*self.OTHER)
        assert tree(here / "out") == self.expected(here)

    def test_the_same_conversion_stays(self, here: Path) -> None:
        done(*self.OTHER)
        before = Path("out/config.json").stat().st_ino
        assert "nothing to do" in done(*self.OTHER).out
        assert Path("out/config.json").stat().st_ino == before

    def test_a_damaged_conversion(self, here: Path) -> None:
        done(*self.OTHER)
        next(Path("out").glob("*.safetensors")).unlink()
        assert "`--overwrite`" not in refused(*self.OTHER[:-1])
        done(*self.OTHER)
        assert tree(here / "out") == self.expected(here)

    @pytest.mark.parametrize("first", [CONVERT, OTHER[:-1]], ids=["other", "same"])
    def test_an_unfinished_run(self, here: Path, monkeypatch: pytest.MonkeyPatch, first: tuple) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            refused(*first)
        done(*self.OTHER)
        assert tree(here / "out") == self.expected(here)

    def test_a_file_of_somebody_else(self, here: Path) -> None:
        done(*CONVERT)
        Path("out/notes.txt").write_text("mine")
        before = tree(here / "out")
        assert "notes.txt" in refused(*self.OTHER)
        assert tree(here / "out") == before

    @pytest.mark.parametrize("out", ["taken", "llama", "."])
    def test_a_folder_of_somebody_else(self, here: Path, out: str) -> None:
        Path("taken").mkdir()
        Path("taken/config.json").write_text("{}")
        words = "was not written by kvsurgery"
        nothing_happens(here, words, "convert", "llama", "--profile", PROFILE, "--out", out, "--overwrite")
