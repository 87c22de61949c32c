"""The bundled profile comes from gates that training tells apart, and that ablation agrees with."""

import importlib
import sys
from dataclasses import replace

import numpy as np
import pytest

from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.profile.full_heads import full_heads
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.origin import ModelOrigin
from tests.helpers.tiny_recall import FOLDER, ablation, task

SMOLLM2 = FOLDER.parent / "smollm2"


@pytest.fixture
def scripts(monkeypatch):
    """The modules `gates` and `measure` of the folder, as its scripts import them."""
    monkeypatch.syspath_prepend(FOLDER)
    yield [importlib.import_module(name) for name in ("gates", "measure")]
    for name in ("ablation", "gates", "measure", "task"):
        del sys.modules[name]


def test_the_profile_tells_the_heads_apart(scripts):
    gates, measure = scripts
    profile = HeadProfile.load(FOLDER / "profile.safetensors")
    assert (profile.method, profile.sink, profile.recent) == ("duo", measure.SINK, measure.RECENT)
    critical = np.zeros(profile.scores.shape, dtype=bool)
    critical[tuple(zip(*measure.CRITICAL, strict=True))] = True
    assert profile.scores[critical].min() > 0.9
    assert profile.scores[~critical].max() < 0.5
    told = profile.provenance
    assert {name: told[name] for name in ("steps", "reg", "lr")} == {
        name: getattr(gates.OPTIONS, name) for name in ("steps", "reg", "lr")
    }


@pytest.mark.parametrize("path", sorted(SMOLLM2.glob("*.safetensors")), ids=lambda path: path.stem)
def test_profiles_name_their_model_without_a_path(path):
    kind = CacheLosses if CacheLosses.recognizes(path) else HeadProfile
    assert kind.load(path).origin == ModelOrigin("model", None, "15815f9d5ac86072bf15467b01829e08")


@pytest.mark.skipif(not (SMOLLM2 / "model" / "config.json").exists(), reason="examples/smollm2/make.py makes the model")
def test_the_model_is_found_beside_its_profiles(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = SMOLLM2 / "er.safetensors"
    assert HeadProfile.load(path).origin.place([path]) == (str(SMOLLM2 / "model"), None)


def test_gates_of_20_minutes_rank_half_of_the_heads():
    """None of the heads that are full at 50% is chosen by its place in the model."""
    minutes, gates = (HeadProfile.load(SMOLLM2 / f"{name}.safetensors") for name in ("minutes", "gates"))
    full = full_heads(minutes, 0.5)
    assert full.sum() == 45
    assert (minutes.scores[full] > minutes.scores[~full].max()).all()
    assert (minutes.scores == 0).sum() == 33
    assert (full & full_heads(gates, 0.5)).sum() == 39


@pytest.mark.slow
def test_training_finds_the_heads_that_recall(scripts, monkeypatch):
    """By fewer steps and in shorter texts than the profile took: what gates find, ablation finds too, and chance does
    not."""
    gates, measure = scripts
    monkeypatch.setattr(gates, "LONGEST", 256)
    measured = measure.load()
    profile, _ = gates.measure(measured, replace(gates.OPTIONS, steps=60))
    found = profile.scores >= 0.5
    assert 0 < found.sum() <= found.size / 2
    assert profile.scores[found].min() > profile.scores[~found].max() + 0.3

    batch = task.answered(task.prompts(3, 8, 256))
    ablated = ablation.ablation_scores(measured.model, [batch], sink=measure.SINK, recent=measure.RECENT)
    assert set(np.flatnonzero(found)) == set(ablated.ravel().argsort()[-found.sum() :])

    questions = task.prompts(4, 12, 512)
    original = task.exact_match(measured.model, questions)
    assert original > 0.95
    assert measure.kept_recall(measured, found, questions) >= 0.99 * original
    by_chance = [measure.random_choice(profile, found.sum(), seed) for seed in range(2)]
    assert not any((choice & found).sum() == found.sum() for choice in by_chance)
    kept = [measure.kept_recall(measured, choice, questions) for choice in by_chance]
    assert max(kept) < 0.99 * original
    assert np.mean(kept) < 0.8 * original
