"""Load head profiles and measured losses, from local files or from the Hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvsurgery.errors import ProfileError
from kvsurgery.profile.cache_losses import CacheLosses
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers.files import LARGEST_SCORES_FILE
from kvsurgery.profile.tensor_file import TensorFile
from kvsurgery.system.repo_id import HubFile, is_address


def local_file(
    source: str | Path, *, inside: str | None = None, beside: str | None = None
) -> tuple[Path, HubFile | None]:
    """The local path of a file and, for a file that was downloaded from the Hub, its address with the commit.

    Args:
        source: a path, `hf://owner/repo/path[@revision]`, or the URL of a page of the Hub.
        inside, beside: as in `hub.fetch_file`.

    Raises:
        ProfileError: the source is empty.
        HubError: it is not a file on the Hub, or cannot be downloaded; the line says why and what to do.
    """
    if source == "":  # which `Path` takes for the working directory
        raise ProfileError("the name of the file is empty; give a file, or its address on the Hub")
    remote = HubFile.parse(str(source))
    if remote is None:
        return Path(source), None
    from kvsurgery import hub

    return hub.fetch_file(remote, LARGEST_SCORES_FILE, inside=inside, beside=beside)


def load(source: str | Path, kind: type[HeadProfile] | type[CacheLosses] | None = None) -> HeadProfile | CacheLosses:
    """Load a head profile or a file of measured losses; for a file on the Hub, `provenance["file"]` is its address.

    Args:
        kind: the required kind of file; by default either of them.

    Raises:
        ProfileError: as `HeadProfile.load` and `CacheLosses.load`.
        HubError: as `local_file`.
    """
    path, remote = local_file(source)
    kind = kind or (CacheLosses if CacheLosses.recognizes(path) else HeadProfile)
    if remote is None:
        return kind.load(path)
    try:
        loaded_file = kind.load(path)
    except ProfileError as error:
        raise ProfileError(str(error).replace(str(path), remote.address)) from error
    return replace(loaded_file, provenance={**loaded_file.provenance, "file": remote.address})


def load_scores(source: str | Path) -> HeadProfile:
    """Load a profile of head scores; a file of measured losses has them too."""
    loaded_file = load(source)
    return loaded_file.head_profile if isinstance(loaded_file, CacheLosses) else loaded_file


def load_losses(source: str | Path) -> CacheLosses:
    """Load a file of measured losses."""
    losses = load(source, CacheLosses)
    assert isinstance(losses, CacheLosses)  # as asked for
    return losses


def pinned(source: str, tensor_file: TensorFile) -> str:
    """The address of a loaded file with its commit; a local path is returned unchanged."""
    return tensor_file.address or source if is_address(source) else source
