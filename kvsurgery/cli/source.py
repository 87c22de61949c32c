"""Where a checkpoint comes from: a folder, or a Hub id of which headers, all files, or all but weights are fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvsurgery.hub.stream import Streamed
    from kvsurgery.operation import Operation
    from kvsurgery.score.profile import HeadProfile


def prepare(
    source: str | None, revision: str | None, profile: HeadProfile, options: dict[str, Any], weights: bool
) -> Operation:
    """Prepare a folder or a Hub id, whose weights are downloaded only if asked for, and only after its headers.

    Without a source, it is the profile's model.
    """
    from kvsurgery.operation import Operation

    source, revision = _place(source, revision, profile)
    if Path(source).is_dir():
        operation = Operation.prepare(Path(source), profile, **options)
    else:
        operation = _open(source, revision, profile, options, weights)
    _warn(operation)
    return operation


def fetched(
    source: str | None, revision: str | None, profile: HeadProfile, check: Callable[[Path], object]
) -> tuple[Path, dict[str, str]]:
    """The folder of a checkpoint that is going to be converted several times, and what `Operation.prepare` calls it.

    A Hub id is downloaded, after a check of its headers.
    """
    from kvsurgery import hub

    source, revision = _place(source, revision, profile)
    if Path(source).is_dir():
        return Path(source), {}
    with _hub_id(source):
        folder, commit = hub.fetch_checkpoint(source, revision, check)
    return folder, {"name": source, "revision": commit}


@contextmanager
def streamed(
    source: str | None, revision: str | None, profile: HeadProfile, options: dict[str, Any]
) -> Iterator[tuple[Operation, Streamed]]:
    """Prepare a Hub id whose weights are fetched while they are converted, inside the block."""
    from kvsurgery import hub

    source, revision = _place(source, revision, profile)
    if Path(source).is_dir():
        raise click.UsageError(f"--stream goes with a Hub id, and {source} is a folder")
    with ExitStack() as stack:
        with _hub_id(source):
            check = partial(_plan, source, profile, options)
            remote = stack.enter_context(hub.stream_checkpoint(source, revision, check))
            operation = check(remote.folder, remote.commit)
        _warn(operation)
        yield replace(operation, checkpoint=remote.fill(operation.checkpoint)), remote


def _place(source: str | None, revision: str | None, profile: HeadProfile) -> tuple[str, str | None]:
    """The folder or Hub id, and its revision."""
    if source is None:
        return profile.base_model, revision or profile.base_revision
    if revision is not None and Path(source).is_dir():
        raise click.UsageError(f"--revision goes with a Hub id, and {source} is a folder")
    return source, revision


def _warn(operation: Operation) -> None:
    """Say what a choice does not see to."""
    from kvsurgery import console

    fit, positions = operation.fit, operation.checkpoint.text_config.get("max_position_embeddings")
    if fit is None:
        return
    demand = fit.demand
    if type(positions) is int and positions < demand.context:
        console.stderr.print(
            f"--context {demand.context} is beyond the {positions} positions that the model was made for"
        )
    if fit.choice.budget and not demand.new_tokens:
        console.stderr.print(
            "budgeted heads keep every generated token; `kvsurgery fit --new-tokens` makes room for these"
        )


def _open(source: str, revision: str | None, profile: HeadProfile, options: dict[str, Any], weights: bool) -> Operation:
    from kvsurgery import hub

    plan = partial(_plan, source, profile, options)
    with _hub_id(source):
        if weights:
            return plan(*hub.fetch_checkpoint(source, revision, check=plan))
        with hub.headers(source, revision) as remote:
            return plan(remote.folder, remote.commit)


def _plan(
    source: str, profile: HeadProfile, options: dict[str, Any], folder: Path, commit: str | None = None
) -> Operation:
    from kvsurgery.operation import Operation

    return Operation.prepare(folder, profile, name=source, revision=commit, **options)


@contextmanager
def _hub_id(source: str) -> Iterator[None]:
    """Refuse what cannot be a Hub id, and say what else a name that the Hub does not know may be."""
    from kvsurgery import hub
    from kvsurgery.errors import CheckpointError, HubError

    if not hub.is_repo_id(source):
        raise CheckpointError(f"{source} is no folder and no Hub id; give the checkpoint as the first argument")
    if Path(source).exists():
        raise CheckpointError(f"{source} is a file; give the folder of the checkpoint")
    try:
        yield
    except HubError as error:
        # a mistyped path looks like a Hub id
        hint = f" (no folder {source} is here)" if Path(source).parent.is_dir() else ""
        raise HubError(f"{error}{hint}") from error
