"""`--kv-bits k8v4`: what it bakes, shows and refuses, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvsurgery.checkpoint.model import Model
from kvsurgery.errors import PolicyError
from kvsurgery.recipe import Cache, Recipe
from tests.helpers.command import MODEL, done, refused, run
from tests.helpers.families import stock
from tests.helpers.losses import losses
from tests.helpers.shards import tree

CONVERT = ("convert", "llama", "--out", "out")  # heads of 4, which fill words with 8 or 4 bits


def test_from_the_plan_to_the_way_back(here: Path) -> None:
    before = tree(Path("llama"))
    facts = json.loads(done(*CONVERT, "--kv-bits", "k8v4", "--dry-run", "--json").out)
    assert [layer["bits"] for layer in facts["layers"]] == ["k8v4"] * MODEL.layers
    done(*CONVERT, "--kv-bits", "k8v4", "--save-recipe", "kept.toml")
    words = "8 bits for keys and 4 for values (kivi, values rotated)"
    assert f"KV cache in {words}" in done("inspect", "out").out
    assert words in " ".join(Path("out/README.md").read_text().split())
    section = json.loads(Path("out/config.json").read_text())["kv_surgery"]["quantization"]
    assert (section["bits"], section["rotate"], section["clip"]) == ("k8v4", "values", False)
    assert 'bits = "k8v4"' in Path("kept.toml").read_text().splitlines()
    sizes = [json.loads(done("inspect", "out", "--json").out)["surgery"]["kv_bytes"]]
    for bits in (8, 4):
        done("convert", "llama", "--out", f"of-{bits}", "--kv-bits", bits)
        sizes.append(json.loads(done("inspect", f"of-{bits}", "--json").out)["surgery"]["kv_bytes"])
    for pair, eight, four in zip(*sizes, strict=True):
        assert 2 * pair["after"] == eight["after"] + four["after"]
    done("verify", "out", "--source", "llama")
    done("revert", "out", "--out", "back")
    back = tree(Path("back"))
    assert back == {name: before[name] for name in back}


def test_equal_widths_are_one(here: Path) -> None:
    done(*CONVERT, "--kv-bits", "k4v4")
    done("convert", "llama", "--out", "again", "--kv-bits", "4")
    assert tree(Path("again")) == tree(Path("out"))
    assert json.loads(Path("out/config.json").read_text())["kv_surgery"]["quantization"]["bits"] == 4
    assert Cache("k4v4") == Cache(4)


@pytest.mark.parametrize("bits", ["k5v2", "v2k3", "k3", "k33v2", "K8V4", "16", "k8v4\n"])
def test_other_widths_are_refused_in_one_line(here: Path, bits: str) -> None:
    Path("recipe.toml").write_text(f"[cache]\nbits = {json.dumps(bits)}\n")
    said = refused("convert", "llama", "--out", "out", "--recipe", "recipe.toml")
    assert "`cache.bits`: a quantized cache has 8, 4, 3 or 2 bits, or two such as k3v2; got" in said
    with pytest.raises(PolicyError, match="such as k3v2; got '"):
        Recipe.of(kv_bits=bits)
    result = run(*CONVERT, "--kv-bits", bits)
    assert result.code == 2
    assert f"Invalid value for '--kv-bits': {bits!r} is not one of" in result.err
    assert not Path("out").exists()


def test_heads_that_do_not_fill_words(here: Path) -> None:
    said = refused(*CONVERT, "--kv-bits", "k8v2")
    assert "heads of 4 do not fill whole 16-bit words at k8v2 bits" in said


def test_losses_of_equal_widths_do_not_decide_a_pair(here: Path) -> None:
    losses(MODEL, "llama", windows=[None, None]).save("losses.safetensors")
    said = refused(*CONVERT, "--kv-bits", "k8v4", "--kv-measured", "losses.safetensors")
    assert "k8v4 bits were not measured, only 8, 4" in said


def test_two_bits_should_be_measured_first(here: Path) -> None:
    """Only where `--kv-measured` takes what the command measures."""
    model = stock("llama", head_dim=16)
    model.save_pretrained("wide")
    shape = Model.of(model.config.to_dict()).dimensions
    losses(shape, "wide", windows=[None] * shape.layers).save("losses.safetensors")
    measured = "--kv-measured", "losses.safetensors"

    def suggested(*options: str) -> bool:
        said = done("convert", "wide", "--dry-run", "--kv-bits", *options).err
        return "kvsurgery profile compute wide --method kv-bits" in said

    assert suggested("2")
    assert not suggested("2", *measured)
    assert not suggested("4")
    for others in (("k2v4",), ("2", "--kv-scheme", "per-token"), ("2", "--kv-group-size", "16")):
        assert not suggested(*others)
        assert run("convert", "wide", "--dry-run", "--kv-bits", *others, *measured).code
