"""`verify` and `revert` on what they should not accept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvsurgery.errors import CheckpointError
from tests.helpers.command import PROFILE, done, nothing_happens, run
from tests.helpers.shards import llama_checkpoint

SHARD = "model-00002-of-00003.safetensors"


def header(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    tensors = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    del tensors["__metadata__"]
    return tensors


class TestWayBack:
    """`verify` and `revert` on what they should not accept."""

    @pytest.fixture
    def duo(self, here: Path) -> Path:
        done("convert", "llama", "--profile", PROFILE, "--out", "duo")
        return here / "duo"

    @pytest.mark.parametrize("command", [("verify",), ("revert", "--out", "out")], ids=["verify", "revert"])
    @pytest.mark.parametrize(
        ("folder", "words"),
        [
            ("llama", "llama has no kvsurgery.json: it was not converted by kvsurgery"),
            ("nowhere", "nowhere is not a folder"),
            (PROFILE, f"{PROFILE} is not a folder"),
        ],
    )
    def test_not_ours(self, here: Path, command: tuple[str, ...], folder: str, words: str) -> None:
        nothing_happens(here, words, *command, folder)

    @pytest.mark.parametrize("command", [("verify",), ("revert", "--out", "out")], ids=["verify", "revert"])
    def test_a_flipped_bit_names_the_tensor(self, duo: Path, command: tuple[str, ...]) -> None:
        content = bytearray((duo / SHARD).read_bytes())
        content[-1] ^= 0x10
        (duo / SHARD).write_bytes(content)
        last = max(tensors := header(duo / SHARD), key=lambda name: tensors[name]["data_offsets"])
        nothing_happens(duo.parent, f"{re.escape(last)} in duo/{SHARD} differs from", *command, "duo", code=3)

    @pytest.mark.parametrize("name", ["kv_cache.py", "modeling_kvsurgery_llama.py", "config.json", "tokenizer.json"])
    def test_an_edited_file_is_named(self, duo: Path, name: str) -> None:
        with open(duo / name, "a") as file:
            file.write("\n")
        nothing_happens(duo.parent, f"duo/{name} was changed after the conversion", "verify", "duo", code=3)
        (duo / name).unlink()
        nothing_happens(duo.parent, f"duo/{name} is missing", "verify", "duo", code=3)

    def test_another_original(self, duo: Path, here: Path) -> None:
        llama_checkpoint(here / "other", shards=2)
        (here / "other/tokenizer.json").write_text("{}")
        words = "other/model.*is not what was converted; duo was converted from llama"
        nothing_happens(here, words, "verify", "duo", "--source", "other", code=3)
        nothing_happens(
            here, "nowhere/at/all is neither a folder nor a Hub id", "verify", "duo", "--source", "nowhere/at/all"
        )

    @pytest.mark.parametrize(
        ("out", "words"),
        [
            ("duo", "is the source or inside it"),
            ("duo/back", "inside it"),
            ("llama", "not empty"),
            ("/proc/x", "/proc/x"),
        ],
    )
    def test_revert_into_a_wrong_place(self, duo: Path, out: str, words: str) -> None:
        Path("llama/mine.txt").write_text("mine")
        Path("llama/config.json").unlink()
        nothing_happens(duo.parent, words, "revert", "duo", "--out", out)

    def test_saved_again(self, mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        mixed("llama").load().save_pretrained("again")
        for command in (("verify",), ("revert", "--out", "out")):
            nothing_happens(
                tmp_path, "again is a converted checkpoint that save_pretrained wrote again", *command, "again"
            )


def test_debug_shows_the_traceback(here: Path) -> None:
    for arguments in (("--debug", "verify", "llama"), ("verify", "llama", "--debug")):
        with pytest.raises(CheckpointError, match=r"kvsurgery\.json"):
            run(*arguments)
