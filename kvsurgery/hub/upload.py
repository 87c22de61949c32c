"""Upload a folder to the Hub in one atomic commit, and compare the Hub's checksums with the local files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.hf_api import RepoFile

from kvsurgery.checkpoint.side_files import matches
from kvsurgery.checkpoint.source import INDEX, SINGLE
from kvsurgery.errors import HubError, Mismatch
from kvsurgery.hub.errors import explained

NEVER_PUSHED = (".*", "*/.*", "*.part", "__pycache__/*", "*/__pycache__/*")
# what transformers would load instead of, or together with, the weights that are pushed
WEIGHTS = (SINGLE, INDEX, "model-*-of-*.safetensors")


def check_login(repo_id: str) -> None:
    """Ask the Hub whether it knows the token, before hours of work depend on it.

    Raises:
        HubError: there is no token, or the Hub refuses it or cannot be reached.
    """
    with explained(repo_id):
        HfApi().whoami()


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    extra_files: Mapping[str, Path | bytes] | None = None,
) -> str:
    """Upload a folder as one commit, so that no reader ever sees half of it, and compare the Hub's checksums.

    Weights go up before the commit and stay there, so a second call after a failure sends only what is missing. Weights
    of an earlier model that transformers would load in place of these are deleted by the same commit.

    Args:
        folder: everything in it is uploaded but hidden files and partial ones.
        repo_id: created if it does not exist.
        private: create it private; an existing public one is refused.
        create_pr: open a pull request and leave main as it is.
        extra_files: more files by their names in the repository; they replace files of the folder with the same names.

    Returns:
        The URL of the repository, or of the pull request.

    Raises:
        HubError: the Hub cannot be reached or refuses; the line says why and what to do.
        Mismatch: the Hub holds other bytes than the folder.
    """
    api = HfApi()
    with explained(repo_id):
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)
        repo_id = url.repo_id
        info = api.model_info(repo_id)
        if private and not info.private:
            raise HubError(f"{repo_id} exists and is public; make it private at {url}/settings, or push it publicly")
        files = {name: folder / name for name in pushed_files(folder)} | dict(extra_files or {})
        additions = [CommitOperationAdd(name, content) for name, content in files.items()]
        remote_names = {sibling.rfilename for sibling in info.siblings or ()}
        stale_names = {name for name in remote_names if matches(name, WEIGHTS)} - files.keys()
        deletions = [CommitOperationDelete(name, is_folder=False) for name in sorted(stale_names)]
        # create_commit makes one commit; upload_folder of huggingface_hub 2 makes several
        commit = api.create_commit(
            repo_id, [*deletions, *additions], commit_message="Upload converted model", create_pr=create_pr
        )
        remote_files = {
            entry.path: entry
            for entry in api.list_repo_tree(repo_id, recursive=True, revision=commit.oid)
            if isinstance(entry, RepoFile)
        }
    for addition in additions:
        if not _same_content(addition, remote_files.get(addition.path_in_repo)):
            raise Mismatch(
                f"{repo_id}: {addition.path_in_repo} on the Hub is not the local file; delete it there and push again"
            )
    return commit.pr_url or str(url)


def pushed_files(folder: Path) -> list[str]:
    """The files that `push` uploads, by their names in the repository."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return [name for name in files if not matches(name, NEVER_PUSHED)]


def _same_content(addition: CommitOperationAdd, remote_file: RepoFile | None) -> bool:
    """Whether the Hub's file is the local one: by SHA-256 where it lies in LFS, by git's object id elsewhere."""
    size = addition.upload_info.size
    if remote_file is None or remote_file.size != size:
        return False
    if remote_file.lfs is not None:
        return remote_file.lfs.sha256 == addition.upload_info.sha256.hex()
    with addition.as_file() as file:
        return remote_file.blob_id == hashlib.sha1(b"blob %d\0" % size + file.read()).hexdigest()
