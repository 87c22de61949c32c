"""`convert` with a reform profile: from two files to a checkpoint that reads prompts beyond its context."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.embedding_heads import EmbeddingHead
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.text.user_turn import user_marker
from tests.helpers.command import done, run
from tests.helpers.families import make, tokens
from tests.helpers.vocabularies import KINDS, TURN, tokenizer

MODEL = ModelDimensions(layers=4, query_heads=8, kv_heads=4, head_dim=6)
HEADS = (EmbeddingHead(0, "q", 5), EmbeddingHead(1, "k", 2), EmbeddingHead(1, "v", 0), EmbeddingHead(2, "q", 1))
SIZES = {"chunk": 32, "encode-budget": 24, "keep": 4, "window": 5, "pool": 3, "recompute-budget": 40, "query-length": 6}
FLAGS = [part for name, value in SIZES.items() for part in (f"--reform-{name}", value)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a checkpoint, a reform profile and one with scores."""
    monkeypatch.chdir(tmp_path)
    make("llama", tmp_path / "llama")
    HeadProfile(None, "reform", None, "llama", MODEL, embedding_heads=HEADS).save("reform.safetensors")
    scores = np.random.default_rng(0).random((4, 4))
    HeadProfile(scores, "duo", "kv", "llama", MODEL).save("duo.safetensors")
    return tmp_path


def test_both_profiles_make_one_checkpoint(here):
    said = done(
        "convert", "llama", "--profile", "reform.safetensors", "--profile", "duo.safetensors", *FLAGS, "--out", "out"
    )
    assert "prompts over 40 tokens: h2o, chunks of 32 beside 24 tokens" in said.out
    assert "8 of 16 KV heads stream" in said.out
    done("verify", "out", "--source", "llama", "--logits")
    assert "prompts over 40 tokens" in done("inspect", "out").out
    assert json.loads(done("inspect", "out", "--json").out)["surgery"]["reform"]["chunk"] == 32
    assert "## Long prompts" in Path("out/README.md").read_text()
    done("revert", "out", "--out", "back")
    assert Path("back/model.safetensors").read_bytes() == Path("llama/model.safetensors").read_bytes()


def test_the_checkpoint_gathers_as_the_original_heads_would(here):
    """Whatever the order of heads, the same states are compared: the same tokens are kept."""
    done("convert", "--profile", "reform.safetensors", *FLAGS, "--method", "reform", "--out", "plain")
    done(
        "convert", "llama", "--profile", "reform.safetensors", "--profile", "duo.safetensors", *FLAGS, "--out", "mixed"
    )
    ids, options = tokens(1, 150), {"max_new_tokens": 3, "pad_token_id": 0, "return_gathered": True}
    kept = []
    for folder in ("plain", "mixed"):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
        sequences, [places] = model.generate(ids, **options)
        assert sequences[:, :150].equal(ids)
        kept.append(places.tolist())
    assert kept[0] == kept[1]
    assert len(kept[0]) == 40


@pytest.mark.parametrize("kind", KINDS)
def test_what_opens_a_turn_is_read_from_the_template(here, kind):
    words = [f"{TURN}user\nWhat is it ? assistant Astrolabe? Bergamot. Cormorant?"]
    tokenizer(kind, words, size=400, chat=True).save_pretrained("llama")
    marker = user_marker(Path("llama"))
    own = AutoTokenizer.from_pretrained("llama")
    chat = [{"role": "user", "content": "What is it ?"}]
    ids = own.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    assert marker[0] == own.convert_tokens_to_ids(TURN)
    assert any(tuple(ids[place : place + len(marker)]) == marker for place in range(len(ids)))
    assert user_marker(Path("reform.safetensors")) == ()
    done("convert", "--profile", "reform.safetensors", *FLAGS, "--out", "out")
    assert tuple(json.loads(Path("out/config.json").read_text())["kv_surgery"]["reform"]["query_marker"]) == marker


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--profile", "duo.safetensors", "--reform-chunk", "9"], "--reform-chunk requires a reform profile"),
        (["--profile", "duo.safetensors", "--method", "reform"], "--method reform takes a reform profile alone"),
        (["--profile", "duo.safetensors", "--profile", "duo.safetensors"], "two head profiles of the same kind"),
        (["--profile", "reform.safetensors", "--fit", "1GB", "--context", "1K"], "--fit makes no room"),
        (["--profile", "reform.safetensors", "--sparsity", "0.5"], "--sparsity requires a profile with scores"),
        (["--profile", "reform.safetensors", "--reform-chunk", "1K"], "--reform-chunk 1024 leaves no room in the 512"),
        (
            ["--profile", "reform.safetensors", "--reform-chunk", "300", "--reform-encode-budget", "300"],
            "exceed the 512 positions",
        ),
        (["--profile", "reform.safetensors", "--reform-keep", "300"], "encode_budget 256 is less than"),
    ],
)
def test_contradictions_are_refused(here, arguments, words):
    result = run("convert", "llama", "--out", "out", *arguments)
    assert result.code in (1, 2)
    assert words in result.err
    assert not Path("out").exists()


def test_a_profile_of_another_model_is_refused(here):
    other = ModelDimensions(5, 8, 4, 6)
    HeadProfile(None, "reform", None, "other", other, embedding_heads=HEADS).save("other.safetensors")
    for arguments in (["other.safetensors"], ["duo.safetensors", "--profile", "other.safetensors"]):
        result = run("convert", "llama", "--out", "out", "--profile", *arguments)
        assert result.code == 1
        assert "the head profile is of other (5 layers" in result.err
