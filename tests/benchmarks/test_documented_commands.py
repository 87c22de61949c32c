"""The commands in docs/results.md have the settings of the committed files that they are said to write."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, Command, blocks, script

BENCHMARKS, PEERS = ROOT / "benchmarks", ROOT / "benchmarks" / "peers"
COMMANDS = [each for block in blocks("docs/results.md", "sh") for each in script(block) if "--json" in each.words]
# what files have under the name of an option and is something else: a model's own name, a version of Python, and the
# tokens of passages
OTHER = {("cache_quality", "model"), ("run", "python"), ("memory_budgets", "context")}


def written(command: Command) -> str:
    """The name of the file."""
    return command.words[command.words.index("--json") + 1]


def committed(name: str) -> dict[str, Any]:
    folder = PEERS if name == "results.json" else BENCHMARKS / "results"
    return json.loads((folder / name).read_text())


def plain(value: Any) -> Any:
    """An option as files of results have it: paths by their names."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.name if isinstance(value, Path) else value


def parsed(command: Command, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a command, as its script reads them; nothing is measured."""
    path = ROOT / command.words[1]
    parse, caught = argparse.ArgumentParser.parse_args, []

    def stop(parser: argparse.ArgumentParser) -> None:
        caught.append(parse(parser))
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", command.words[1:])
    with pytest.raises(SystemExit):
        import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)).main()
    [options] = caught
    return {name: plain(value) for name, value in vars(options).items()}


def test_every_committed_file_has_a_command() -> None:
    """gpu.py names its file after the device."""
    names = {path.name for path in (BENCHMARKS / "results").glob("*.json") if not path.name.startswith("gpu-")}
    assert {written(command) for command in COMMANDS} == names | {"results.json"}
    assert "\npython -m benchmarks.gpu\n" in (ROOT / "docs" / "results.md").read_text()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{Path(command.words[1]).stem}-{written(command)}")
def test_a_command_has_the_settings_of_its_file(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that a file states under the names of options, and sizes that its results show."""
    name, found, options = Path(command.words[1]).stem, committed(written(command)), parsed(command, monkeypatch)
    settings = {**found, **found.get("settings", {}), **found.get("load", {})}
    if isinstance(options.get("text"), list):
        options["texts"] = options["text"]
    compared = {
        setting: value
        for setting, value in settings.items()
        if options.get(setting) is not None and not isinstance(value, dict) and (name, setting) not in OTHER
    }
    if name == "which_heads":
        compared.pop("answers", None)  # their number, where the option names a file
    assert compared == {setting: options[setting] for setting in compared}
    if name == "cache_quality":
        assert len(found["windows"]) == options["windows"] * len(options["texts"])
    elif name == "memory_budgets":
        assert [*map(int, found["budgets"])] == options["memory"]
    elif name == "cpu_decode":
        rows = {(row["tokens"], row["batch"]) for row in found["rows"]}
        assert rows == {(length, batch) for length in options["lengths"] for batch in options["batches"]}
    else:
        assert compared or name in ("recurrent", "calibrated_rotations"), "nothing was compared"
