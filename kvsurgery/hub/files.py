"""Download single files of a repository, such as a published head profile."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError

from kvsurgery.errors import HubError
from kvsurgery.hub.errors import explained
from kvsurgery.system.repo_id import HubFile


def fetch_file(
    file: HubFile, max_bytes: int, *, inside: str | None = None, beside: str | None = None
) -> tuple[Path, HubFile]:
    """Download one file into the Hub's cache. A file that was fetched by branch or tag is also found offline.

    Args:
        file: the file; its path may be a folder if `inside` is given.
        max_bytes: the largest size that is accepted.
        inside: name of the file in that folder.
        beside: name of a second file of the same folder, which is downloaded too if it exists.

    Returns:
        The path in the cache, and the address with the commit.

    Raises:
        HubError: it cannot be downloaded, or is larger; the line says why and what to do.
    """
    with explained(file.repo_id, file.revision, file.path):
        try:
            path, source = _fetch(file, max_bytes)
        except EntryNotFoundError:
            if inside is None:
                raise
            path, source = _fetch(replace(file, path=f"{file.path}/{inside}"), max_bytes)
        if beside is not None:
            with suppress(EntryNotFoundError):
                _fetch(replace(source, path=str(PurePosixPath(source.path).with_name(beside))), max_bytes)
    return path, source


def _fetch(file: HubFile, max_bytes: int) -> tuple[Path, HubFile]:
    if not constants.HF_HUB_OFFLINE:
        # fails at once, where a download retries for 23 s
        url = hf_hub_url(file.repo_id, file.path, revision=file.revision)
        size = get_hf_file_metadata(url).size or 0
        if size > max_bytes:
            raise HubError(f"{file.repo_id}: {file.path} has {size:,} bytes; this is not a file of head scores")
    path = Path(hf_hub_download(file.repo_id, file.path, revision=file.revision))
    # snapshots/COMMIT/PATH
    commit = path.parents[len(PurePosixPath(file.path).parts) - 1].name
    return path, replace(file, revision=commit)
