"""The least harmful policy that fits a memory: candidates are priced in bytes and by their expected loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvsurgery.errors import PolicyError, ProfileError
from kvsurgery.heads.dimensions import ModelLayers
from kvsurgery.policy.evidence import Evidence
from kvsurgery.policy.memory import Footprint
from kvsurgery.policy.policy import Policy
from kvsurgery.policy.prices import ERRORS, Candidate, Prices, mean_budgets, quantizations
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.profile.full_heads import kv_scores, ranked_heads, unit_scores
from kvsurgery.recipe import Cache, Demand, Recipe
from kvsurgery.system.sizes import size


@dataclass(frozen=True)
class Fit:
    """All candidates, and the best of those that fit; with the measured losses that they are priced by, if any."""

    demand: Demand
    footprint: Footprint
    candidates: tuple[Candidate, ...]
    choice: Candidate
    losses: CacheLosses | None = None

    @cached_property
    def pareto(self) -> tuple[Candidate, ...]:
        """`pareto` of all candidates."""
        return pareto(self.candidates)

    @property
    def alternatives(self) -> tuple[Candidate, ...]:
        """The best candidate of each other width that fits, the least harmful first."""
        best_by_width: dict[int | str, Candidate] = {}
        for candidate in sorted(self.candidates, key=lambda item: item.worth, reverse=True):
            if candidate.total <= self.demand.memory and candidate.bits != self.choice.bits:
                best_by_width.setdefault(candidate.bits, candidate)
        return tuple(best_by_width.values())


def pareto(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """The candidates that lose less than any that is as small, from the smallest on."""
    result: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda item: (item.total, *(-value for value in item.worth))):
        if not result or candidate.loss < result[-1].loss:
            result.append(candidate)
    return tuple(result)


def fit(recipe: Recipe, evidence: Evidence, model: ModelLayers, footprint: Footprint) -> Fit:
    """Price every policy and choose the best that fits: over full heads, budgets and bits.

    Streaming heads have the sizes that are given, and every number of full heads is a candidate, of blocks that are
    alike every multiple of them. Budgeted ones have mean budgets of four sizes an octave (..., 64, 80, 96, 112, 128,
    ...), with full heads in steps of 1/256 of all. The profile decides which heads are full.

    With measured losses, the choice has the least expected divergence. Without them, and for budgeted heads, which they
    do not cover, prices are a guess, and caches of 2 bits are no candidates.

    Args:
        recipe: what has to fit, and all that is not chosen: what the rest is, its sizes, and how a cache is quantized.
        evidence, model: as `Policy.of` takes them; losses are of the recipe's streaming heads.
        footprint: what a process holds and computes of the model.

    Raises:
        PolicyError: nothing fits, the losses are of other streaming heads, fields are out of range, or every score is
            0.
        ProfileError: there are no scores.
    """
    demand, profile = recipe.fit, evidence.scores
    assert demand is not None  # as there is nothing to fit without one
    if profile is None:
        raise ProfileError("`fit` chooses heads by their scores; give a head profile")
    cache = recipe.cache or Cache()
    base_recipe = recipe.changed(rest=recipe.rest or evidence.rest, fit=None, kv_bits=8)
    budget = None if base_recipe.streaming else mean_budgets(demand.prompt)[-1]
    # raises what is wrong with the recipe before anything is priced
    checked_recipe = base_recipe.changed(full_heads=0, budget=budget, kv_bits=8 if cache.streaming else None)
    beta = Policy.of(checked_recipe, replace(evidence, losses=None), model).options.get("beta")
    scores = kv_scores(profile, recipe.heads.group_reduce, model.sources)[model.eligible]
    if not scores.any():
        raise PolicyError("every score of this profile is 0, so no policy is better than another; use another profile")

    streaming, losses = base_recipe.streaming, evidence.losses
    if streaming is None:
        losses = None
    elif losses is not None and (streaming.sink, streaming.recent) != (losses.sink, losses.recent):
        raise PolicyError(
            f"`cache.measured` has streaming heads of `streaming.sink` {losses.sink} and `streaming.recent` "
            f"{losses.recent}, and this recipe {streaming.sink} and {streaming.recent}; give the same, or measure again"
        )
    cache_quantizations = quantizations(cache, footprint.model.head_dim, ERRORS if losses is None else losses.settings)
    stored_windows = [0 if layer in model.sources else window for layer, window in enumerate(model.windows)]
    ranking = ranked_heads(unit_scores(scores, recipe.heads.head_unit), recipe.run)
    prices = Prices(footprint, demand, stored_windows, scores, cache_quantizations, ranking, recipe.run, losses)
    budget_scores = kv_scores(evidence.budget_scores or profile, recipe.heads.group_reduce, model.sources)[
        model.eligible
    ]
    candidates = [*prices.candidates(base_recipe, budget_scores, beta)]
    fitting_candidates = [candidate for candidate in candidates if candidate.total <= demand.memory]
    if not fitting_candidates:
        raise _nothing_fits(candidates, footprint, demand)
    return Fit(
        demand, footprint, tuple(candidates), max(fitting_candidates, key=lambda candidate: candidate.worth), losses
    )


def _nothing_fits(candidates: Sequence[Candidate], footprint: Footprint, demand: Demand) -> PolicyError:
    smallest = min(candidates, key=lambda candidate: candidate.total)
    if footprint.weights > demand.memory:
        return PolicyError(
            f"nothing fits in {size(demand.memory)}: the weights alone take {size(footprint.weights)}; "
            "raise `fit.memory` or `devices.tp`"
        )
    hint = "shorten `fit.context`, lower `fit.batch` or `fit.chunk`, or raise `devices.tp`"
    if footprint.positions is not None and footprint.positions < demand.context:
        hint = f"`fit.context` is beyond the {footprint.positions} positions that the model was made for; {hint}"
    if any(candidate.budget for candidate in candidates):
        hint += "; or set `rest` to streaming, since budgeted heads hold a prompt until its end"
    return PolicyError(
        f"nothing fits in {size(demand.memory)}: the smallest policy takes {size(smallest.total)}, "
        f"{size(smallest.total - demand.memory)} too much (weights {size(footprint.weights)}, "
        f"KV cache {size(smallest.kv_bytes)}, workspace {size(smallest.workspace)}); {hint}"
    )
