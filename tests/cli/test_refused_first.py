"""What a command will need is checked before its work begins, which may take hours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvsurgery.errors import KVSurgeryError
from kvsurgery.evaluate.records import write_settings
from kvsurgery.measure.training_state import TrainingState
from kvsurgery.system.processes import started_processes
from tests.helpers.command import PROFILE, nothing_happens, refused
from tests.report import builders

DUO = ("profile", "compute", "llama", "--method", "duo", "-o", "p.safetensors")
HEADKV = ("profile", "compute", "llama", "--method", "headkv-er", "-o", "p.safetensors")
CONVERT = ("convert", "llama", "--profile", PROFILE, "--out")
EVAL = ("eval", "llama", "--out", "report")
SWEEP = ("sweep", "llama", "--profile", PROFILE, "--sparsity", "0.5", "--out")
FIT = ("fit", "llama", "--profile", PROFILE, "--memory", "1GB", "--context", "1K", "--plot")
BENCH = ("bench", "llama", "--out")
# where the work of these commands begins
WORK = (
    "kvsurgery.bench.benchmark.benchmark",
    "kvsurgery.conversion.request.Request.fetched",
    "kvsurgery.conversion.request.Request.prepare",
    "kvsurgery.evaluate.runner.evaluate",
    "kvsurgery.measure.mesh.Mesh.load",
)


def working(*arguments: Any, **options: Any) -> None:
    raise AssertionError("the work has begun")


@pytest.fixture
def here(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which any work is a failure."""
    for place in WORK:
        monkeypatch.setattr(place, working)
    Path("taken").mkdir()
    Path("latin.txt").write_bytes(b"caf\xe9")
    return here


OUTPUTS = [
    (
        (*DUO[:-1], "nowhere/p.safetensors"),
        "cannot write nowhere/p.safetensors: there is no folder nowhere; make it first",
    ),
    ((*DUO[:-1], PROFILE), f"{PROFILE} exists; choose another file"),
    (("profile", "merge", PROFILE, PROFILE, "-o", "latin.txt"), "latin.txt exists; choose another file"),
    (("profile", "import", "reform", "Pixtral-12B-2409", "-o", PROFILE), f"{PROFILE} exists; choose another file"),
    ((*DUO, "--curve", "nowhere/c.png"), "cannot write nowhere/c.png: there is no folder nowhere; make it first"),
    ((*DUO, "--curve", "taken"), "cannot write taken: it is a folder; give a file"),
    ((*DUO, "--curve", "curve.txt"), r"cannot write curve.txt: \.txt is not a picture format; end it in \.png"),
    ((*DUO, "--checkpoint", "nowhere/state"), "cannot write nowhere/state: there is no folder nowhere"),
    ((*DUO, "--checkpoint", PROFILE), f"{PROFILE} is not a training checkpoint"),
    ((*DUO, "--checkpoint", "state", "--resume"), "there is no training checkpoint state to resume"),
    ((*FIT, "nowhere/fit.png"), "cannot write nowhere/fit.png"),
    ((*FIT, "fit.txt"), "is not a picture format"),
    ((*FIT[:-1], "--save-recipe", PROFILE), f"{PROFILE} exists and is not a recipe; give another file"),
    (("profile", "show", PROFILE, "--plot", "nowhere/a.png"), "there is no folder nowhere; make it first"),
    (("profile", "compare", PROFILE, PROFILE, "--plot", "a.txt"), r"\.txt is not a picture format"),
    ((*CONVERT, f"{PROFILE}/out"), f"cannot write {PROFILE}/out: .*{PROFILE} is not a folder"),
    ((*SWEEP, PROFILE), f"cannot write {PROFILE}: {PROFILE} is not a folder; choose another"),
    ((*EVAL[:-1], f"{PROFILE}/deep/out"), f"cannot write {PROFILE}/deep/out: .*{PROFILE} is not a folder"),
    ((*BENCH, PROFILE), "is not a folder"),
]
INPUTS = [
    ((*DUO, "--text", "./nowhere.txt"), "cannot read text ./nowhere.txt: there is no such file"),
    ((*DUO, "--text", "latin.txt"), "latin.txt is not UTF-8 text"),
    ((*DUO, "--min-context", "512"), "10 passkeys of 32 tokens, hidden and recalled, take more than 640 tokens"),
    ((*EVAL, "--lengths", "256"), "10 passkeys of 32 tokens take more than 320 tokens, and a prompt has 256"),
    ((*EVAL, "--tasks", "perplexity", "--lengths", "256"), "the last 256 tokens of a piece, and 256 tokens leave none"),
    ((*EVAL, "--needles", "nowhere.jsonl"), "cannot read needles nowhere.jsonl: No such file"),
    ((*SWEEP, "out", "--needles", "nowhere.jsonl"), "cannot read needles nowhere.jsonl"),
    ((*HEADKV, "--needles", "nowhere.jsonl"), "cannot read needles nowhere.jsonl"),
    ((*EVAL, "--text", "./nowhere.txt"), "cannot read text ./nowhere.txt"),
    ((*SWEEP, "out", "--text", "./nowhere.txt"), "cannot read text ./nowhere.txt"),
    ((*EVAL, "--tasks", "ruler", "--squad", "nowhere.json"), "cannot read nowhere.json: No such file"),
    ((*EVAL, "--tasks", "ruler", "--hotpot", "taken"), "cannot read taken: Is a directory"),
    ((*EVAL, "--tasks", "mm_niah"), "--mm-niah must name a folder"),
    ((*EVAL, "--tasks", "mm_niah", "--mm-niah", "taken"), "taken has no folder annotations"),
    ((*EVAL, "--tasks", "scbench", "--scbench", "taken"), "taken has no file of SCBench that is called scbench_kv"),
    ((*EVAL, "--tasks", "repoeval"), "--repoeval must name a file or folder"),
]


@pytest.mark.parametrize(("arguments", "words"), OUTPUTS + INPUTS, ids=lambda value: " ".join(value[-2:]))
def test_files(here: Path, arguments: tuple[str, ...], words: str) -> None:
    nothing_happens(here, words, *arguments)


@pytest.mark.parametrize("arguments", [(*DUO, "--curve"), (*CONVERT,), SWEEP, (*EVAL[:-1],), FIT, BENCH])
def test_permissions(here: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    # root may write anywhere, so the answer is made up
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "taken" not in str(path) and access(path, mode))
    nothing_happens(here, r"cannot write taken/x\.png: no permission in .*taken", *arguments, "taken/x.png")


def test_results_of_another_kind_or_checkpoint(here: Path) -> None:
    builders.sweep().save(builders.saved(here / "swept"))
    builders.bench().save(builders.saved(here / "measured"))
    nothing_happens(here, "swept holds a sweep; give other results a folder of their own", *EVAL[:-1], "swept")
    nothing_happens(here, "bench.json in measured is of another checkpoint than llama", *EVAL[:-1], "measured")
    nothing_happens(here, "measured holds other results than a sweep's; give the sweep a folder", *SWEEP, "measured")


def test_unfinished_results_of_another_kind(here: Path) -> None:
    for folder, file in {"sweeping": "sweep.json", "evaluating": "results.json"}.items():
        Path(folder).mkdir()
        write_settings(here / folder, {"models": {}, "versions": {}, "file": file})
    nothing_happens(here, "sweeping holds a sweep; give other results a folder of their own", *EVAL[:-1], "sweeping")
    nothing_happens(here, "evaluating holds other results than a sweep's", *SWEEP, "evaluating")


@pytest.mark.parametrize("name", ["index.html", "samples.jsonl"])
@pytest.mark.parametrize("arguments", [EVAL[:-1], BENCH, SWEEP], ids=["eval", "bench", "sweep"])
def test_files_of_something_else_are_not_replaced(here: Path, arguments: tuple[str, ...], name: str) -> None:
    (here / "site").mkdir()
    (here / "site" / name).write_text("mine")
    nothing_happens(here, f"site holds {name} but no results; give results a folder of their own", *arguments, "site")


def test_a_training_is_not_replaced(here: Path) -> None:
    one_step = replace(TrainingState.new(torch.zeros(2, 3)), latest=torch.zeros(1, 2, 3), history=np.zeros((1, 4)))
    one_step.save(here / "state", {})
    nothing_happens(
        here, "state contains a training after 1 steps; continue it with --resume", *DUO, "--checkpoint", "state"
    )


def test_devices(checkpoint: Callable[[str], Path], here: Path) -> None:
    line = refused("profile", "compute", checkpoint("llama"), *DUO[3:], "--device", "cuda:9")
    assert "torch cannot use the device cuda:9: " in line
    with pytest.raises(KVSurgeryError, match="cannot use the device"), started_processes("cuda:99"):
        pass


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("datasets", (*DUO, "--text", "owner/texts")),
        ("datasets", (*EVAL, "--text", "owner/texts")),
        ("datasets", (*EVAL, "--tasks", "scbench")),
    ],
)
def test_packages(here: Path, monkeypatch: pytest.MonkeyPatch, package: str, arguments: tuple[str, ...]) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    nothing_happens(here, r"pip install '\.\[eval\]' in the clone of kvsurgery", *arguments)
