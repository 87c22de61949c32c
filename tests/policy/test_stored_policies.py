"""Recipes of 0.1.0, in flat TOML, decide the policies that they decided then: hashes, and options in their order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsurgery.heads.dimensions import ModelDimensions, ModelLayers
from kvsurgery.policy.evidence import Evidence
from kvsurgery.policy.policy import Policy
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from tests.helpers.losses import MODEL, losses

CASES = json.loads(Path(__file__).with_name("stored_policies.json").read_text())
WINDOWS = (None, 700, None, None)


def profile(method: str) -> HeadProfile:
    """Scores of four layers with four KV heads in two groups; HeadKV's are of query heads."""
    granularity = "query" if method == "headkv-r2" else "kv"
    model = ModelDimensions(4, 8, 4, 64)
    draw = np.random.default_rng(len(method))
    scores = draw.random((4, 8 if granularity == "query" else 4), dtype=np.float32)
    return HeadProfile(np.floor(1 + 99 * scores) if method == "budgets" else scores, method, granularity, "m", model)


def decided(case: dict[str, Any]) -> Policy:
    recipe = Recipe.from_toml(case["recipe"])
    if recipe_losses := losses() if "auto" in case["recipe"] else None:
        return Policy.of(recipe, Evidence(losses=recipe_losses), ModelLayers(MODEL, [None] * MODEL.layers))
    profiles = (None if case[name] is None else profile(case[name]) for name in ("profile", "budgets"))
    return Policy.of(recipe, Evidence(*profiles), ModelLayers(ModelDimensions(4, 8, 4, 64), WINDOWS))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['profile']}: {case['recipe']}")
def test_a_recipe_decides_what_it_did(case: dict[str, Any]) -> None:
    policy = decided(case)
    assert policy.hash == case["hash"]
    assert list(json.loads(json.dumps(policy.options)).items()) == [*case["options"].items()]
