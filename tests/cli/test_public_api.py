"""The public API: it loads nothing before it is used, works in every import order, and does what the commands do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvsurgery
from kvsurgery.errors import CheckpointError, PolicyError, ProfileError
from tests.helpers.command import PROFILE, done
from tests.helpers.shards import tree

NAMES = ("HeadProfile", "Recipe", "convert", "inspect", "revert", "verify")


def python(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_the_package_loads_nothing():
    # a machine that runs only kernels has no blake3
    heavy = "{'blake3', 'numpy', 'torch', 'transformers', 'click', 'rich', 'safetensors'}"
    assert python(f"import sys, kvsurgery; print({heavy} & sys.modules.keys())") == "set()\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_the_same_before_and_after_other_imports(name):
    others = ", ".join(
        f"kvsurgery.{module}" for module in ("conversion.verify", "conversion.inspection", "cli.convert")
    )
    script = (
        f"from kvsurgery import {name} as first; import {others}; import kvsurgery; assert kvsurgery.{name} is first"
    )
    python(script)
    python(f"import {others}; from kvsurgery import {name}; assert callable({name})")


def test_what_is_public_is_listed():
    assert sorted(kvsurgery.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(kvsurgery))
    with pytest.raises(AttributeError, match="no attribute 'converted'"):
        _ = kvsurgery.converted
    assert (Path(kvsurgery.__file__).parent / "py.typed").exists()


def test_it_does_what_the_commands_do(here):
    done("convert", "llama", "--profile", PROFILE, "--full-heads", 2, "--kv-bits", 4, "--out", "typed")
    recipe = kvsurgery.Recipe.of(full_heads=2, kv_bits=4)
    assert kvsurgery.convert("llama", "out", PROFILE, recipe).size == kvsurgery.inspect("out").size
    assert tree(Path("out")) == tree(Path("typed"))
    profile = kvsurgery.HeadProfile.load(PROFILE)
    assert kvsurgery.convert(None, Path("out"), profile, recipe).already_done
    named = kvsurgery.Recipe.of((PROFILE,), full_heads=2, kv_bits=4)
    assert kvsurgery.convert("llama", "out", recipe=named).already_done
    assert kvsurgery.verify("out").tensors == kvsurgery.convert("llama", "out", profile, recipe).tensors
    kvsurgery.revert("out", "back")
    for shard in Path("llama").glob("*.safetensors"):
        assert Path("back", shard.name).read_bytes() == shard.read_bytes()


def test_errors_speak_of_fields(here):
    with pytest.raises(PolicyError, match=r"^`full_heads` must lie in \[0, 6\] for this model, got 9$"):
        kvsurgery.convert("llama", "out", PROFILE, kvsurgery.Recipe.of(full_heads=9))
    with pytest.raises(PolicyError, match=r"^`heads.full_heads` is a whole number, got '9'$"):
        kvsurgery.Recipe.of(full_heads="9")
    with pytest.raises(ProfileError, match=r"no head profile is given; without one, `cache.bits` quantizes"):
        kvsurgery.convert("llama", "out")
    with pytest.raises(CheckpointError, match="no checkpoint is given"):
        kvsurgery.convert(None, "out", recipe=kvsurgery.Recipe.of(kv_bits=4))
    assert not Path("out").exists()


def test_the_example_runs(tmp_path):
    example = Path(__file__).parents[2] / "examples/from_python.py"
    done = subprocess.run([sys.executable, example, tmp_path], capture_output=True, text=True, check=True)
    assert "6 heads are full, 6 stream" in done.stdout
    assert (tmp_path / "original/model.safetensors").exists()
