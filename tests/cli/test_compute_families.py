"""`profile compute` on models whose layers differ: with states in place of a KV cache, or the KV cache of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.provenance import Provenance
from kvsurgery.heads.dimensions import ModelLayers
from kvsurgery.measure import retrieval
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.profile.head_profile import HeadProfile
from tests.helpers.cases import some
from tests.helpers.command import done, refused
from tests.helpers.families import CACHE_PATHS, FAMILIES, SHARED_CACHE, WITH_STATES, stock
from tests.helpers.vocabularies import tokenizer

PROMPTS = ("--min-context", 400, "--max-context", 500, "--passkeys", 2, "--passkey-tokens", 3)
NEEDLE = {
    "needle": "a map by the clock",
    "question": "where is the map",
    "answer": "clock",
    "real_needle": "clock",
}
METHODS: dict[str, tuple[Any, ...]] = {
    "duo": (*PROMPTS, "--sink", 4, "--recent", 16, "--steps", 6, "--lr", 0.1),
    "attention": (*PROMPTS, "--samples", 2),
    "headkv-er": ("--text", "book.txt", "--needles", "needles.jsonl", "--lengths", 200, "--depths", 0.5),
    "kv-bits": ("--text", "book.txt", "--context", 400, "--samples", 1, "--sink", 4, "--recent", 32),
}


def test_a_version_of_transformers_that_computes_something_else_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoConfig.for_model("granitemoe").save_pretrained("granite")
    monkeypatch.setattr("kvsurgery.measure.model.transformers.__version__", "4.57.6")
    said = refused("profile", "compute", "granite", "--method", "duo", "-o", "p.safetensors")
    assert "the heads of granite cannot be measured with transformers 4.57.6" in said
    assert said.strip().endswith("install transformers 5")


def attention_output(layer: Any) -> torch.nn.Linear:
    """The output projection of a layer's attention."""
    [attention] = [module for module in layer.modules() if hasattr(module, "q_proj")]
    return getattr(attention, "o_proj", None) or attention.out_proj


@pytest.fixture
def layers(family: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> ModelLayers:
    """The layers of a model, which lies beside its texts.

    Of all its KV heads, one does something: head 2 of the last layer, or of the layer whose cache that one reads. What
    other heads read is multiplied with zeros.
    """
    known = {name: 400 for name in ("vocab_size", "vocab_size_per_layer_input") if name in FAMILIES[family]}
    model = stock(family, **{"vocab_size": 400, **known}, max_position_embeddings=2048)
    layers = Model.of(model.config.to_dict()).layers
    *others, last = [
        attention_output(layer)
        for layer, window in zip(model.get_decoder().layers, layers.windows, strict=True)
        if window is None
    ]
    for output in others:
        output.weight.data.zero_()
    last.weight.data.unflatten(1, (4, -1))[:, [0, 1, 3]] = 0
    model.save_pretrained("model")
    tokenizer("bytes", ["the baker carried a basket of late apples by the river"], size=400).save_pretrained("model")
    words = np.random.default_rng(0).choice(["apple", "river", "clock", "letter", "map", "the", "a", "of"], 5000)
    Path("book.txt").write_text(" ".join(words))
    Path("needles.jsonl").write_text(json.dumps(NEEDLE))
    monkeypatch.setattr(retrieval, "judge_answer", lambda *given: ("right", 1.0))  # a random model answers nothing
    return layers


@pytest.mark.skipif(not WITH_STATES, reason="no such family in this version of transformers")
@pytest.mark.parametrize("family", some([name for name in (*SHARED_CACHE, *WITH_STATES) if name in CACHE_PATHS], 2))
def test_every_method_finds_the_head_that_does_something(layers: ModelLayers) -> None:
    for method, options in METHODS.items():
        done("profile", "compute", "model", "--method", method, *options, "-o", method)
    profiles = {method: HeadProfile.load(method) for method in ("duo", "attention", "headkv-er")}
    for method, profile in profiles.items():
        assert profile.scores is not None
        assert profile.scores.any(axis=1).tolist() == [window is None for window in layers.windows]
        options = ["--profile", method, "--rest", "streaming", "--full-heads", 1]
        done("convert", "model", *options, "--out", f"out-{method}")
    done("convert", "model", "--profile", "duo", "--kv-bits", 2, "--kv-measured", "kv-bits", "--out", "out-bits")
    last = len(layers.windows) - 1
    layer = layers.sources.get(last, last)
    assert Provenance.read(Path("out-duo")).permutation[layer][0] == 2
    done("profile", "compute", "out-duo", "--method", "attention", *METHODS["attention"], "-o", "again")
    np.testing.assert_allclose(HeadProfile.load("again").scores, profiles["attention"].scores, atol=1e-4)
    measured = CacheLosses.load("kv-bits").heads
    for losses in (measured["2"], measured["streaming"]):
        assert np.unravel_index(losses.argmax(), losses.shape) == (layer, 2)
        assert (losses > losses.max() / 100).sum() == 1
