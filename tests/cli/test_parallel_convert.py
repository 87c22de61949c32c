"""`convert --tp` as a user meets it: what it says, what it refuses, and the way back."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvsurgery.profile.embedding_heads import EmbeddingHead
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_layout import KVLayout
from tests.helpers.command import CONVERT, PROFILE, done, nothing_happens, run
from tests.helpers.families import largest, make, tokens
from tests.helpers.shards import tree
from tests.helpers.surgery import convert_folder, random_profile

STREAMING = ("--sink", "3", "--recent", "5")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model of 4 layers with 4 KV heads, biases and shards, and a profile."""
    make("llama-bias", tmp_path / "model", shard="40KB")
    monkeypatch.chdir(tmp_path)
    random_profile(tmp_path / "model").save(PROFILE)
    return tmp_path


def convert(*options: str, out: str = "out") -> str:
    return done("convert", "model", "--profile", PROFILE, "--out", out, *STREAMING, *options).out


def logits(folder: str, **options: bool) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()(tokens(2, 40)).logits


@pytest.mark.parametrize(
    "options", [("--tp", "2"), ("--tp", "4", "--tp-uneven"), ("--tp", "2", "--kv-bits", "8")], ids=" ".join
)
def test_the_way_there_and_back(model: Path, options: tuple[str, ...]) -> None:
    before = tree(model / "model")
    convert("--full-heads", "8", *options)
    done("verify", "out", "--source", "model", "--logits")
    expected = logits("model")
    assert largest(logits("out") - expected, expected) <= 1e-5  # without trust, the stock model
    shutil.rmtree("model")
    done("revert", "out", "--out", "model")
    assert tree(model / "model") == before


def test_the_same_heads_give_the_same_model(model: Path) -> None:
    convert("--full-heads", "7")
    convert("--full-heads", "7", "--tp", "2", "--tp-uneven", out="parallel")
    one, other = (logits(folder, trust_remote_code=True) for folder in ("out", "parallel"))
    assert largest(one - other, one) <= 1e-5
    assert largest(one - logits("model"), one) > 1e-2
    heads = [json.loads(done("inspect", folder, "--json").out)["surgery"]["heads"] for folder in ("out", "parallel")]
    assert heads[0] == heads[1]


def test_long_prompts_find_their_heads_in_blocks(model: Path) -> None:
    scored, kept = random_profile(Path("model")), []
    heads = tuple(EmbeddingHead(0, state, head) for state, head in (("q", 5), ("k", 1), ("v", 3)))
    reform = HeadProfile(None, "reform", None, "model", scored.model, embedding_heads=heads)
    for name, options in {"out": {}, "parallel": {"tp": 2, "tp_uneven": True}}.items():
        sizes = {"chunk": 16, "encode_budget": 24, "window": 3, "keep": 3, "pool": 3, "recompute_budget": 40}
        given = {"reform": reform, "sizes": sizes, "full_heads": 7, **options}
        loaded = convert_folder(Path("model"), Path(name), scored, **given).model
        kept.append(loaded.generate(tokens(1, 90), max_new_tokens=2, query_length=5, return_gathered=True)[1])
    assert kept[0][0].equal(kept[1][0])
    assert len(kept[0][0]) == 40


def test_one_block_is_an_ordinary_conversion(model: Path) -> None:
    convert("--full-heads", "7")
    convert("--full-heads", "7", "--tp", "1", out="one")
    assert tree(model / "one") == tree(model / "out")


def test_budgets(model: Path) -> None:
    done("convert", "model", "--profile", PROFILE, "--out", "out", "--rest", "budgeted", "--budget", "9", "--tp", "4")
    config = json.loads(Path("out/config.json").read_text())
    assert [layer["blocks"] for layer in config["kv_surgery"]["layers"]] == [[[0, 1]] * 4] * 4
    assert sum(sum(layer["budgets"]) for layer in config["kv_surgery"]["layers"]) == 16 * 9


def test_it_says_what_changes_and_what_a_process_holds(model: Path) -> None:
    said = convert("--full-heads", "7", "--tp", "4")
    assert "8 full heads, 1 more than asked for: a multiple of 4 in every layer" in said
    plan = json.loads(
        done(
            *CONVERT[:1],
            "model",
            "--profile",
            PROFILE,
            "--tp",
            "4",
            "--dry-run",
            "--json",
            *STREAMING,
            "--full-heads",
            "7",
        ).out
    )
    assert (plan["kv_heads"]["full"], plan["rounded"]) == (8, 1)
    assert (plan["policy"]["tp"], plan["policy"]["full_heads"]) == (4, 7)
    layout = KVLayout.from_config(json.loads(Path("out/config.json").read_text()))
    expected = [
        {"processes": count, "kv_bytes": [part.kv_bytes(1, 512, itemsize=4) for part in layout.parts(count)]}
        for count in (2, 4)
    ]
    assert plan["ranks"] == expected
    facts = json.loads(done("inspect", "out", "--json").out)["surgery"]
    assert facts["ranks"] == expected
    assert not facts["replicated"]
    for text in (said, done("inspect", "out").out, Path("out/README.md").read_text()):
        rows = re.findall(r"^\W*([24])\W+([\d.]+ \w+)\W+([\d.]+ \w+)\W*$", text, re.MULTILINE)
        assert [row[0] for row in rows] == ["2", "4"]
        assert all(least == most for _, least, most in rows)
    assert "2 or 4 processes" in Path("out/README.md").read_text()


def test_without_it_nothing_is_said(model: Path) -> None:
    assert "process" not in convert("--full-heads", "7")
    assert "process" not in done("inspect", "out").out
    assert "process" not in Path("out/README.md").read_text()


@pytest.mark.parametrize("family", ["phi3", "olmo2"])
def test_families_that_save_nothing(family: str, checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random_profile(checkpoint(family)).save(PROFILE)
    said = done("convert", checkpoint(family), "--profile", PROFILE, "--out", "out", "--tp", "2").out
    for text in (said, done("inspect", "out").out, Path("out/README.md").read_text()):
        assert f"transformers replicates the attention of {family}" in text
    [row] = json.loads(done("inspect", "out", "--json").out)["surgery"]["ranks"]
    layout = KVLayout.from_config(json.loads(Path("out/config.json").read_text()))
    assert row == {"processes": 2, "kv_bytes": [layout.kv_bytes(1, 512, itemsize=4)] * 2}


def test_blocks_that_do_not_divide_the_heads(here: Path) -> None:
    nothing_happens(here, r"--tp must divide the 3 KV heads of a layer \(1, 3\), got 2", *CONVERT, "--tp", "2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tp", "0"), "'--tp': 0 is not in the range"),
        (("--tp-uneven",), "--tp-uneven requires --tp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage(here: Path, options: tuple[str, ...], words: str) -> None:
    result = run(*CONVERT, *options)
    assert result.code == 2
    assert words in result.err
    assert not Path("out").exists()
