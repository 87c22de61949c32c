"""The help of every command: it has examples that can be typed, and loads nothing heavy."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete, get_completion_class

from kvsurgery.cli import cli
from tests.helpers.command import HEAVY, done
from tests.helpers.tiny_recall import FOLDER


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command and subcommand, with what one types to get there."""
    yield path, group
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


EVERY = dict(commands(cli, "kvsurgery"))


# their tasks' modules import numpy; see `kvsurgery.evaluate.tasks`
EVALUATING = ("kvsurgery eval", "kvsurgery sweep")


@pytest.mark.parametrize(
    ("paths", "heavy"),
    [([path for path in EVERY if path not in EVALUATING], HEAVY), (EVALUATING, HEAVY - {"numpy"})],
    ids=["most", "evaluating"],
)
def test_help_loads_nothing_heavy(paths: Sequence[str], heavy: set[str]) -> None:
    script = (
        "import sys; from click.testing import CliRunner; from kvsurgery.cli import cli\n"
        f"for path in {[path.split()[1:] for path in paths]}:\n"
        "    assert CliRunner().invoke(cli, [*path, '--help']).exit_code == 0\n"
        f"print({heavy} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "arguments",
    [
        "bench MODEL --out out",
        "eval MODEL --out out",
        "eval MODEL --source MODEL --quick --out out",
        "sweep MODEL --profile PROFILE --sparsity 0.5 --tasks needle --out out",
        "profile compute MODEL --checkpoint state -o out",
        "profile compute MODEL --method rlkv-lite --checkpoint state --answers answers -o out",
        "profile compute MODEL --method kv-bits --text README -o out",
        "profile compute MODEL --method headkv-r -o out",
    ],
)
def test_what_takes_seconds_to_load_is_said_before(arguments: str, tmp_path: Path) -> None:
    script = (
        f"import sys, click; HEAVY = {HEAVY - {'numpy'}}\n"
        "def said(line, **options):\n"
        "    sys.exit(f'{line} {options} {HEAVY & sys.modules.keys()}')\n"
        "click.echo = said\n"
        "from kvsurgery.cli import main\n"
        "main()"
    )
    places = {"MODEL": FOLDER / "model", "PROFILE": FOLDER / "profile.safetensors", "README": FOLDER / "README.md"}
    words = [str(places.get(word, word)) for word in arguments.split()]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == "loading torch and transformers {'err': True} set()\n"
    assert not any(tmp_path.iterdir())


def test_ctrl_c_while_modules_load_is_one_line() -> None:
    script = (
        "import runpy, sys\n"
        "class Interrupter:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupter())\n"
        "runpy.run_module('kvsurgery', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "kvsurgery: interrupted; run the same command again\n")


@pytest.mark.parametrize("path", EVERY)
def test_the_shorter_help_fits_a_screen(path: str) -> None:
    lines = done(*path.split()[1:], "--help").out.splitlines()
    assert len(lines) <= 40


@pytest.mark.parametrize("name", ["convert", "eval", "fit", "sweep", "profile compute", "bench"])
def test_the_shorter_help_has_required_options_first(name: str) -> None:
    command, text = EVERY[f"kvsurgery {name}"], done(*name.split(), "--help").out
    assert max(map(len, text.splitlines())) <= 80
    shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
    required = [param.opts[-1] for param in command.params if isinstance(param, click.Option) and param.required]
    assert shown[: len(required)] == required
    assert f"kvsurgery {name} --help-all" in text


@pytest.mark.parametrize("path", EVERY)
def test_the_longer_help_has_every_option_once(path: str) -> None:
    text = re.split(r"^[A-Z][^.]*:$|^[a-z][\w, -]*:$", done(*path.split()[1:], "--help-all").out, flags=re.MULTILINE)
    text = "".join(text[1:])  # what follows the description
    shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
    ctx = click.Context(EVERY[path], help_option_names=["-h", "--help"])
    options = [param for param in EVERY[path].get_params(ctx) if isinstance(param, click.Option)]
    assert sorted(shown) == sorted(next(name for name in option.opts if name.startswith("--")) for option in options)


def test_commands_are_in_the_order_of_work() -> None:
    text = done("--help").out
    places = [
        text.index(f"\n  {name} ") for name in ("profile", "convert", "verify", "inspect", "eval", "bench", "push")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_completion(shell: str) -> None:
    complete = get_completion_class(shell)(cli, {}, "kvsurgery", "_KVSURGERY_COMPLETE")
    assert "_KVSURGERY_COMPLETE" in complete.source_template % complete.source_vars()


@pytest.mark.parametrize(
    ("typed", "incomplete", "offered"),
    [
        ([], "con", ["convert"]),
        (["profile"], "comp", ["compute", "compare"]),
        (["profile", "compute", "--method"], "headkv", ["headkv-r", "headkv-er", "headkv-r2"]),
        (["eval", "x", "--tasks"], "needle,pass", ["needle,passkey"]),
    ],
)
def test_completions(typed: list[str], incomplete: str, offered: list[str]) -> None:
    items = ShellComplete(cli, {}, "kvsurgery", "_KVSURGERY_COMPLETE").get_completions(typed, incomplete)
    assert sorted(item.value for item in items) == sorted(offered)


@pytest.mark.parametrize("path", EVERY)
class TestHelp:
    def examples(self, path: str) -> list[str]:
        """The example command lines of a help page."""
        text = done(*path.split()[1:], "--help-all").out.replace("\\\n", " ")
        return [line.strip() for line in text.splitlines() if line.strip().startswith(path)]

    def test_an_example(self, path: str) -> None:
        assert self.examples(path)

    def test_examples_are_valid_command_lines(self, path: str) -> None:
        for example in self.examples(path):
            command, words = cli, shlex.split(example)[1:]
            while isinstance(command, click.Group):
                command = command.get_command(click.Context(command), words.pop(0))
            command.make_context("", words)

    def test_defaults_can_be_typed_or_stand_in_brackets(self, path: str) -> None:
        """`[default: 64]` is a value of the option; what is not a value is `[default: (the whole prompt)]`."""
        ctx = click.Context(EVERY[path])
        for option in EVERY[path].params:
            _, text = option.get_help_record(ctx) or ("", "")
            for stated in re.findall(r"\[default: (\([^)]*\)|[^;\]]*)", text):
                if stated.startswith("("):
                    continue
                if isinstance(option.type, click.types.StringParamType | click.Path):
                    assert stated == str(option.default), text  # which any word would pass as
                else:
                    option.type.convert(stated, option, ctx)
