"""A model's own sliding layers, in the commands that show and join profiles: no head of theirs can be full."""

import json
from dataclasses import replace

import pytest

from kvsurgery.checkpoint.model import Model
from kvsurgery.checkpoint.source import read_config
from kvsurgery.errors import PolicyError, ProfileError
from kvsurgery.heads.dimensions import ModelLayers
from kvsurgery.policy.evidence import Evidence
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.ranking import SPARSITIES
from tests.cli.profile_command import refusal, run
from tests.helpers.deciding import decided

LAYERS, HEADS = 6, 4
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 8192,
}
GEMMA2 = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "sliding_window": 4096, **SHAPE}
GEMMA3 = {
    **{"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 512, **SHAPE},
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
MODELS = {"gemma2": GEMMA2, "gemma3": GEMMA3}
FULL = {"gemma2": [1, 3, 5], "gemma3": [5]}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working folder with both models, and scores that are highest in the first layers."""
    monkeypatch.chdir(tmp_path)
    for name, config in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    scores = {f"{layer}-{head}": [1 - layer / 10 - head / 100] for layer in range(LAYERS) for head in range(HEADS)}
    (tmp_path / "R.json").write_text(json.dumps(scores))
    return tmp_path


@pytest.fixture(params=MODELS)
def model(request):
    """The name of a model that was measured, as p.safetensors has it."""
    run("import", "headkv", "R.json", "--model", request.param, "-o", "p.safetensors")
    return request.param


def forget_windows(path="p.safetensors"):
    """The profile as an older version wrote it."""
    replace(HeadProfile.load(path), windows=None).save(path)


def shown(*arguments):
    return json.loads(run("show", "p.safetensors", "--json", *arguments))


def test_counts_are_those_of_the_policy(model):
    config = read_config(model)
    windows = Model.of(config).windows
    profile, facts = HeadProfile.load("p.safetensors"), shown()
    assert facts["windows"] == list(windows)
    for sparsity in SPARSITIES:
        policy = decided(profile, windows, sparsity=sparsity, rest="streaming")
        expected = [None if layer.native else layer.full for layer in policy.layers]
        assert facts["full_heads_per_layer"][str(sparsity)] == expected
        assert sum(filter(None, expected)) == policy.eligible - round(sparsity * policy.eligible)


def test_the_map_marks_sliding_layers(model):
    out = run("show", "p.safetensors")
    rows = [line.split("|")[-1].split() for line in out.splitlines() if line[:5].strip().isdigit()]
    assert [layer for layer, counts in enumerate(rows) if counts == ["-"] * 3] == [
        layer for layer in range(LAYERS) if layer not in FULL[model]
    ]
    assert f"{LAYERS - len(FULL[model])} of 6 layers have a sliding window of the model's own" in out


def test_an_older_file_takes_them_from_the_model(model):
    new = shown()
    forget_windows()
    old = shown()
    assert old["windows"] is None
    assert None not in old["full_heads_per_layer"]["0.5"]
    told = shown("--model", model)
    assert told["hash"] == old["hash"] != new["hash"]
    assert {**told, "hash": new["hash"]} == new


def test_another_model_is_refused(model, here):
    (here / "other").mkdir()
    (here / "other/config.json").write_text(json.dumps({**MODELS[model], "num_key_value_heads": 4}))
    assert "give its model" in refusal("show", "p.safetensors", "--model", "other")


def test_compare_counts_heads_of_full_layers_only(model):
    profile = HeadProfile.load("p.safetensors")
    scores = profile.scores.copy()
    sliding = [layer for layer in range(LAYERS) if layer not in FULL[model]]
    scores[sliding] = scores[sliding][:, ::-1]  # where nobody looks, the profiles disagree
    replace(profile, scores=scores).save("other.safetensors")
    forget_windows()  # the other one knows
    found = json.loads(run("compare", "p.safetensors", "other.safetensors", "--json"))
    assert found["spearman"] == pytest.approx(1)
    assert [overlap["heads"] for overlap in found["overlap"]] == [2 * len(FULL[model])] * len(SPARSITIES)
    assert {overlap["share"] for overlap in found["overlap"]} == {1}


@pytest.mark.parametrize("how", ["mean", "rank-product"])
def test_merged_profiles_know_the_windows(model, how):
    run("import", "headkv", "R.json", "--model", model, "--method", "headkv-r2", "-o", "r2.safetensors")
    run("import", "headkv", "R.json", "--model", model, "-o", "old.safetensors")
    forget_windows("old.safetensors")
    other = "r2.safetensors" if how == "rank-product" else "old.safetensors"
    run("merge", "p.safetensors", other, "--how", how, "-o", "both.safetensors")
    merged, one = HeadProfile.load("both.safetensors"), HeadProfile.load("p.safetensors")
    assert merged.windows == one.windows
    if how == "rank-product":
        assert not merged.scores[~one.eligible].any()
        assert merged.scores[one.eligible].max() == 1


def test_profiles_of_models_with_other_windows():
    for name in MODELS:
        run("import", "headkv", "R.json", "--model", name, "--base-model", "gemma", "-o", f"{name}.safetensors")
    for command in (["compare"], ["merge", "-o", "both.safetensors"]):
        line = refusal(*command, "gemma2.safetensors", "gemma3.safetensors")
        assert "layer 0 has a sliding window of" in line


def test_scores_of_sliding_layers_choose_no_full_heads(model):
    profile = HeadProfile.load("p.safetensors")
    with pytest.raises(PolicyError, match=r"layer 0 has full attention .* and a sliding window of \d+ tokens in the"):
        Evidence(profile).check(ModelLayers(profile.model, [None] * LAYERS), "gemma2")
    assert decided(replace(profile, windows=None), rest="streaming").eligible == LAYERS * 2


@pytest.mark.parametrize("windows", [(None,), (-1,) * LAYERS, ("4096",) * LAYERS, (True,) * LAYERS])
def test_windows_that_make_no_sense(windows):
    run("import", "headkv", "R.json", "--model", "gemma2", "-o", "p.safetensors")
    with pytest.raises(ProfileError, match="windows must be 6 sizes"):
        replace(HeadProfile.load("p.safetensors"), windows=windows)
