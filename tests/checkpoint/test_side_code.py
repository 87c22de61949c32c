"""Code that a tokenizer or a processor names: it is copied, hashed and listed, or refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvsurgery import revert, verify
from kvsurgery.checkpoint.side_code import SIDE_CONFIGS, SideCode
from kvsurgery.checkpoint.source import read_config
from kvsurgery.errors import CheckpointError, Mismatch
from tests.docs.pages import ROOT
from tests.evaluate.recall import write_language
from tests.helpers.command import done, run
from tests.helpers.shards import tree
from tests.helpers.surgery import convert_folder
from tests.helpers.vocabularies import tokenizer

TOKENIZER = """
from transformers import PreTrainedTokenizerFast

from .more import NAME  # transformers 4 copies no file that only an imported one imports
from .parts import NAME


class OwnTokenizer(PreTrainedTokenizerFast):
    name = NAME
"""


@pytest.fixture
def source(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer has code of its own, in three files."""
    folder = tmp_path / "source"
    shutil.copytree(checkpoint("llama"), folder)
    tokenizer("bytes", ["the baker carried apples"], size=101).save_pretrained(folder)
    names(folder, "tokenizer_config.json", {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}, "OwnTokenizer")
    (folder / "own_tokenizer.py").write_text(TOKENIZER)
    (folder / "parts.py").write_text("from .more import NAME\n")
    (folder / "more.py").write_text("NAME = 'own'\n")
    (folder / "unused.py").write_text("")
    return folder


def names(folder: Path, config: str, auto_map: Any, kind: str | None = None) -> None:
    """Let a config of a folder name code."""
    path = folder / config
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= {"auto_map": auto_map} | ({"tokenizer_class": kind} if kind else {})
    path.write_text(json.dumps(content))


def test_the_tokenizer_of_a_converted_checkpoint(source: Path, tmp_path: Path) -> None:
    out = convert_folder(source, tmp_path / "out", sparsity=0.5).folder
    loaded = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    assert loaded.name == "own"
    assert not (out / "unused.py").exists()
    card = (out / "README.md").read_text()
    hashes = verify(out).hashes
    for name in ("own_tokenizer.py", "parts.py", "more.py"):
        assert f"{hashes[name]}  {name}" in card
        assert f"`{name}`" in card
    revert(out, tmp_path / "back")
    assert tree(tmp_path / "back") == tree(source)
    (out / "more.py").write_text("NAME = 'changed'\n")
    with pytest.raises(Mismatch, match=r"more\.py"):
        verify(out)


@pytest.mark.parametrize("config", SIDE_CONFIGS)
@pytest.mark.parametrize(
    "auto_map",
    [{"AutoProcessor": "code.Own"}, ["code.Own", None], {"AutoTokenizer": ["code.Own", "code.Fast"]}],
    ids=str,
)
def test_places_that_name_code(tmp_path: Path, config: str, auto_map: Any) -> None:
    names(tmp_path, config, auto_map)
    with pytest.raises(CheckpointError, match=rf"code\.py is missing, and {config} names it"):
        SideCode.of(tmp_path)
    (tmp_path / "code.py").write_text("class Own: ...\n")
    assert SideCode.of(tmp_path).files == {"code.py": b"class Own: ...\n"}


def test_configs_inside_of_configs(tmp_path: Path) -> None:
    inner = {"image_processor": {"auto_map": {"AutoImageProcessor": "images.Own"}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(inner))
    (tmp_path / "images.py").write_text("")
    assert [*SideCode.of(tmp_path).files] == ["images.py"]


def test_config_json_names_code_of_a_tokenizer(source: Path, tmp_path: Path) -> None:
    names(source, "config.json", {"AutoTokenizer": ["own_tokenizer.OwnTokenizer", None]})
    out = convert_folder(source, tmp_path / "out", sparsity=0.5).folder
    assert read_config(out)["auto_map"]["AutoTokenizer"] == ["own_tokenizer.OwnTokenizer", None]
    assert "modeling_kvsurgery" in read_config(out)["auto_map"]["AutoModelForCausalLM"]


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("/etc/code.Own", "leads out"),
        ("a/../../code.Own", "leads out|missing"),
        ("Own", "module.Class"),
        (3, "module.Class"),
        ("gone.Own", r"gone\.py is missing"),
        ("kv_cache.Own", "kv_cache.py.*conversion writes a file of this name"),
    ],
)
def test_names_that_are_refused(source: Path, tmp_path: Path, reference: Any, words: str) -> None:
    names(source, "processor_config.json", {"AutoProcessor": reference})
    (source / "kv_cache.py").write_text("")
    with pytest.raises(CheckpointError, match=words) as raised:
        convert_folder(source, tmp_path / "out", sparsity=0.5)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", ["from ..above import x", "from .gone import x", "import .gone"])
def test_imports_that_are_refused(source: Path, tmp_path: Path, line: str) -> None:
    (source / "more.py").write_text(f"{line}\nNAME = ''\n")
    with pytest.raises(CheckpointError, match=r"more\.py imports it"):
        convert_folder(source, tmp_path / "out", sparsity=0.5)


def test_code_of_another_repository(source: Path, tmp_path: Path) -> None:
    names(source, "tokenizer_config.json", {"AutoTokenizer": "owner/repo--their.Own"})
    assert SideCode.of(source).remote == ("owner/repo--their.Own",)
    out = convert_folder(source, tmp_path / "out", sparsity=0.5).folder
    assert not (out / "own_tokenizer.py").exists()
    card = (out / "README.md").read_text()
    assert "owner/repo" in card
    assert "their.Own" in card


@pytest.fixture(scope="module")
def with_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, whose tokenizer has code of its own, and says so in a file when this runs."""
    folder = tmp_path_factory.mktemp("own") / "model"
    shutil.copytree(ROOT / "examples" / "tiny-recall" / "model", folder)
    content = json.loads((folder / "tokenizer_config.json").read_text())
    content |= {"auto_map": {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}, "tokenizer_class": "OwnTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    ran = f"open({str(folder.parent / 'ran')!r}, 'w').close()\n"
    (folder / "own_tokenizer.py").write_text(re.sub(r"from \..*", "NAME = 'own'", TOKENIZER) + ran)
    return folder


COMMANDS = {
    "eval": ("eval", "--tasks", "cloze", "--lengths", "128", "--samples", "1", "--device", "cpu"),
    "compute": ("profile", "compute", "--method", "attention", "--samples", "1", "--device", "cpu"),
}


def test_a_check_of_the_cache_needs_trust_before_anything_is_written(with_code: Path, tmp_path: Path) -> None:
    write_language(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(f"{text.read_text()} " * 10)
    convert = ("convert", with_code, "--kv-bits", "8", "--kv-residual", "16", "--out", tmp_path / "out")
    assert "--trust-remote-code requires --kv-check" in run(*convert, "--trust-remote-code").err
    check = (*convert, "--kv-check", text)
    assert "set --trust-remote-code to run it" in run(*check).err
    assert not (tmp_path / "out").exists()
    assert not (with_code.parent / "ran").exists()
    assert "nats from the original model" in done(*check, "--trust-remote-code").out
    (with_code.parent / "ran").unlink()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_never_ask(with_code: Path, tmp_path: Path, command: str) -> None:
    """Without the option, a line and nothing that ran; standard input is not read."""
    name, *options = COMMANDS[command]
    name = [name, options.pop(0)] if name == "profile" else [name]
    out = tmp_path / "out.safetensors"
    result = run(*name, with_code, *options, "--out", out)
    assert result.code == 1
    assert "--trust-remote-code" in result.err
    assert "[y/N]" not in result.out + result.err
    assert not (with_code.parent / "ran").exists()
    assert not out.exists()
