"""`Evidence`: what was measured of a model, and what it says of heads where a recipe does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kvsurgery.errors import PolicyError, ProfileError
from kvsurgery.heads.dimensions import ModelLayers, attention_name
from kvsurgery.heads.kinds import Rest
from kvsurgery.policy.budgets import BETA
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.loading import load_losses, load_scores, pinned
from kvsurgery.profile.methods import SCORE_METHODS
from kvsurgery.recipe import Recipe


@dataclass(frozen=True)
class Evidence:
    """What was measured of a model, by which its heads are decided.

    Attributes:
        scores: decide which heads are full; None: every head stays full.
        budgets: has the scores that budgets follow; None: `scores`.
        embedding: has the heads by which long prompts are read.
        losses: of quantized and streaming heads.
    """

    scores: HeadProfile | None = None
    budgets: HeadProfile | None = None
    embedding: HeadProfile | None = None
    losses: CacheLosses | None = None

    @classmethod
    def read(cls, recipe: Recipe, profiles: Iterable[HeadProfile] = ()) -> tuple[Evidence, Recipe]:
        """The files that a recipe names, and the recipe with their addresses on the Hub by commit.

        Args:
            profiles: take the place of the recipe's profiles.

        Raises:
            ProfileError: a file cannot be read, or two profiles are of a kind.
        """
        profiles, budgets, losses = [*profiles], None, None
        if not profiles:
            profiles = [load_scores(path) for path in recipe.profiles]
            recipe = replace(recipe, profiles=tuple(map(pinned, recipe.profiles, profiles)))
        if recipe.budgets_from is not None:
            budgets = load_scores(recipe.budgets_from)
            recipe = recipe.changed(budgets_from=pinned(recipe.budgets_from, budgets))
        if recipe.measured is not None:
            losses = load_losses(recipe.measured)
            recipe = recipe.changed(kv_measured=pinned(recipe.measured, losses))
        score_profiles = [profile for profile in profiles if profile.scores is not None]
        reform_profiles = [profile for profile in profiles if profile.scores is None]
        if len(score_profiles) > 1 or len(reform_profiles) > 1:
            raise ProfileError("two head profiles of the same kind; `kvsurgery profile merge` makes one of them")
        [scores] = score_profiles or [budgets]
        [embedding] = reform_profiles or [None]
        return cls(scores, budgets, embedding, losses), recipe

    @property
    def profile(self) -> HeadProfile | None:
        """The profile that a conversion records: that of scores, or else that of embedding heads."""
        return self.scores or self.embedding

    @property
    def budget_scores(self) -> HeadProfile | None:
        """The profile whose scores budgets follow."""
        return self.budgets or self.scores

    @property
    def reduces_groups(self) -> bool:
        """Whether some scores are of query heads, which are reduced over their group."""
        return any(profile is not None and profile.granularity == "query" for profile in (self.scores, self.budgets))

    @property
    def rest(self) -> Rest:
        """What heads that are not full become, where a recipe does not say."""
        assert self.scores is not None  # as without them every head is full
        return "budgeted" if self.budgets else SCORE_METHODS[self.scores.method].rest

    @property
    def beta(self) -> float | None:
        """How budgets follow scores, where a recipe does not say: shares and budgets as they are."""
        assert self.budget_scores is not None  # as without them no head has a budget
        method = SCORE_METHODS.get(self.budget_scores.method)
        return None if method and method.divides else BETA

    def check(self, model: ModelLayers, name: str) -> None:
        """Check that all was measured on a model with such layers.

        Raises:
            ProfileError: something was measured on a model of other dimensions, or losses with other windows.
            PolicyError: scores lack a layer that has full attention here.
        """
        for measured in (self.scores, self.embedding, self.budgets, self.losses):
            if measured is not None and measured.model != model.dimensions:
                raise ProfileError(
                    f"the {measured.KIND.name} is of {measured.base_model} ({measured.model}), but {name} has "
                    f"{model.dimensions}"
                )
        if self.losses is not None and self.losses.windows != tuple(model.windows):
            raise ProfileError(
                f"`cache.measured` is of {self.losses.base_model}, whose layers have other windows than those of "
                f"{name}; measure this model"
            )
        for profile in (self.scores, self.budgets):
            if profile is not None and (layers := np.flatnonzero(model.eligible & ~profile.eligible)).size:
                measured_attention = attention_name((profile.windows or ())[layers[0]])
                raise PolicyError(
                    f"layer {layers[0]} has full attention in this model and {measured_attention} in the profile's, "
                    f"{profile.base_model}; measure this model: kvsurgery profile compute"
                )
