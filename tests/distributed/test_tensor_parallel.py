"""A converted checkpoint computes the same in 1, 2 and 4 processes, each of which holds the bytes that it should."""

from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.policy.memory import Footprint
from kvsurgery.profile.embedding_heads import EmbeddingHead
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.templates.kv_layout import KVLayout, Quantization
from tests.distributed import process
from tests.distributed.process import WIDE
from tests.distributed.start import start
from tests.helpers.cases import some
from tests.helpers.families import FAMILIES as AVAILABLE
from tests.helpers.families import MROPE, WITH_STATES, largest, make
from tests.helpers.surgery import convert_folder, random_profile

pytestmark = pytest.mark.slow

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "mixtral", "phi3", "olmo2", "gemma2"]
FAMILIES += [
    "ministral3",
    "qwen2_moe",
    "glm4_moe",
    "smollm3",
    "seed_oss",
    "olmo3",
    "granite",
    "glm4",
    "exaone4",
    "cohere2",
    "apertus",
    "ernie4_5",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "llama4",
]
# transformers 4 fails to load the scalars of Apertus's activation in several processes
FAMILIES = [name for name in FAMILIES if name in AVAILABLE and (process.FIVE or name != "apertus")]
# experts that versions before 5.18 do not split: transformers 4 none whose names end in a digit
# and none that are shared
WHOLE = ("qwen2_moe",) if process.FIVE else ("mixtral", "glm4_moe")
INTERLEAVED = ("olmo3", "exaone4", "cohere2")
SPLIT_SHARED = ("qwen3_next", "qwen3_5_moe")  # their shared experts are split, which `fit` counts whole
# a scale for every element loses nothing
LOSSLESS = Quantization(8, "per-token", 1, 5, rotate="both")
KINDS = {
    "uneven": {"tp_uneven": True, "full_heads": 6},
    "budgets": {"rest": "budgeted", "full_heads": 4, "budget": 6},
    "uneven budgets": {"rest": "budgeted", "full_heads": 6, "budget": 6, "tp_uneven": True},
    "held": {"rest": "budgeted", "full_heads": 4, "budget": 6, "window": 2, "hold": 2},
    "8 bits": {"sparsity": 0.5, "quantization": LOSSLESS},
}
UNLIKE = [name for name in KINDS if name != "8 bits"]  # whose processes hold more or fewer bytes than others
SIZES = {"chunk": 8, "encode_budget": 12, "window": 3, "keep": 3, "pool": 3, "recompute_budget": 40, "query_length": 4}
NAMES = [*FAMILIES, *KINDS, "reform"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints for four processes, and one for one."""
    root, found = tmp_path_factory.mktemp("parallel"), {}
    for name in FAMILIES:
        wide = {**WIDE, "max_window_layers": 1} if name == "qwen2" else {**WIDE, "head_dim": 8}
        if name in INTERLEAVED:
            wide = {**WIDE, "layer_types": ["sliding_attention", "full_attention"]}
        if name in WITH_STATES:
            wide["layer_types"] = ["linear_attention", "full_attention"]
            wide["rope_parameters"] = {**MROPE, "mrope_section": [1, 1, 0]}
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


@pytest.mark.parametrize("count", some([2, 4]))
def test_processes_do_together_what_one_does(folders, alone, tmp_path, count):
    """One launch for all of it: a test each would launch them in every worker of pytest.

    Families take turns, but Llama, and so do kinds of heads; all else is shown with both counts.
    """
    others = {name for place, name in enumerate([*KINDS, *FAMILIES[1:]]) if place % 2 == (count == 4)}
    shown = {name: folder for name, folder in folders.items() if name not in others}
    for name in shown:
        alone(name)
    ranks = start(count, process.work, tmp_path, shown, tmp_path)
    for name in shown.keys() & NAMES:
        for found in ranks:
            check_results(name, found[name], alone(name))
        check_bytes(name, folders[name], [found[name]["bytes"] for found in ranks], alone(name)["bytes"])
    for name in shown.keys() & FAMILIES:
        check_weights(name, folders[name], [found[name]["weights"] for found in ranks])
    for name in shown.keys() & process.SAVED:
        check_saved(name, tmp_path / name, folders[name])
    for found in ranks:
        for refusal in found["one block"]:  # without a cache, and with one
            assert "convert it with --tp" in refusal
        assert "a long prompt is read by all heads" in found["long"]
        for name, reference in {"pipeline": "llama", "tp_plan": "llama", "tensors and data": "uneven"}.items():
            if name in found:
                check_results(name, found[name], alone(reference))
    if "pipeline" in ranks[0]:
        assert [found["tp_plan"]["bytes"] for found in ranks] == [found["llama"]["bytes"] for found in ranks]
        assert sum(found["pipeline"]["bytes"] for found in ranks) == alone("llama")["bytes"]


def check_results(name: str, found: dict, expected: dict) -> None:
    """Logits within 1e-4, tokens equal."""
    for what in found.keys() - {"bytes", "weights"}:
        if found[what].is_floating_point():
            assert largest(found[what] - expected[what], expected[what]) <= 1e-4, (name, what)
        else:
            assert found[what].equal(expected[what]), (name, what)


def check_bytes(name: str, folder: Path, held: list[int], whole: int) -> None:
    """Every process holds what the layout says of its part, and at most a head more than another."""
    layout = KVLayout.from_config(AutoConfig.from_pretrained(folder))
    size = {"batch": process.BATCH, "prompt": process.PROMPT, "new": process.NEW, "itemsize": 4}
    assert whole == layout.kv_bytes(**size), name
    if name in ("phi3", "olmo2", "olmo3"):  # their attention is replicated
        assert held == [whole] * len(held), name
        return
    assert held == [part.kv_bytes(**size) for part in layout.parts(len(held))], name
    assert sum(held) == whole, name
    head = 2 * process.BATCH * (process.PROMPT + process.NEW) * layout.head_dim * 4
    assert max(held) - min(held) <= (head if name in UNLIKE else 0), name


def check_weights(name: str, folder: Path, held: list[int]) -> None:
    """No process holds more than `fit` says, which counts the embedding and the output layer whole."""
    checkpoint = Checkpoint.open(folder.with_name(f"{name}-stock"))
    found = Footprint.of(checkpoint, len(held))
    outer = (1 if name in ("gemma2", "cohere2") else 2) * found.vocabulary * found.hidden * 4
    if name in SPLIT_SHARED:
        assert max(held) <= found.weights, name
    elif process.MESHES:
        assert held == [found.weights - outer + outer // len(held)] * len(held), name
    elif name not in WHOLE:
        assert found.weights - outer < min(held) <= max(held) <= found.weights, name


def check_saved(name: str, saved: Path, given: Path) -> None:
    """What `save_pretrained` writes is the checkpoint again: tensors to the bit, and the code."""
    before, after = (
        {key: part for file in sorted(folder.glob("*.safetensors")) for key, part in load_file(file).items()}
        for folder in (given, saved)
    )
    assert after.keys() == before.keys(), name
    assert all(after[key].equal(before[key]) for key in before), name
    assert {path.name for path in saved.glob("*.py")} == {path.name for path in given.glob("*.py")}, name
