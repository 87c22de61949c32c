"""`--recipe` and `--save-recipe`: a file stands for what would be typed, and says what was decided."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsurgery.recipe import Recipe
from tests.helpers.command import CONVERT, PROFILE, done, refused, run
from tests.helpers.shards import tree

CHOICES = [
    ("--sparsity", 0.25, "--sink", 4, "--recent", 300),
    ("--full-heads", 2, "--kv-bits", 4, "--kv-residual", 0, "--kv-streaming", "--recent", 600),
    ("--full-heads", 2, "--kv-bits", "k8v4"),
    ("--rest", "budgeted", "--budget", 9, "--window", 4, "--pool", "avg"),
    ("--tp", 3, "--tp-uneven"),
    ("--fit", "1MB", "--context", 999),
]


@pytest.mark.parametrize("options", CHOICES, ids=lambda options: " ".join(map(str, options)))
def test_what_was_saved_converts_to_the_same_bytes(here, options):
    assert "wrote one.toml" in done(*CONVERT, *options, "--save-recipe", "one.toml").err
    done("convert", "llama", "--recipe", "one.toml", "--out", "again", "--save-recipe", "two.toml")
    assert tree(Path("again")) == tree(Path("out"))
    assert Path("two.toml").read_text() == Path("one.toml").read_text()
    assert Recipe.load("one.toml").fit is None
    assert Recipe.load("one.toml").profiles == (PROFILE,)


def test_a_dry_run_saves_too(here):
    done("convert", "llama", "--profile", PROFILE, "--dry-run", "--save-recipe", "one.toml")
    assert Recipe.load("one.toml") == Recipe.of((PROFILE,), sparsity=0.5, rest="streaming")


def test_options_override_the_file(here):
    Path("one.toml").write_text(f'profiles = ["{PROFILE}"]\nsparsity = 0.5\nsink = 4\n[fit]\nmemory = 1\ncontext = 1\n')
    words = "one.toml: fitting a memory budget decides `heads.sparsity`"
    assert words in refused("convert", "llama", "--recipe", "one.toml", "--dry-run")
    Path("one.toml").write_text(f'profiles = ["{PROFILE}"]\nsparsity = 0.5\nsink = 4\n')
    command = ("convert", "llama", "--recipe", "one.toml", "--dry-run", "--json")
    policy = json.loads(done(*command, "--full-heads", 2, "--recent", 9).out)["policy"]
    assert {name: policy.get(name) for name in ("sparsity", "full_heads", "sink", "recent")} == {
        **{"sparsity": None, "full_heads": 2},
        **{"sink": 4, "recent": 9},
    }
    fitted = json.loads(done(*command, "--fit", "1GB", "--context", 9).out)
    assert fitted["policy"]["full_heads"] == 6
    assert fitted["fit"]["context"] == 9


def test_what_a_file_says_makes_no_error_endless(here):
    Path("one.toml").write_text(f'profiles = ["{PROFILE}"]\nselect = "{"x" * 5000}"\n')
    assert 900 < len(refused("convert", "llama", "--recipe", "one.toml", "--dry-run")) < 1100


def test_an_error_of_a_setting_names_the_file(here):
    Path("one.toml").write_text(f'profiles = ["{PROFILE}"]\nsparsity = 2\n')
    line = refused("convert", "llama", "--recipe", "one.toml", "--dry-run")
    assert line == "kvsurgery: --sparsity must lie in [0, 1], got 2 (with the recipe one.toml)"


def test_fit_saves_what_it_prints(here):
    words = ("--profile", PROFILE, "--memory", "1GB", "--context", "1K", "--sink", 4, "--save-recipe", "one.toml")
    printed = done("fit", "llama", *words).out.splitlines()[-1].split()
    done(*printed[1:])
    done("convert", "llama", "--recipe", "one.toml", "--out", "again")
    assert tree(Path("again")) == tree(Path("llama-fit"))


def test_the_profile_may_come_from_either(here):
    Path("one.toml").write_text("sink = 4\n")
    assert "--profile is missing" in run("convert", "llama", "--recipe", "one.toml", "--out", "out").err
    done("convert", "llama", "--recipe", "one.toml", "--profile", PROFILE, "--out", "out")


def test_groups_of_options():
    text = done("convert", "--help-all").out
    places = [text.index(f"\n{group}:\n") for group in ("Heads", "Cache", "Long prompts", "Several devices", "Running")]
    assert places == sorted(places)
    assert places[0] < text.index("--full-heads INTEGER") < places[1] < text.index("--sink") < places[2]
    assert "\nEvaluation:\n" in done("sweep", "--help-all").out
