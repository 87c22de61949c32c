"""Checkpoints that lack modules: they run, say how to get the code, and share a process with those that have it."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils

from tests.helpers.families import tokens
from tests.helpers.surgery import convert_folder

QUANTIZED_CODE = {"kv_codes.py", "kv_cpu.py", "kv_tiles.py", "kv_pack.py", "kv_packed.py"}
KERNELS = {"kv_cuda.py", "kv_decode.py", "kv_graph.py", "kv_kernels.py", "kv_prefill.py", "kv_store.py"}
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def emitted_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def loaded(cache: Path, *folders: Path) -> list[str]:
    """What a new process says that loads folders in order, with an empty cache of modules: what each generates, by
    itself and with a quantized cache."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(_loaded, cache, folders).result()


def _loaded(cache: Path, folders: tuple[Path, ...]) -> list[str]:
    sys.path.remove(dynamic_module_utils.HF_MODULES_CACHE)
    dynamic_module_utils.HF_MODULES_CACHE = str(cache)
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
    models = [AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True) for folder in folders]
    ids, lines = torch.arange(5, 65)[None], []
    for model in models:
        lines.append(f"plain {model.generate(ids, **GREEDY)[0].tolist()}")
        try:
            model.generate(ids, **GREEDY, cache_implementation="quantized", cache_config={"nbits": 8})
            lines.append("quantized")
        except ValueError as error:
            lines.append(str(error))
    return lines


def test_a_plain_checkpoint_runs_and_is_saved_and_loaded_again(checkpoint, mixed, tmp_path):
    converted = convert_folder(checkpoint("llama"), tmp_path / "plain-out", sparsity=0.5)
    assert emitted_names(converted.folder) & QUANTIZED_CODE == set()
    assert emitted_names(converted.folder) >= KERNELS
    ids = tokens(1, 60)
    expected = mixed("llama").model.generate(ids, **GREEDY)
    assert converted.model.generate(ids, **GREEDY).equal(expected)
    converted.model.save_pretrained(tmp_path / "saved-out")
    modules = {name for name in emitted_names(converted.folder) if name.endswith(".py")}
    assert modules <= emitted_names(tmp_path / "saved-out")
    first, *_ = loaded(tmp_path / "modules", tmp_path / "saved-out")
    assert first == loaded(tmp_path / "others", converted.folder)[0]


def test_a_checkpoint_without_kernels_computes_the_same(checkpoint, mixed, tmp_path):
    converted = convert_folder(checkpoint("llama"), tmp_path / "bare-out", sparsity=0.5, kernels=False)
    assert emitted_names(converted.folder) & (QUANTIZED_CODE | KERNELS) == set()
    ids = tokens(1, 60)
    assert converted.model.generate(ids, **GREEDY).equal(mixed("llama").model.generate(ids, **GREEDY))


@pytest.mark.parametrize("order", [1, -1], ids=["plain first", "quantized first"])
def test_folders_of_one_name_share_a_process(checkpoint, tmp_path, order):
    """transformers 4 keeps the modules of the first folder, and adds those that only the second one has."""
    bare = convert_folder(checkpoint("llama"), tmp_path / "bare" / "model", sparsity=0.5, kernels=False)
    quantized = convert_folder(checkpoint("llama"), tmp_path / "quantized" / "model", sparsity=0.5, quantized=True)
    apart = [loaded(tmp_path / f"modules-{name}", each.folder) for name, each in (("a", bare), ("b", quantized))]
    assert apart[0][0] == apart[1][0]
    assert "convert the original model with --quantized" in apart[0][1]
    assert apart[1][1] == "quantized"
    folders = [bare.folder, quantized.folder][::order]
    together = loaded(tmp_path / "modules", *folders)
    assert together[0] == together[2] == apart[0][0]
    assert together[{1: 3, -1: 1}[order]] == "quantized"
