"""`bench` as a user has it: a converted folder in, tables, JSON and a report out."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvsurgery.bench import benchmark as module
from kvsurgery.bench.measure import Turns
from kvsurgery.bench.results import Bench
from kvsurgery.bench.workload import WARM
from kvsurgery.cli.bench import _show, bench
from kvsurgery.system.locks import reserved_folder
from tests.helpers.command import done, refused, run
from tests.helpers.families import make
from tests.helpers.surgery import Converted, convert_folder
from tests.report import builders

QUICK = ("--lengths", "24,40", "--new-tokens", 6, "--chunk", 16, "--rounds", 1)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """A folder with a converted model, and its source beside it."""
    folder = tmp_path_factory.mktemp("bench")
    return convert_folder(make("llama", folder / "llama", num_hidden_layers=2), folder / "llama-duo", sparsity=0.5)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr("kvsurgery.bench.contenders.WIDTHS", {"none": (4,)})  # those that are installed take long


def test_tables_and_files(converted: Converted) -> None:
    result = done("bench", converted.folder, *QUICK, "--out", "new/report")
    found = Bench.load(Path("new/report"))
    assert [(row.tokens, row.contender) for row in found.rows] == [
        (length, name) for length in (24, 40) for name in ("converted", "original")
    ]
    assert all(row.skipped is None for row in found.rows)
    assert found.command.startswith("kvsurgery bench ")
    assert found.models == {"converted": str(converted.folder), "original": str(converted.folder)}
    settings = {"lengths": [24, 40], "batches": [1], "new": 6, "chunk": 16, "rounds": 1, "seed": 0, "device": "cpu"}
    settings |= {"dtype": "float32", "processes": 1, "attention": "sdpa"}
    assert found.settings == settings
    assert found.checkpoint["surgery"]["revertible"] is True
    assert found.weights == sum(part.nbytes for part in converted.model.parameters())
    for title in ("Milliseconds on cpu", "KV cache, and peak memory beside"):
        assert title in result.out
    for row in found.rows:
        assert f"{1e3 * row.prefill.seconds:,.1f}" in result.out
    assert "left out: original, none int4: " in result.err
    assert "measuring" in result.err
    with open("new/report/bench.csv", newline="") as file:
        assert [line["kv_bytes"] for line in csv.DictReader(file)] == [str(row.kv_bytes) for row in found.rows]
    assert "<html" in Path("new/report/index.html").read_text()


@pytest.mark.parametrize("kept", [("--out", "new/report"), ()], ids=["in a folder", "nowhere"])
def test_an_interrupt_keeps_the_lengths_before(
    converted: Converted, kept: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(turns: Turns, warm: bool) -> None:
        if turns.tokens == 40:
            raise KeyboardInterrupt
        measured(turns, warm)

    measured = Turns.take
    monkeypatch.setattr(Turns, "take", take)
    result = run("bench", converted.folder, *QUICK, *kept)
    assert result.code == 130
    if kept:
        command = "kvsurgery report new/report"
        assert f"interrupted; new/report has what was measured before; look at it with: {command}" in result.err
        assert [row.tokens for row in Bench.load(Path("new/report")).rows] == [24, 24]
        done(*command.split()[1:])
        assert "<html" in Path("new/report/index.html").read_text()
    else:
        assert "interrupted; nothing is kept" in result.err
        assert not list(Path().iterdir())


def test_a_folder_that_another_process_writes(converted: Converted) -> None:
    with reserved_folder(Path("busy")):
        for command in (["bench", converted.folder, "--out", "busy"], ["report", "busy"]):
            assert "another process is writing busy; wait for it" in refused(*command)


def test_json_of_the_source_and_two_batches(converted: Converted) -> None:
    result = done("bench", converted.folder, "--source", converted.source, *QUICK, "--batches", "1,3", "--json")
    found = json.loads(result.out)
    assert found["models"]["original"] == str(converted.source)
    assert [(row["batch"], row["tokens"]) for row in found["rows"][::2]] == [(1, 24), (1, 40), (3, 24), (3, 40)]
    assert not list(Path().iterdir())


def test_lengths_where_nothing_is_said() -> None:
    """What the context has room for, and what a recompute budget is a part of."""
    assert module.default_lengths("cpu", 4048, None) == (512, 1024, 2048, 4048)
    assert module.default_lengths("cpu", 100, 60) == (100, 120, 240)
    assert module.default_lengths("cpu", 1 << 20, None) == module.DEFAULT_LENGTHS["cpu"]
    options = {param.name: param.default for param in bench.params}
    assert {name: options[name] for name in ("new", "rounds")} == {
        name: getattr(module.Workload, name) for name in ("new", "rounds")
    }


def test_refusals(converted: Converted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = set(Path().iterdir())
    assert "is not a converted checkpoint; give a folder" in refused("bench", converted.source)
    assert "is not a folder; give a checkpoint folder, and download a model on the Hub" in refused("bench", "org/duo")
    line = refused("bench", converted.folder, *QUICK, "--lengths", "24,510")
    assert "510 and 6 new tokens are beyond the 512 positions" in line
    line = refused("bench", converted.folder, "--new-tokens", 600)
    assert "1 and 600 new tokens are beyond the 512 positions" in line
    assert "torch cannot use the device cuda" in refused("bench", converted.folder, "--device", "cuda")
    assert "is neither a folder nor a Hub id" in refused("bench", converted.folder, "--source", "no/such/folder")
    builders.sweep().save(builders.saved(tmp_path / "swept"))
    builders.results().save(builders.saved(tmp_path / "evaluated"))
    here |= {Path("swept"), Path("evaluated")}
    assert "swept holds a sweep" in refused("bench", converted.folder, *QUICK, "--out", "swept")
    line = refused("bench", converted.folder, *QUICK, "--out", "evaluated")
    assert f"results.json in evaluated is of another checkpoint than {converted.folder}; give another folder" in line
    monkeypatch.setattr("kvsurgery.bench.contenders.free_bytes", lambda device: 1000)
    assert "1000 B are free on cpu" in refused("bench", converted.folder, *QUICK)
    assert set(Path().iterdir()) == here
    Path("file").write_text("")
    assert "file is not a folder" in refused("bench", converted.folder, "--out", "file/report")


def test_numbers_are_checked_before_a_model_is_loaded(converted: Converted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_models", lambda *_: pytest.fail("they are loaded"))
    for option, least in {
        "--new-tokens": WARM + 1,
        "--chunk": 1,
        "--lengths": 1,
        "--batches": 1,
        "--rounds": 1,
    }.items():
        result = run("bench", converted.folder, option, least - 1)
        assert (result.code, f"Invalid value for '{option}'" in result.err) == (2, True)


def test_columns_without_a_value_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """So that tables of short prompts fit a narrow terminal."""
    found = builders.bench(rows=tuple(replace(row, chunked=None) for row in builders.bench().rows[:2]))
    _show(replace(found, settings={**found.settings, "batches": [1], "dtype": "float32", "processes": 1}))
    lines = capsys.readouterr().out.splitlines()
    assert not any("chunks" in line for line in lines)
    times, memory = (line.split() for line in lines if "contender" in line)
    assert times[-6:] == ["prefill", "token", "step", "quartiles", "original", "floor"]
    assert {"predicted", "prefill", "decode"} <= {*memory}
    assert max(map(len, lines)) <= 80


def test_a_damaged_checkpoint(converted: Converted) -> None:
    shutil.copytree(converted.folder, "damaged")
    Path("damaged/model.safetensors").write_bytes(b"\x08")
    assert "damaged" in refused("bench", "damaged")
    Path("damaged/config.json").write_text("{")
    assert "config.json" in refused("bench", "damaged")
