"""Errors of huggingface_hub, explained in one line each.

Between 0.34 and 2.x, huggingface_hub has used requests, httpx and httpx2, and does not wrap their exceptions.
"""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager

from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kvsurgery.checkpoint.source import CONFIG
from kvsurgery.errors import HubError, KVSurgeryError
from kvsurgery.system.repo_id import did_you_mean


@contextmanager
def explained(repo_id: str, revision: str | None = None, name: str = CONFIG) -> Generator[None]:
    """Turn any exception of huggingface_hub into one line with the fix; `name` is the file that is fetched first."""
    try:
        yield
    except KVSurgeryError:
        raise
    except Exception as error:
        raise HubError(_explain(error, repo_id, revision, name)) from error


@contextmanager
def no_such_folder(repo_id: str) -> Generator[None]:
    """Add to errors of the Hub that there is no such local folder, because a mistyped path looks like a Hub id.

    Raises:
        HubError: as raised inside the block.
    """
    try:
        yield
    except HubError as error:
        raise HubError(f"{error} (no folder {repo_id} is here{did_you_mean(repo_id)})") from error


def _explain(error: BaseException, repo_id: str, revision: str | None, name: str) -> str:
    url = f"{constants.ENDPOINT}/{repo_id}"
    chain = [error]
    while (link := chain[-1].__cause__ or chain[-1].__context__) is not None and link not in chain:
        chain.append(link)

    def raised(*types: type) -> bool:
        return any(isinstance(link, types) for link in chain)

    http_error = next((link for link in chain if getattr(link, "response", None) is not None), None)
    status = http_error and http_error.response.status_code
    reason = _line(getattr(http_error, "server_message", None) or http_error or error)
    if raised(HFValidationError):
        return f"{repo_id!r} is not a repository name; the Hub's names look like owner/name"
    if raised(GatedRepoError):
        return f"{repo_id} is gated: accept its terms at {url}, then log in with `hf auth login`"
    if raised(RevisionNotFoundError):
        return f"{repo_id} has no revision {revision!r}; {url}/commits/main lists them"
    if raised(EntryNotFoundError) and status == 404:
        no_model = ", so it is not a transformers model"
        return f"{repo_id} has no {name} at this revision" + (
            no_model if name == CONFIG else f"; {url}/tree/{revision or 'main'} lists its files"
        )
    if raised(LocalTokenNotFoundError):
        return f"no Hub token for {repo_id}: log in with `hf auth login`, or set HF_TOKEN"
    if status == 401:
        return f"{repo_id} is private, gated or not there, or the token is not valid (401): log in with `hf auth login`"
    if raised(RepositoryNotFoundError):
        return (
            f"{repo_id} is not on {constants.ENDPOINT}: check the name; if it is private, log in with `hf auth login`"
        )
    if status == 403:
        return (
            f"{constants.ENDPOINT} forbids this with {repo_id} ({reason}): log in with another token, `hf auth login`"
        )
    if status in (409, 412):
        return f"{repo_id} was changed by someone else meanwhile ({reason}): run the same command again"
    if status is not None and (status == 429 or status >= 500):
        return f"{constants.ENDPOINT} answers {status} for {repo_id}: wait a little and run the same command again"
    if constants.HF_HUB_OFFLINE or raised(OfflineModeIsEnabled):
        return f"{repo_id} is not in the cache, and HF_HUB_OFFLINE is set: unset it"
    if any(isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT) for link in chain):
        return f"no disk space for {repo_id} in {constants.HF_HUB_CACHE}: free some, or set HF_HOME to another disk"
    if status is None and any(map(in_transport, chain)):
        return f"cannot reach {constants.ENDPOINT} for {repo_id} ({_line(chain[-1])}): check the network and run again"
    return f"{repo_id}: {reason}"


def in_transport(error: BaseException) -> bool:
    """Whether an exception comes from the HTTP client of huggingface_hub: requests, httpx or httpx2."""
    return type(error).__module__.startswith(("requests", "urllib3", "http"))


def _line(message: object) -> str:
    """A message in one line of limited length."""
    return " ".join(str(message).split())[:300] or type(message).__name__
