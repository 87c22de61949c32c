"""A converted checkpoint computes the same in 1, 2 and 4 processes, each of which holds the bytes that it should."""

import multiprocessing
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, dynamic_module_utils

from kvsurgery.decide.policy import Quantisation
from kvsurgery.score.embedding_heads import EmbeddingHead
from kvsurgery.score.profile import HeadProfile
from templates.kv_layout import KVLayout
from tests.distributed import process
from tests.families import largest, make
from tests.surgery import convert_folder, random_profile

pytestmark = pytest.mark.slow

WORLDS = [2, 4]
WIDE = {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 2}
WIDE |= {"vocab_size": 104}  # some versions of transformers want it to divide
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "mixtral", "phi3", "olmo2", "gemma2"]
# a scale for every element loses nothing
LOSSLESS = Quantisation(8, "per-token", 1, 5)
KINDS = {
    "uneven": {"tp_uneven": True, "full_heads": 6},
    "budgets": {"rest": "budgeted", "full_heads": 4, "budget": 6},
    "8 bits": {"sparsity": 0.5, "quantisation": LOSSLESS},
}
SIZES = {"chunk": 8, "encode_budget": 12, "window": 3, "keep": 3, "pool": 3, "recompute_budget": 40, "query_length": 4}
NAMES = [*FAMILIES, *KINDS, "reform"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints for four processes, and one for one."""
    root, found = tmp_path_factory.mktemp("parallel"), {}
    for name in FAMILIES:
        wide = {**WIDE, "max_window_layers": 1} if name == "qwen2" else {**WIDE, "head_dim": 8}
        source = make(name, root / f"{name}-stock", **wide)
        found[name] = convert_folder(source, root / name, sparsity=0.5, tp=4).folder
        if name == "llama":
            for kind, options in KINDS.items():
                found[kind] = convert_folder(source, root / kind, tp=4, **options).folder
            scored = random_profile(source)
            heads = EmbeddingHead(0, "q", 3), EmbeddingHead(1, "k", 2)
            reform = HeadProfile(None, "reform", None, "test", scored.model, embedding_heads=heads)
            options = {"reform": reform, "sizes": SIZES, "sparsity": 0.5, "tp": 4}
            found["reform"] = convert_folder(source, root / "reform", scored, **options).folder
            found["one block"] = convert_folder(source, root / "one block", sparsity=0.5).folder
    return found


@pytest.fixture(scope="module")
def alone(folders):
    """What one process computes; it also copies the code, which several would do at once."""
    return cache(lambda name: process.compute(process.load(folders[name])))


@pytest.fixture(scope="module", params=WORLDS, ids="{} processes".format)
def world(request: pytest.FixtureRequest, folders, alone, tmp_path_factory: pytest.TempPathFactory):
    """What each of some processes computes, by rank, and the folder of what they saved."""
    for name in folders:
        alone(name)
    out, count = tmp_path_factory.mktemp("world"), request.param
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.process"])
    given = out / "store", Path(dynamic_module_utils.HF_MODULES_CACHE), folders, out
    processes = [context.Process(target=process.main, args=(rank, count, *given), daemon=True) for rank in range(count)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(120)
    assert [one.exitcode for one in processes] == [0] * count
    return [torch.load(out / f"{rank}.pt") for rank in range(count)], out


def check(found: dict, expected: dict) -> None:
    """Logits within 1e-4, tokens equal."""
    for name in found.keys() - {"bytes"}:
        if found[name].is_floating_point():
            assert largest(found[name] - expected[name], expected[name]) <= 1e-4, name
        else:
            assert found[name].equal(expected[name]), name


@pytest.mark.parametrize("name", NAMES)
def test_processes_compute_what_one_does(world, alone, name):
    for of_rank in world[0]:
        check(of_rank[name], alone(name))


@pytest.mark.parametrize("name", NAMES)
def test_every_process_holds_its_share(world, alone, folders, name):
    config = AutoConfig.from_pretrained(folders[name])
    layout, count = KVLayout.from_config(config), len(world[0])
    size = {"batch": process.BATCH, "prompt": process.PROMPT, "new": process.NEW, "itemsize": 4}
    held = [of_rank[name]["bytes"] for of_rank in world[0]]
    whole = layout.kv_bytes(**size)
    assert alone(name)["bytes"] == whole
    if name in ("phi3", "olmo2"):
        assert held == [whole] * count
        return
    assert held == [part.kv_bytes(**size) for part in layout.parts(count)]
    assert sum(held) == whole
    head = 2 * process.BATCH * (process.PROMPT + process.NEW) * layout.head_dim * 4
    assert max(held) - min(held) <= (head if name in ("uneven", "budgets") else 0)


@pytest.mark.parametrize("name", process.SAVED)
def test_what_processes_save_is_the_checkpoint(world, folders, name):
    saved, given = (
        {key: part for file in sorted(folder.glob("*.safetensors")) for key, part in load_file(file).items()}
        for folder in (world[1] / name, folders[name])
    )
    assert saved.keys() == given.keys()
    assert all(saved[key].equal(given[key]) for key in given)
    assert {path.name for path in (world[1] / name).glob("*.py")} == {path.name for path in folders[name].glob("*.py")}


def test_a_split_that_the_layout_does_not_know_is_refused_by_all(world):
    for of_rank in world[0]:
        for said in of_rank["one block"]:
            assert "convert it with --tp" in said


def test_long_prompts_are_refused_by_all(world):
    for of_rank in world[0]:
        assert "a long prompt is read by all heads" in of_rank["long"]


def test_layers_over_processes(world, alone):
    if "pipeline" not in world[0][0]:
        pytest.skip("transformers 5 has pipelines; tried with two processes")
    for of_rank in world[0]:
        check(of_rank["pipeline"], alone("llama"))
    assert sum(of_rank["pipeline"]["bytes"] for of_rank in world[0]) == alone("llama")["bytes"]


def test_tensors_and_data_over_processes(world, alone):
    if "tensors and data" not in world[0][0]:
        pytest.skip("transformers 5.18 loads such a model; tried with four processes")
    for of_rank in world[0]:
        check(of_rank["tensors and data"], alone("uneven"))
