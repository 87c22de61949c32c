"""Who takes part, and that the original over the converted model's weights is the original."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from kvsurgery.bench import contenders as module
from kvsurgery.bench.caches import WIDTHS
from kvsurgery.bench.contenders import contenders, load_models, shared_stock_model, step_weights, usable_contenders
from kvsurgery.errors import CheckpointError, KVSurgeryError
from kvsurgery.templates.kv_layout import Quantization
from tests.helpers.families import FAMILIES, largest, make, stock, tokens
from tests.helpers.surgery import Converted, convert_folder

CPU = torch.device("cpu")
# two kinds of layers and a tied output layer, soft caps, experts, images; and the attention of the original
SHARED = {"llama": "sdpa", "gemma3": "sdpa", "gemma2": "eager", "qwen3_moe": "sdpa", "llava": "sdpa"}


@pytest.mark.parametrize(("family", "attention"), SHARED.items())
def test_the_original_shares_the_weights(mixed: Callable[[str], Converted], family: str, attention: str) -> None:
    """The same logits as the stock class that is loaded from the source, from the very parameters."""
    folder, ids = mixed(family).folder, tokens(2, 40, vocabulary=99)
    converted = mixed(family).model
    original = shared_stock_model(converted, AutoConfig.from_pretrained(folder))
    assert original.config._attn_implementation == attention
    assert not type(original).__module__.startswith("transformers_modules")
    theirs = dict(original.named_parameters())
    assert theirs.keys() == dict(converted.named_parameters()).keys()
    assert all(part is theirs[name] for name, part in converted.named_parameters())
    with torch.no_grad():
        expected = mixed(family).stock(ids).logits
        assert largest(original(ids).logits - expected, expected) < 1e-5
        assert original(ids[:, :3], past_key_values=DynamicCache(config=original.config)).logits.isfinite().all()


def test_every_kind_of_cache_takes_part(mixed: Callable[[str], Converted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not run here are left out, with a reason."""
    models = load_models(mixed("llama").folder, None)
    names = [contender.name for contender in contenders(*models)]
    assert names == ["converted", "original", *(f"original, {backend} int4" for backend in WIDTHS)]
    monkeypatch.setattr(module, "unusable", lambda make: "it is not installed")
    there, left_out = usable_contenders(contenders(*models))
    assert [contender.name for contender in there] == names[:2]
    assert left_out == dict.fromkeys(names[2:], "it is not installed")


def test_as_many_bits_as_the_converted_cache(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Where a backend has them."""
    quantized = convert_folder(checkpoint("qwen3"), tmp_path / "int2", sparsity=0.5, quantization=Quantization(8))
    names = [contender.name for contender in contenders(*load_models(quantized.folder, None))]
    assert names[2:] == ["original, quanto int4", "original, hqq int8"]


def test_bytes_of_weights_that_a_step_reads() -> None:
    """Not the rows of an embedding, unless it is the output layer; of experts those that the batch can choose."""
    for family in ("llama", "gemma3", "llava"):
        model = stock(family)
        text = [part for name, part in model.named_parameters() if "vision" not in name and "projector" not in name]
        size = sum(part.nbytes for part in text)
        embedding = model.get_input_embeddings().weight
        tied = embedding is model.get_output_embeddings().weight
        assert step_weights(model, 1) == size - (0 if tied else embedding.nbytes), family
        assert tied == (family == "gemma3")
    for family in FAMILIES.keys() & {"qwen3_moe", "mixtral", "gemma4-moe"}:  # 4 experts, of which a token chooses 2
        model = stock(family)
        experts = sum(part.nbytes for name, part in model.named_parameters() if ".experts." in name)
        assert experts > 0, family
        embedding = model.get_input_embeddings().weight
        untied = 0 if embedding is model.get_output_embeddings().weight else embedding.nbytes
        everything = sum(part.nbytes for part in model.parameters()) - untied
        assert step_weights(model, 1) == everything - experts // 2, family
        assert step_weights(model, 2) == step_weights(model, 9) == everything, family


def test_weights_that_do_not_fit(
    mixed: Callable[[str], Converted], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = (checkpoint("llama") / "model.safetensors").stat().st_size
    monkeypatch.setattr(module, "free_bytes", lambda device: weights * 3 // 2)
    load_models(mixed("llama").folder, None)
    with pytest.raises(KVSurgeryError, match=r"weights take .* are free on cpu; leave the source out"):
        load_models(mixed("llama").folder, checkpoint("llama"))
    monkeypatch.setattr(module, "free_bytes", lambda device: weights // 2)
    with pytest.raises(KVSurgeryError, match=r"are free on cpu$"):
        load_models(mixed("llama").folder, None)


def test_a_source_of_another_shape(mixed: Callable[[str], Converted], tmp_path: Path) -> None:
    other = make("llama", tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(other))}.*: 2 layers"):
        load_models(mixed("llama").folder, other)
