"""`PreparedConversion`: everything about one conversion that is decided before a byte moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvsurgery.checkpoint.model_code import check_stock
from kvsurgery.checkpoint.source import Checkpoint
from kvsurgery.conversion.plan import SurgeryPlan, plan_surgery
from kvsurgery.emit.files import Emitted, emit
from kvsurgery.errors import PolicyError, ProfileError, UnsupportedModel
from kvsurgery.policy.fit import Fit, fit
from kvsurgery.policy.measured import measured_cache
from kvsurgery.policy.memory import Footprint
from kvsurgery.policy.policy import Policy, decide, keep_all
from kvsurgery.policy.reform import with_reform
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.loading import load_losses, pinned
from kvsurgery.recipe import AUTO, Recipe
from kvsurgery.text.user_turn import user_marker


@dataclass(frozen=True)
class PreparedConversion:
    """A checkpoint, what becomes of its heads, where every byte goes, and the files that are emitted beside them.

    `fit` says what else its heads could have become, where a memory decided.
    """

    checkpoint: Checkpoint
    policy: Policy
    plan: SurgeryPlan
    emitted: Emitted
    fit: Fit | None = None

    @classmethod
    def prepare(
        cls,
        folder: Path,
        profile: HeadProfile | None,
        recipe: Recipe = Recipe(),
        *,
        reform: HeadProfile | None = None,
        budgets: HeadProfile | None = None,
        name: str | None = None,
        revision: str | None = None,
    ) -> PreparedConversion:
        """Read a checkpoint's headers and plan its conversion.

        Args:
            folder: the checkpoint.
            profile: scores, measured on a model of the same dimensions; None: every head stays full.
            recipe: what is asked for; its profiles are those given here.
            reform: a profile of embedding heads, by which prompts beyond the context are read.
            budgets: scores that budgets follow, in place of the profile's.
            name, revision: what the checkpoint is called, and its commit, if it comes from the Hub.

        Raises:
            KVSurgeryError: every reason why the conversion cannot be done that headers can show.
        """
        if reform is None and recipe.reform.given:
            names = " and ".join(f"`reform.{size}`" for size in recipe.reform.given)
            raise PolicyError(f"{names} requires a reform profile")
        if reform is not None and recipe.fit is not None:
            raise PolicyError("`fit` makes no room for reading long prompts; leave it or the reform profile out")
        checkpoint = Checkpoint.open(folder, name, revision)
        check_stock(folder, checkpoint.config, recipe.code.ignore_model_code)
        model = checkpoint.model
        if reform is not None and model.family.no_reform:
            raise UnsupportedModel(model.family.no_reform)
        dimensions = model.dimensions
        for measured_profile in (profile, reform, budgets):
            if measured_profile is not None and dimensions != measured_profile.model:
                profiled_model = f"{measured_profile.base_model} ({measured_profile.model})"
                raise ProfileError(f"the profile is of {profiled_model}, but {checkpoint.name} has {dimensions}")
        layers, fit_result, losses = model.layers, None, None
        if recipe.measured is not None:
            losses = load_losses(recipe.measured)
            if dimensions != losses.model:
                measured_model = f"{losses.base_model} ({losses.model})"
                raise ProfileError(
                    f"{recipe.measured} was measured on {measured_model}, but {checkpoint.name} has {dimensions}"
                )
            if layers.windows != losses.windows:
                raise ProfileError(
                    f"{recipe.measured} was measured on {losses.base_model}, whose layers have other windows than "
                    f"those of {checkpoint.name}; measure this model"
                )
            recipe = recipe.changed(kv_measured=pinned(recipe.measured, losses))
        if recipe.fit is not None:
            if profile is None:
                raise ProfileError("`fit` chooses heads by their scores; give a head profile")
            footprint = Footprint.of(checkpoint, recipe.devices.tp)
            fit_result = fit(profile, layers, footprint, recipe, budgets, losses)
            recipe = fit_result.choice.recipe(recipe)
        if losses is not None and recipe.cache and recipe.cache.bits != AUTO:
            recipe = replace(recipe, cache=measured_cache(recipe.cache, losses))
        if profile is None:
            policy = keep_all(dimensions, layers, recipe, losses)
        else:
            policy = decide(profile, layers, recipe, budgets, losses)
        if reform is not None:
            policy = with_reform(policy, reform, checkpoint.positions, user_marker(folder), recipe.reform)
        recorded_profile = profile or reform
        plan = plan_surgery(checkpoint, policy, recorded_profile.hash if recorded_profile else None)
        return cls(checkpoint, policy, plan, emit(checkpoint, policy, recorded_profile), fit_result)
