"""`profile compute` as a user has it: a folder in, a profile out, by every method."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from kvsurgery.profile.head_profile import HeadProfile
from tests.helpers.command import done, run
from tests.helpers.families import make
from tests.helpers.surgery import convert_folder
from tests.helpers.tiny_recall import FOLDER, task
from tests.helpers.vocabularies import tokenizer

PROMPTS = ["--min-context", 400, "--max-context", 500, "--passkeys", 2, "--passkey-tokens", 3]
GATES = ["--sink", 4, "--recent", 16, "--steps", 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with a tokenizer of bytes, which can read the built-in text."""
    folder = make("llama", tmp_path_factory.mktemp("model") / "llama", vocab_size=400, max_position_embeddings=2048)
    tokenizer("bytes", ["the baker carried a basket of late apples by the river"], size=400).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scores(path="p.safetensors"):
    return HeadProfile.load(path).scores


def test_gates(folder):
    said = done("profile", "compute", folder, "--method", "duo", *GATES, *PROMPTS, "-o", "p.safetensors")
    made = HeadProfile.load("p.safetensors")
    assert (made.method, made.granularity, made.sink, made.recent) == ("duo", "kv", 4, 16)
    assert made.provenance["steps"] == 6
    assert "wrote p.safetensors" in said.out
    assert "6/6" in said.err
    assert "Next: kvsurgery convert --profile p.safetensors" in said.err
    done("convert", folder, "--profile", "p.safetensors", "--out", "out")


def test_a_training_goes_on_from_its_checkpoint(folder):
    start = ["profile", "compute", folder, "--method", "duo", *GATES, *PROMPTS]
    done(*start, "-o", "whole.safetensors", "--curve", "curve.png")
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")
    done(*start, "-o", "p.safetensors", "--checkpoint", "state")
    done(*start, "-o", "again.safetensors", "--checkpoint", "state", "--resume")
    assert np.array_equal(scores("again.safetensors"), scores("whole.safetensors"))
    other = run(*start, "-o", "p.safetensors", "--checkpoint", "state", "--resume", "--lr", 0.1)
    assert other.code == 1
    assert "lr" in other.err


def test_an_interrupted_training_says_how_to_go_on(folder, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    start = ["profile", "compute", folder, "--method", "duo", *GATES, *PROMPTS, "-o", "p.safetensors"]
    with monkeypatch.context() as patch:
        patch.setattr("kvsurgery.measure.training.training_step", interrupted)
        nothing, state = run(*start), run(*start, "--checkpoint", "state")
    assert nothing.code == state.code == 130
    assert "interrupted; nothing is kept" in nothing.err
    assert "interrupted; --resume goes on from state" in state.err
    assert not Path("p.safetensors").exists()
    done(*start, "--checkpoint", "state", "--resume")


def test_language_modelling_and_attention(folder):
    done("profile", "compute", folder, "--method", "duo", "--loss", "lm", *GATES, *PROMPTS[:4], "-o", "lm.safetensors")
    assert HeadProfile.load("lm.safetensors").provenance["loss"] == "lm"
    done("profile", "compute", folder, "--method", "attention", "--samples", 2, *PROMPTS, "-o", "p.safetensors")
    assert HeadProfile.load("p.safetensors").method == "attention"


def test_embedding_heads(folder):
    arguments = ["--context", 600, "--samples", 1, "--chunk", 512, "-o", "p.safetensors"]
    said = done("profile", "compute", folder, "--method", "reform", *arguments)
    made = HeadProfile.load("p.safetensors")
    assert len(made.embedding_heads) == 4
    assert set(made.ranking.mnr) == {"pattern", "multihop"}
    assert "reform embedding heads:" in said.out


def test_needles(here):
    """The bundled model recalls facts; their words are its own."""
    words = task.vocabulary()
    filler = task.filler(np.random.default_rng(0), 1, 800)[0]
    Path("text.txt").write_text(" ".join(words[token] for token in filler))
    key, *values = words[task.FIRST_SYMBOL : task.FIRST_SYMBOL + 4]
    needle = {"needle": f"remember {key} {' '.join(values)} .", "real_needle": " ".join(values)}
    needle |= {"question": f"recall {key}", "answer": " ".join(values)}
    Path("needles.jsonl").write_text(json.dumps(needle) + "\n")
    common = ["--needles", "needles.jsonl", "--text", "text.txt", "--lengths", "256,300", "--depths", "0.2,0.6"]
    said = done("profile", "compute", FOLDER / "model", "--method", "headkv-er", *common, "-o", "p.safetensors")
    made = HeadProfile.load("p.safetensors")
    assert made.granularity == "query"
    assert made.provenance["successes"] >= 2
    assert "4/4" in said.err
    assert f"{made.provenance['successes']} right" in said.err
    # query heads 2, 3, 6 and 7 of layer 1 read facts
    assert {*np.argsort(made.scores, axis=None)[-3:]} <= {10, 11, 14, 15}


def test_a_model_that_answers_nothing_has_no_scores(folder):
    arguments = ["--lengths", 400, "--depths", 0.5, "-o", "p.safetensors"]
    refused = run("profile", "compute", folder, "--method", "headkv-r2", *arguments)
    assert refused.code == 1
    assert "the original model answers no set of reasoning needles in at least half of 8 trials" in refused.err
    assert not Path("p.safetensors").exists()


def test_a_converted_checkpoint_gives_the_originals_heads(folder, tmp_path):
    converted = convert_folder(folder, tmp_path / "converted", sparsity=0.5)
    assert any(layer.order != tuple(range(4)) for layer in converted.policy.layers)
    measure = ["--method", "attention", "--samples", 1, *PROMPTS]
    done("profile", "compute", folder, *measure, "-o", "p.safetensors")
    done("profile", "compute", converted.folder, *measure, "-o", "q.safetensors")
    assert np.allclose(scores("q.safetensors"), scores("p.safetensors"), atol=1e-5)
    assert HeadProfile.load("q.safetensors").base_model == "llama"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "duo", "--needles", "x"], "--needles does not go with --method duo"),
        (["--method", "reform", "--passkeys", "3"], "--passkeys does not go with --method reform"),
        (["--method", "duo", "--resume"], "--resume goes on from --checkpoint"),
        (["--method", "headkv-r", "--lengths", "1K,x"], "'x' is not a number of tokens"),
        (["--method", "duo", "--max-context", "4K"], "exceeds the 2048 positions"),
        (
            ["--method", "duo", "--min-context", "900", "--max-context", "800"],
            "contexts from 900 to 800 tokens are none",
        ),
        (["--method", "duo", *map(str, PROMPTS), "--recent", "600"], "has nothing outside sink"),
        (["--method", "duo", "--text", "short.txt"], "short.txt has 2 tokens"),
        (["--method", "headkv-r", "--lengths", "3000"], "2048"),
        (["--method", "headkv-r", "--needles", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--method", "headkv-r2", "--needles", "word"], "sets of them are reasoning and choice"),
        (["--method", "reform", "--context", "4K", "--chunk", "4K"], "2048"),
    ],
)
def test_what_cannot_be_measured_is_refused(folder, arguments, words):
    Path("short.txt").write_text("the baker")
    result = run("profile", "compute", folder, "-o", "p.safetensors", *arguments)
    assert result.code in (1, 2)
    assert words in result.err
    assert not Path("p.safetensors").exists()


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(folder):
    Path("p.safetensors").write_text("something else")
    result = run("profile", "compute", folder, "--method", "duo", "-o", "p.safetensors")
    assert "exists and is not a head profile" in result.err
    result = run("profile", "compute", folder, "--method", "duo", "-o", "nowhere/p.safetensors")
    assert "cannot write head profile nowhere/p.safetensors" in result.err


def test_a_family_without_support_is_refused(here):
    config = AutoConfig.for_model("gpt2", n_layer=1, n_head=2, n_embd=8, vocab_size=20)
    AutoModelForCausalLM.from_config(config).save_pretrained("gpt2")
    result = run("profile", "compute", "gpt2", "--method", "duo", "-o", "p.safetensors")
    assert result.code == 1
    assert "model_type 'gpt2' is not supported" in result.err
