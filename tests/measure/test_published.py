"""The five profiles that people publish, where they are at hand, against facts counted by other means."""

import os
from pathlib import Path

import numpy as np
import pytest

from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.heads.kinds import STREAMING
from kvsurgery.profile.full_heads import kv_scores
from kvsurgery.profile.importers.duo import import_duo
from kvsurgery.profile.importers.headkv import import_headkv
from kvsurgery.profile.profiled_model import ProfiledModel
from tests.helpers.deciding import decided

SHARED = Path(os.environ.get("KVSURGERY_SHARED", Path(__file__).parents[3] / "shared")) / "profiles"
pytestmark = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"no {SHARED}: set KVSURGERY_SHARED to a folder with the published profiles"
)

LLAMA_2_7B = ModelDimensions(layers=32, query_heads=32, kv_heads=32, head_dim=128)
LLAMA_3_8B = MISTRAL_7B = ModelDimensions(layers=32, query_heads=32, kv_heads=8, head_dim=128)
DUO = {
    # folder: dimensions, heads at exactly 1 and at exactly 0 after clipping
    "Llama-2-7B-32K-Instruct": (LLAMA_2_7B, 145, 274),
    "Llama-3-8B-Instruct-Gradient-1048k": (LLAMA_3_8B, 82, 18),
    "Mistral-7B-Instruct-v0.2": (MISTRAL_7B, 110, 5),
}
HEADKV = {
    # file: method, dimensions, heads at 0, largest score, trials
    "Llama-3-8B-Instruct_R.json": ("headkv-r", LLAMA_3_8B, 728, 1.00873, 107),
    "Llama-3-8B-Instruct_R2.json": ("headkv-r2", LLAMA_3_8B, 2, 0.34426, 74),
    "llama-2-7b-80k_R.json": ("headkv-r", LLAMA_2_7B, 719, 0.94257, 586),
}


@pytest.fixture(params=[*DUO, *HEADKV])
def published(request):
    if request.param in DUO:
        return import_duo(SHARED / "duo" / request.param, ProfiledModel(request.param, DUO[request.param][0]))
    method, model, *_ = HEADKV[request.param]
    return import_headkv(SHARED / "headkv" / request.param, ProfiledModel(request.param, model), method)


@pytest.mark.parametrize("name", DUO)
def test_duo(name):
    model, ones, zeros = DUO[name]
    made = import_duo(SHARED / "duo" / name, ProfiledModel(name, model))
    assert made.scores.shape == (32, model.kv_heads)
    assert (made.sink, made.recent) == (128, 256)
    assert made.provenance["training"]["num_steps"] == 2000
    assert ((made.scores == 1).sum(), (made.scores == 0).sum()) == (ones, zeros)
    # gates are bfloat16, so float32 holds them exactly
    raw = np.loadtxt(SHARED / "duo" / name / "full_attention_heads.tsv")
    np.testing.assert_array_equal(made.scores, np.clip(raw, 0, 1))


@pytest.mark.parametrize("name", HEADKV)
def test_headkv(name):
    method, model, zeros, top, count = HEADKV[name]
    made = import_headkv(SHARED / "headkv" / name, ProfiledModel(name, model), method)
    assert made.scores.shape == (32, 32)
    assert (made.scores == 0).sum() == zeros
    assert made.scores.max() == pytest.approx(top, abs=1e-5)
    assert made.provenance["trials"] == [count, count]


@pytest.mark.parametrize("sparsity", [0, 0.25, 0.5, 0.75, 0.9, 1])
def test_counts_are_exact_in_spite_of_ties(published, sparsity):
    policy = decided(published, sparsity=sparsity, rest="streaming")
    heads = 32 * published.model.kv_heads
    assert policy.counts[STREAMING] == round(sparsity * heads)
    scores = kv_scores(published)
    full = [scores[n, head] for n, layer in enumerate(policy.layers) for head in layer.order[: layer.full]]
    rest = [scores[n, head] for n, layer in enumerate(policy.layers) for head in layer.order[layer.full :]]
    assert not full or not rest or min(full) >= max(rest)


def test_all_full_and_all_streaming_layers_occur():
    made = import_duo(SHARED / "duo" / "Llama-3-8B-Instruct-Gradient-1048k", ProfiledModel("llama", LLAMA_3_8B))
    full = [layer.full for layer in decided(made, sparsity=0.75, rest="streaming").layers]
    assert min(full) == 0
    full = [layer.full for layer in decided(made, sparsity=0.25, rest="streaming").layers]
    assert max(full) == 8


def test_mean_or_max_matters():
    path = SHARED / "headkv" / "Llama-3-8B-Instruct_R2.json"
    made = import_headkv(path, ProfiledModel("llama", LLAMA_3_8B), method="headkv-r2")
    mean, most = (decided(made, full_heads=64, rest="streaming", group_reduce=how) for how in ("mean", "max"))
    kept = [
        {(n, head) for n, layer in enumerate(policy.layers) for head in layer.order[: layer.full]}
        for policy in (mean, most)
    ]
    assert 5 <= len(kept[0] - kept[1]) <= 8
