import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvsurgery.conversion.logits import compare_logits
from kvsurgery.errors import Mismatch
from kvsurgery.templates.kv_layout import Quantization
from tests.helpers.families import EVERY
from tests.helpers.surgery import convert_folder


@pytest.mark.parametrize("family", EVERY)
def test_emitted_and_stock_agree(mixed, family):
    report = compare_logits(mixed(family).folder)
    assert report.difference <= report.bound == 1e-5


def test_budgeted_heads_count_as_full(checkpoint, tmp_path):
    converted = convert_folder(checkpoint("gemma2"), tmp_path / "out", rest="budgeted", budget=2)
    assert compare_logits(converted.folder).difference <= 1e-5


def test_a_quantized_cache_counts_as_none(checkpoint, tmp_path):
    converted = convert_folder(checkpoint("qwen3"), tmp_path / "out", quantization=Quantization(2, residual=0))
    assert compare_logits(converted.folder).difference <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(checkpoint, tmp_path, dtype):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=dtype).save_pretrained(tmp_path / "half")
    report = compare_logits(convert_folder(tmp_path / "half", tmp_path / "out").folder)
    assert report.difference <= report.bound
    assert report.dtype == str(dtype).removeprefix("torch.")


def test_a_difference_is_found(mixed, tmp_path):
    folder = shutil.copytree(mixed("llama").folder, tmp_path / "broken")
    code = folder / "kv_softmax.py"
    code.write_text(re.sub(r"is_causal=True", "is_causal=False", code.read_text()))
    with pytest.raises(Mismatch, match="logits differ"):
        compare_logits(folder)


def test_not_a_number_is_found(mixed, tmp_path):
    folder = shutil.copytree(mixed("llama").folder, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(Mismatch, match="nan"):
        compare_logits(folder)
