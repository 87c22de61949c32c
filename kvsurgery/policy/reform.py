"""REFORM on top of a policy: the embedding heads of a profile, by their places after surgery, and sizes that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from kvsurgery.errors import PolicyError
from kvsurgery.policy.policy import Policy
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.methods import REFORM
from kvsurgery.recipe import ReformSizes
from kvsurgery.templates.kv_reform import Reform


def with_reform(
    policy: Policy,
    profile: HeadProfile,
    positions: int | None,
    marker: Sequence[int] = (),
) -> Policy:
    """The policy, and how long prompts are read before it applies, by the sizes of its recipe.

    Args:
        profile: a reform profile of the model.
        positions: that the model was made for. A chunk and what is kept before it take at most so many, and so does
            the recompute budget; sizes that are not stated are halved until they fit.
        marker: token ids that open a user's turn.

    Raises:
        PolicyError: the profile has no embedding heads, or sizes contradict each other or the model.
    """
    if not profile.embedding_heads:
        raise PolicyError(f"the {profile.method} profile has no embedding heads; give a reform profile")
    sizes = policy.recipe.reform
    orders = [layer.order for layer in policy.layers]
    heads = tuple(
        (head.layer, head.state, _place(orders[head.layer], head.state, head.head, profile.model.group))
        for head in profile.embedding_heads
    )
    reform = Reform(heads, query_marker=tuple(marker), **sizes.given)
    if positions is not None:
        reform = _fitting(reform, positions, sizes.given)
    try:
        reform.check(profile.model.layers, profile.model.query_heads, profile.model.kv_heads)
    except ValueError as error:
        raise PolicyError(f"`reform`: {error}") from error
    sizes = ReformSizes(**{field.name: getattr(reform, field.name) for field in fields(ReformSizes)})
    options = {"method": REFORM, **policy.options, "reform": {"profile": profile.hash, **vars(sizes)}}
    return replace(policy, recipe=replace(policy.recipe, reform=sizes), options=options, reform=reform)


def _fitting(reform: Reform, positions: int, stated_sizes: dict[str, Any]) -> Reform:
    """The sizes, those that are not given halved until they fit the model's positions."""
    while reform.chunk + reform.encode_budget > positions:
        larger_field = max(
            (name for name in ("chunk", "encode_budget") if name not in stated_sizes),
            key=lambda name: getattr(reform, name),
            default=None,
        )
        if larger_field is None or getattr(reform, larger_field) < 2:
            fixed_field = next(
                (
                    name
                    for name in ("chunk", "encode_budget")
                    if name in stated_sizes and stated_sizes[name] >= positions
                ),
                None,
            )
            if fixed_field:
                raise PolicyError(
                    f"`reform.{fixed_field}` {stated_sizes[fixed_field]} leaves no room in the {positions} positions "
                    "of the model; give a smaller one"
                )
            raise PolicyError(
                f"`reform.chunk` {reform.chunk} and `reform.encode_budget` {reform.encode_budget} together exceed the "
                f"{positions} positions of the model; give smaller ones"
            )
        reform = replace(reform, **{larger_field: getattr(reform, larger_field) // 2})
    while reform.recompute_budget > positions:
        if "recompute_budget" in stated_sizes:
            raise PolicyError(
                f"`reform.recompute_budget` {reform.recompute_budget} exceeds the {positions} positions of the model; "
                "give a smaller one"
            )
        reform = replace(reform, recompute_budget=reform.recompute_budget // 2)
    return reform


def _place(order: Sequence[int], state: str, head: int, group: int) -> int:
    """Where a source head lies after surgery: query heads move with their group."""
    if state == "q":
        return order.index(head // group) * group + head % group
    return order.index(head)
