"""`decide`: what every head of a checkpoint becomes, by a recipe and what was measured of the model."""

from __future__ import annotations

from dataclasses import dataclass

from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.checkpoint.stored_widths import stored_bits
from kvsurgery.errors import PolicyError, UnsupportedModel
from kvsurgery.policy.evidence import Evidence
from kvsurgery.policy.fit import Fit, fit
from kvsurgery.policy.memory import Footprint
from kvsurgery.policy.policy import Policy
from kvsurgery.policy.reform import with_reform
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.recipe import Recipe
from kvsurgery.recipe_tables import SOURCE
from kvsurgery.text.user_turn import user_marker


@dataclass(frozen=True)
class Decision:
    """What becomes of the heads of a model.

    Attributes:
        policy: every head, and the complete recipe.
        profile: that decided it, as a conversion records it.
        fit: what else heads could have become, where a memory decided.
    """

    policy: Policy
    profile: HeadProfile | None = None
    fit: Fit | None = None


def decide(recipe: Recipe, evidence: Evidence, checkpoint: Checkpoint) -> Decision:
    """Decide what becomes of every head of a checkpoint.

    Args:
        recipe: what is asked for.
        evidence: what was measured of a model of the same dimensions, all that the recipe names.

    Raises:
        PolicyError: the recipe contradicts itself, the evidence or the model.
        ProfileError: the evidence is of another model, or lacks what the recipe asks for.
        UnsupportedModel: the model cannot be read so, or its config.json lacks the widths that the recipe asks for.
        CheckpointError: these widths are malformed.
    """
    model, embedding, fit_result = checkpoint.model, evidence.embedding, None
    assert evidence.losses is not None or recipe.measured is None  # as `Evidence.read` has it
    if embedding is None and recipe.reform.given:
        names = " and ".join(f"`reform.{size}`" for size in recipe.reform.given)
        raise PolicyError(f"{names} requires a reform profile")
    if embedding is not None and recipe.fit is not None:
        raise PolicyError("`fit` makes no room for reading long prompts; leave it or the reform profile out")
    if embedding is not None and model.family.no_reform:
        raise UnsupportedModel(model.family.no_reform)
    evidence.check(model.layers, checkpoint.name)
    if recipe.fit is not None:
        fit_result = fit(recipe, evidence, model.layers, Footprint.of(checkpoint, recipe.devices.tp))
        recipe = fit_result.choice.recipe(recipe)
    source_bits = stored_bits(model) if recipe.cache and recipe.cache.bits == SOURCE else ()
    policy = Policy.of(recipe, evidence, model.layers, source_bits)
    if embedding is not None:
        policy = with_reform(policy, embedding, checkpoint.positions, user_marker(checkpoint.folder))
    return Decision(policy, evidence.profile, fit_result)
