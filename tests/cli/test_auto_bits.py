"""`--kv-bits auto`: what is asked for, refused, shown, kept, checked and taken back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvsurgery.emit.cache_description import describe_bits, describe_widths
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_layout import KVLayout
from tests.helpers.command import MODEL, PROFILE, done, refused, run
from tests.helpers.losses import losses
from tests.helpers.shards import tree

AUTO = ("convert", "llama", "--profile", PROFILE, "--full-heads", "5", "--kv-bits", "auto")
MEASURED = ("--kv-measured", "losses.safetensors")


@pytest.fixture
def measured(here: Path) -> Path:
    """The checkpoint `llama`, and losses of it: heads of 4 have 8 or 4 bits."""
    losses(MODEL, "llama", windows=[None, None]).save("losses.safetensors")
    return here


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kv-budget", "5"), "needs --kv-measured, a file that `kvsurgery profile compute MODEL --method kv-bits"),
        (MEASURED, "needs a --kv-budget of 2 to 16 bits a value, got None"),
        ((*MEASURED, "--kv-budget", "1.5"), "of 2 to 16 bits a value, got 1.5"),
        ((*MEASURED, "--kv-budget", "nan"), "of 2 to 16 bits a value, got nan"),
        ((*MEASURED, "--kv-budget", "5", "--kv-streaming"), "--kv-streaming cannot be combined with --kv-bits auto"),
        ((*MEASURED, "--kv-budget", "5", "--kv-rotate", "both"), "--kv-rotate cannot be combined with"),
        (("--kv-bits", "4", "--kv-budget", "5"), "--kv-budget requires --kv-bits auto"),
    ],
)
def test_what_is_missing_is_one_line(measured: Path, options: tuple, words: str) -> None:
    result = run(*AUTO, *options, "--out", "out")
    assert result.code == 2
    assert words in result.err.splitlines()[-1]
    assert not Path("out").exists()


def test_more_than_the_smallest_width_is_needed(measured: Path) -> None:
    said = refused(*AUTO, *MEASURED, "--kv-budget", "3", "--out", "out")
    assert "heads of 4 have at least 4 bits a value" in said
    assert not Path("out").exists()


def test_from_the_plan_to_the_way_back(measured: Path) -> None:
    before = tree(Path("llama"))
    asked = (*AUTO, *MEASURED, "--kv-budget", "6.4")
    facts = json.loads(done(*asked, "--dry-run", "--json").out)
    widths = [layer["bits"] for layer in facts["layers"]]
    assert sorted(widths) == [4, 8]
    assert " bits " in done(*asked, "--dry-run").out

    said = "KV cache in 8 bits in 1 layer, 4 in 1 (kivi, keys and values rotated)"
    assert said in done(*asked, "--out", "out", "--save-recipe", "kept.toml").out
    assert said in done("inspect", "out").out
    assert "the other tokens are stored in 8 bits in 1 layer, 4 in 1 (kivi, keys and values rotated)" in " ".join(
        Path("out/README.md").read_text().split()
    )
    config = json.loads(Path("out/config.json").read_text())
    assert config["kv_surgery"]["quantization"]["bits"] == widths
    layout = KVLayout.from_config(config)
    assert [row["after"] for row in facts["kv_bytes"]] == [
        row["after"] for row in json.loads(done("inspect", "out", "--json").out)["surgery"]["kv_bytes"]
    ]
    assert layout.kv_bytes(1, 2048) < layout.dense_bytes(1, 2048)

    done("verify", "out", "--source", "llama")
    kept = Path("kept.toml").read_text().splitlines()
    assert {'bits = "auto"', "budget = 6.4", 'measured = "losses.safetensors"'} <= {*kept}
    done("convert", "llama", "--recipe", "kept.toml", "--out", "again")
    assert Path("again/config.json").read_bytes() == Path("out/config.json").read_bytes()
    done("convert", "llama", "--recipe", "kept.toml", "--kv-bits", "4", "--out", "four")
    assert json.loads(Path("four/config.json").read_text())["kv_surgery"]["quantization"]["bits"] == 4
    done("revert", "out", "--out", "back")
    back = tree(Path("back"))
    assert back == {name: before[name] for name in back}
    assert {"config.json", "README.md"} < back.keys()


def test_measured_on_another_model(measured: Path) -> None:
    scores = np.ones((2, 3), np.float32)
    HeadProfile(scores, "duo", "kv", "llama", MODEL).save("ones.safetensors")
    asked = (*AUTO, "--kv-budget", "6", "--kv-measured", "other.safetensors", "--out", "out")
    losses(windows=[None, None]).save("other.safetensors")
    assert "is of made up (2 layers, 6 query heads, 3 KV heads of 16), but llama has 2 layers" in refused(*asked)
    losses(MODEL, windows=[None, 64]).save("other.safetensors")
    assert "is of made up, whose layers have other windows than those of llama; measure this model" in refused(*asked)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 4}, "4 bits (kivi, values rotated)"),
        ({"bits": "k3v2"}, "3 bits for keys and 2 for values (kivi, values rotated)"),
        ({"bits": [2, "k3v2", 3]}, "3 bits in 1 layer, k3v2 in 1, 2 in 1 (kivi, values rotated)"),
        ({"bits": [4, 4, 3]}, "4 bits in 2 layers, 3 in 1 (kivi, values rotated)"),
        ({"bits": [None, 3, 8]}, "8 bits in 1 layer, 3 in 1, unquantized in 1 (kivi, values rotated)"),
        (
            {"bits": [2, 8, 3], "rotate": ["both", "none", "values"], "clip": [True, False, True], "group_size": 32},
            "8 bits in 1 layer, 3 in 1, 2 in 1 (kivi, groups of 32, values rotated at 3 bits, keys and values rotated "
            "at 2 bits, ranges clipped at 3 and 2 bits)",
        ),
    ],
    ids=["one", "pair", "pair of some layers", "two", "dtype", "steps"],
)
def test_widths_in_words(changes: dict, words: str) -> None:
    usual = {"bits": 4, "scheme": "kivi", "group_size": None, "rotate": "values", "clip": False}
    assert describe_bits({**usual, **changes}) == words
    assert words.startswith(describe_widths(changes["bits"]))
