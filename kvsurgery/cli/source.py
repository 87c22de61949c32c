"""The checkpoint that a command converts, and warnings about a choice by memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvsurgery.recipe import Recipe

if TYPE_CHECKING:
    from kvsurgery.conversion.prepared import PreparedConversion
    from kvsurgery.conversion.request import Request


def request_of(source: str | None, revision: str | None, recipe: Recipe) -> Request:
    """The checkpoint, profiles and recipe that a command is given.

    Raises:
        UsageError: a folder has no revision.
    """
    from kvsurgery.conversion.request import Request

    request = Request.of(source, revision, recipe)
    if revision is not None and request.folder is not None:
        raise click.UsageError(f"--revision goes with a Hub id, and {request.place} is a folder")
    return request


def warn(prepared: PreparedConversion) -> None:
    """Print what a choice by memory does not take into account."""
    from kvsurgery.display import console

    fit, positions = prepared.fit, prepared.checkpoint.positions
    if fit is None:
        return
    demand = fit.demand
    if positions is not None and positions < demand.context:
        console.stderr.print(
            f"--context {demand.context} is beyond the {positions} positions that the model was made for"
        )
    if fit.choice.budget and not demand.new_tokens and prepared.policy.recipe.hold is None:
        console.stderr.print(
            "budgeted heads keep every generated token; `kvsurgery fit --new-tokens` makes room for these"
        )
