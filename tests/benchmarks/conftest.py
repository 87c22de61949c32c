from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks.real_model import beyond_context
from kvsurgery.checkpoint.model import Model
from kvsurgery.profile.embedding_heads import EmbeddingHead
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_reform import Reform
from kvsurgery.text.haystack import Haystack
from kvsurgery.text.needle_sets import read_set
from tests.helpers.families import stock
from tests.helpers.vocabularies import tokenizer


@pytest.fixture(scope="package")
def words() -> PreTrainedTokenizerFast:
    """A tokenizer that spells the needles which hide words."""
    return tokenizer("bytes", [needle.needle for needle in read_set("word")], size=400)


@pytest.fixture(scope="package")
def beyond_folder(tmp_path_factory: pytest.TempPathFactory, words: PreTrainedTokenizerFast) -> Path:
    """A small model with 320 positions, its tokenizer, a text and a profile."""
    folder = tmp_path_factory.mktemp("beyond")
    model = stock("llama", vocab_size=len(words), max_position_embeddings=320)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    (folder / "text.txt").write_text(words.decode(Haystack.read(None, words, 1000).tokens))
    shape = Model.of(model.config.to_dict()).dimensions
    heads = (EmbeddingHead(0, "q", 1), EmbeddingHead(1, "k", 0))
    HeadProfile(None, "reform", None, "made up", shape, embedding_heads=heads).save(folder / "reform.safetensors")
    return folder


@pytest.fixture
def small_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets of which that model's positions hold more than one."""
    small = Reform((), chunk=64, encode_budget=128, window=16, keep=16, pool=9, recompute_budget=160)
    monkeypatch.setattr(beyond_context, "SETTINGS", small)
