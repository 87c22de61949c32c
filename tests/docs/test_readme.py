"""What the README recommends can be done, and its code prints what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from kvsurgery.profile.head_profile import HeadProfile
from tests.docs.pages import ROOT, blocks, session
from tests.docs.test_documentation import parse
from tests.helpers.command import done
from tests.helpers.surgery import reform_profile
from tests.helpers.tiny_recall import FOLDER

README = (ROOT / "README.md").read_text()
LINES, COLUMNS = 150, 120


def workloads() -> list[list[str]]:
    """Rows of the table of workloads: workload, engine, options, method."""
    table = README.partition("| workload |")[2].partition("\n\n")[0]
    return [[cell.strip(" `") for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]]


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= LINES
    assert [line for line in README.splitlines() if len(line) > COLUMNS] == []


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles of the bundled model in the working directory, by the names that the README gives them."""
    monkeypatch.chdir(tmp_path)
    measured = HeadProfile.load(FOLDER / "profile.safetensors")
    measured.save(tmp_path / "duo.safetensors")
    HeadProfile(measured.head_scores, "headkv-er", "kv", "the bundled model", measured.model).save(
        tmp_path / "er.safetensors"
    )
    reform_profile(FOLDER / "model").save(tmp_path / "reform.safetensors")


@pytest.mark.parametrize(("workload", "engine", "options", "method"), workloads())
@pytest.mark.usefixtures("profiles")
def test_a_workload_has_a_conversion(workload: str, engine: str, options: str, method: str) -> None:
    if method != "none":
        parse(["profile", "compute", ".", "--method", method, "-o", "measured.safetensors"])
    done("convert", FOLDER / "model", *options.replace("128K", "2K").split(), "--out", "small")
    surgery = json.loads(done("inspect", "small", "--json").out)["surgery"]
    assert ("vLLM" in engine) == (not surgery["vllm"]["limits"] and "--fit" not in options)


@pytest.mark.slow
@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="written for newer versions")
def test_the_code_runs_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the quickstart's conversion, as pasted into a file; what it prints stands in its comments."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    [quickstart], [code] = blocks("README.md", "console"), blocks("README.md", "python")
    [convert] = [command.kvsurgery for command in session(quickstart) if command.words[:2] == ["kvsurgery", "convert"]]
    done(*convert)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "TQDM_DISABLE": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == re.findall(r"^print\(.*\)  # ([^;\n]+)", code, re.MULTILINE)
