"""Options from the settings of dataclasses: their types, what --help says of them, and whose they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner, Result

from kvsurgery.cli.options import Grouped
from kvsurgery.cli.settings import foreign_options, given_settings, setting_options
from kvsurgery.setting import setting


@dataclass(frozen=True)
class Walk:
    """Steps, and how to take them."""

    steps: int = setting(100, "steps", "number of steps; more with `rests`")
    pace: Literal["slow", "fast"] = setting("slow", "pace", "how fast")
    log: Path | None = setting(None, "log", "file to write", default="none")
    rests: int = setting(0, "rests", "times to stop", least=0)
    inner: int = 3


@dataclass(frozen=True)
class Swim:
    """Lengths of a pool."""

    lengths: int = setting(4, "steps", "number of lengths")
    pace: Literal["slow", "fast"] = setting("slow", "pace", "how fast")
    wet: bool = setting(False, "wet", "get wet")


KINDS = {"walk": Walk, "swim": Swim}


@pytest.fixture
def invoke() -> Callable[..., Result]:
    @click.command(cls=Grouped)
    @click.argument("kind")
    @setting_options(KINDS, "All")
    @click.pass_context
    def command(ctx: click.Context, kind: str, **options: Any) -> None:
        for option, owners in foreign_options(ctx, KINDS, [kind]):
            click.echo(f"{option} of {owners}")
        click.echo(repr(KINDS[kind](**given_settings(ctx, KINDS[kind]))))

    return lambda *arguments: CliRunner().invoke(command, arguments)


def test_help_has_a_group_for_each_set_of_owners(invoke: Callable[..., Result]) -> None:
    found, *groups = invoke("--help").output.split("\n\n")[1:]
    assert found.splitlines()[0] == "All:"
    assert [group.splitlines()[0] for group in groups] == ["walk:", "swim:", "Running:"]
    text = " ".join(found.split())
    assert "walk: number of steps; more with --rests; swim: number of lengths." in text
    assert "[default: (walk: 100; swim: 4)]" in text
    assert "--pace [slow|fast] How fast. [default: slow]" in text
    assert "--log PATH File to write. [default: (none)]" in " ".join(groups[0].split())
    assert "[default: 0]" in groups[0]


def test_what_is_typed_sets_fields(invoke: Callable[..., Result]) -> None:
    assert invoke("walk").output == f"{Walk()!r}\n"
    typed = invoke("walk", "--steps", "7", "--pace", "fast", "--log", "a/b", "--rests", "2").output
    assert typed == f"{Walk(7, 'fast', Path('a/b'), 2)!r}\n"
    assert invoke("swim", "--steps", "7", "--wet").output == f"{Swim(7, wet=True)!r}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["walk", "--steps", "0"], "'--steps': 0 is not in the range x>=1"),
        (["walk", "--rests", "-1"], "'--rests': -1 is not in the range x>=0"),
        (["walk", "--pace", "idle"], "'idle' is not one of 'slow', 'fast'"),
        (["swim", "--rests", "2"], "--rests of walk"),
        (["walk", "--inner", "2"], "No such option"),
    ],
)
def test_what_cannot_be_typed(invoke: Callable[..., Result], arguments: list[str], words: str) -> None:
    assert words in invoke(*arguments).output
