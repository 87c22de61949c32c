"""A new evaluation task is one file: commands find it, and offer its settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvsurgery.cli.options import Grouped
from kvsurgery.cli.tasks import task_options, tasks_of
from kvsurgery.evaluate import tasks

COUNTING = '''
from dataclasses import dataclass

from kvsurgery.errors import TextError
from kvsurgery.setting import setting


@dataclass(frozen=True)
class CountingTask:
    """Counting up to a number."""

    most: int = setting(7, "counting_most", "the number to count to")
    lengths: tuple[int, ...] | None = setting(None, "lengths", "prompt lengths in tokens", default="one", tokens=True)

    def check(self):
        if self.most > 99:
            raise TextError(f"nobody counts to {self.most}")

    def samples(self, reader, limit=None):
        return iter(())


TASK = CountingTask
'''


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[click.Command]:
    """A command with the options of all tasks, another one among them, that prints the tasks it is asked for."""
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    tasks.task_classes.cache_clear()

    @click.command(cls=Grouped)
    @task_options
    @click.pass_context
    def ask(ctx: click.Context, **options: object) -> None:
        click.echo(tasks_of(ctx))

    yield ask
    tasks.task_classes.cache_clear()
    sys.modules.pop("kvsurgery.evaluate.tasks.counting", None)


def test_help_offers_a_new_tasks_settings(command: click.Command) -> None:
    text = " ".join(CliRunner().invoke(command, ["--help-all"]).output.split())
    assert f"Any of {', '.join(sorted(tasks.task_classes()))}." in text
    assert "Any of cloze, counting, " in text
    assert "counting: --counting-most INTEGER RANGE The number to count to. [default: 7]" in text
    assert "cloze, counting, needle, passkey, perplexity, ruler: --lengths LIST Prompt lengths in tokens." in text
    assert (
        "[default: (cloze, needle, passkey, perplexity: five lengths up to 32000; counting: one; ruler: 4096)]" in text
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--tasks counting", "{'counting': CountingTask(most=7, lengths=None)}"),
        ("--tasks counting --counting-most 9 --lengths 1K,3", "{'counting': CountingTask(most=9, lengths=(1024, 3))}"),
    ],
)
def test_options_set_the_fields(command: click.Command, arguments: str, expected: str) -> None:
    assert CliRunner().invoke(command, arguments.split()).output.strip() == expected


def test_settings_are_checked_and_belong_to_their_task(command: click.Command) -> None:
    refused = CliRunner().invoke(command, ["--tasks", "counting", "--counting-most", "100"])
    assert str(refused.exception) == "nobody counts to 100"
    other = CliRunner().invoke(command, ["--tasks", "ruler", "--counting-most", "5"])
    assert "--counting-most is an option of counting, which --tasks does not name: add it, or leave" in other.output
