from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvsurgery.cli import cli
from kvsurgery.errors import Mismatch
from tests.helpers.shards import convert_llama, llama_checkpoint, tree
from tests.helpers.surgery import Converted


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama_checkpoint(tmp_path / "source", shards=2)


@pytest.fixture
def converted(source: Path, tmp_path: Path) -> Path:
    convert_llama(source, tmp_path / "converted")
    return tmp_path / "converted"


def test_verify(source: Path, converted: Path) -> None:
    (converted / "notes.txt").write_text("mine")
    result = run("verify", converted)
    assert "converted was converted from source; 21 tensors and" in result.stdout
    assert "notes.txt" in result.stderr
    assert "and the source" in run("verify", converted, "--source", source).stdout


def test_verify_json(source: Path, converted: Path) -> None:
    facts = json.loads(run("verify", converted, "--source", source, "--json").stdout)
    assert (facts["source"], facts["tensors"], facts["compared_with_source"]) == ("source", 21, True)
    assert facts["bytes"] == sum(path.stat().st_size for path in source.glob("*.safetensors"))


def test_verify_prints_the_hashes_of_the_card(mixed: Callable[[str], Converted]) -> None:
    converted = mixed("llama").folder
    card = (converted / "README.md").read_text()
    listed = card.split("```text\n")[1].split("```")[0]
    expected = {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(converted.glob("*.py"))}
    assert listed == "".join(f"{digest}  {name}\n" for name, digest in expected.items())
    assert run("verify", converted, "--hashes").stdout.endswith(f"\n{listed}")
    assert listed not in run("verify", converted).stdout
    assert json.loads(run("verify", converted, "--json").stdout)["hashes"] == expected


def test_verify_raises_a_mismatch(converted: Path) -> None:
    (converted / "config.json").write_text("{}")
    with pytest.raises(Mismatch, match=r"config\.json"):
        run("verify", converted)


def test_verify_json_names_a_mismatch(converted: Path) -> None:
    (converted / "config.json").write_text("{}")
    result = CliRunner().invoke(cli, ["verify", str(converted), "--json"])
    assert isinstance(result.exception, Mismatch)
    assert json.loads(result.stdout) == {"mismatch": f"{converted / 'config.json'} was changed after the conversion"}


def test_revert(source: Path, converted: Path, tmp_path: Path) -> None:
    result = run("revert", converted, "--out", tmp_path / "back")
    assert "source as it was, 21 tensors" in result.stdout
    assert "model.Q4_K.gguf" in result.stderr
    assert tree(tmp_path / "back").items() <= tree(source).items()
    assert "nothing to do" in run("revert", converted, "--out", tmp_path / "back").stdout


def test_revert_json(converted: Path, tmp_path: Path) -> None:
    facts = json.loads(run("revert", converted, "--out", tmp_path / "back", "--json").stdout)
    assert (facts["source"], facts["out"], facts["already_done"]) == ("source", str(tmp_path / "back"), False)
