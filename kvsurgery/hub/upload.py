"""Upload a folder to the Hub in one atomic commit, and compare the Hub's checksums with the local files."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from kvsurgery.checkpoint.patterns import matches
from kvsurgery.errors import HubError, Mismatch
from kvsurgery.hub.errors import explained

NEVER_PUSHED = (".*", "*/.*", "*.part", "__pycache__/*", "*/__pycache__/*")
# what no library loads from a repository; a text can be a vocabulary
INERT = (
    "*.gif",
    "*.html",
    "*.jpeg",
    "*.jpg",
    "*.md",
    "*.pdf",
    "*.png",
    "*.svg",
    "*.txt",
    "*.webp",
    "license*",
    "notice*",
)
VOCABULARIES = ("*dict*.txt", "*merges*.txt", "*vocab*.txt")
GIT_FILES = {".gitattributes", ".gitignore"}
LFS_ATTRIBUTES = {"filter=lfs", "diff=lfs", "merge=lfs", "-text"}
LISTED = 10  # files that a refusal names


@dataclass(frozen=True)
class RemoteFolder:
    """The files of a repository's main branch, before a push.

    Attributes:
        repo_id: the repository, with its owner.
        commit: the latest commit; None if there is no such repository.
        private: whether the repository is private.
        names: the names of its files.
        git_files: the lines of its `.gitattributes` and `.gitignore`.
    """

    repo_id: str
    commit: str | None = None
    private: bool = True
    names: tuple[str, ...] = ()
    git_files: Mapping[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, repo_id: str) -> RemoteFolder:
        """Read the repository, which also checks the token, before hours of work depend on both.

        Raises:
            HubError: there is no token, or the Hub refuses it or cannot be reached.
        """
        api = HfApi()
        with explained(repo_id, name=".gitattributes"):
            user = api.whoami()["name"]
            repo_id = repo_id if "/" in repo_id else f"{user}/{repo_id}"
            try:
                info = api.model_info(repo_id)
            except RepositoryNotFoundError:
                return cls(repo_id)
            names = tuple(sorted(sibling.rfilename for sibling in info.siblings or ()))
            paths = {name: hf_hub_download(repo_id, name, revision=info.sha) for name in GIT_FILES & set(names)}
        lines = {name: Path(path).read_text("utf-8", errors="replace").splitlines() for name, path in paths.items()}
        return cls(repo_id, info.sha, bool(info.private), names, lines)

    def others(self, pushed_names: Collection[str]) -> list[str]:
        """Other files in the repository that can change how the pushed files load, or how git stores them."""
        names = [name for name in self.names if name not in pushed_names and not _is_inert(name)]
        return [name for name in names if name not in self.git_files or not all(map(_is_of_lfs, self.git_files[name]))]

    def check(self, pushed_names: Collection[str], *, private: bool, delete_others: bool) -> None:
        """Check that no other file in the repository would change the pushed model.

        Raises:
            HubError: the repository should be private but is public, or has files that would be loaded with the pushed
                ones.
        """
        if private and not self.private:
            raise HubError(f"{self.repo_id} exists and is public; make it private in its settings, or push it publicly")
        others = self.others(pushed_names)
        if others and not delete_others:
            more = f" and {len(others) - LISTED} more" if len(others) > LISTED else ""
            raise HubError(
                f"{self.repo_id} has files that this folder does not have, and that can change what it loads as: "
                f"{', '.join(others[:LISTED])}{more}; give `delete_others` to delete them in the same commit, or "
                "another repository"
            )


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    delete_others: bool = False,
    extra_files: Mapping[str, Path | bytes] | None = None,
) -> str:
    """Upload a folder in one commit, so that no reader ever sees half of it, and compare the Hub's checksums.

    Weights are uploaded before the commit and stay on the Hub, so a second call after a failure sends only missing
    files. The commit names its parent, so a change by someone else in between is an error.

    Args:
        folder: the folder; all its files are uploaded, except for hidden and partial ones.
        repo_id: the repository, which is created if it does not exist.
        private: create a private repository; an existing public one is refused.
        create_pr: open a pull request, and do not change main.
        delete_others: delete files that can change how the folder loads; without this, they are refused.
        extra_files: more files by name in the repository; they replace files of the folder with the same names.

    Returns:
        The URL of the repository, or of the pull request.

    Raises:
        HubError: the Hub cannot be reached or refuses; the line says why and what to do.
        Mismatch: a file on the Hub differs from the local file.
    """
    api = HfApi()
    files: dict[str, Path | bytes] = {name: folder / name for name in pushed_files(folder)} | dict(extra_files or {})
    with explained(repo_id):
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)
    remote = RemoteFolder.read(url.repo_id)
    if remote.commit is None:
        raise HubError(f"{url.repo_id} cannot be read, so its contents cannot be checked; check the token's rights")
    remote.check(files.keys(), private=private, delete_others=delete_others)
    others = set(remote.others(files.keys()))
    # the Hub ignores files that the parent commit's `.gitignore` lists, unless this commit replaces it
    for name in others & GIT_FILES:
        files[name] = "".join(f"{line}\n" for line in remote.git_files[name] if _is_of_lfs(line)).encode()
    deletions = [CommitOperationDelete(name, is_folder=False) for name in sorted(others - GIT_FILES)]
    additions = [CommitOperationAdd(name, content) for name, content in files.items()]
    with explained(remote.repo_id):
        # create_commit makes one commit; upload_folder of huggingface_hub 2 makes several
        commit = api.create_commit(
            remote.repo_id,
            [*deletions, *additions],
            commit_message="Upload converted model",
            create_pr=create_pr,
            parent_commit=remote.commit,
        )
        remote_files = {
            entry.path: entry
            for entry in api.list_repo_tree(remote.repo_id, recursive=True, revision=commit.oid)
            if isinstance(entry, RepoFile)
        }
    for addition in additions:
        if not _same_content(addition, remote_files.get(addition.path_in_repo)):
            raise Mismatch(
                f"{remote.repo_id}: {addition.path_in_repo} on the Hub is not the local file; delete it there and push "
                "again"
            )
    return commit.pr_url or str(url)


def pushed_files(folder: Path) -> list[str]:
    """The files that `push` uploads, by their names in the repository."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return [name for name in files if not matches(name, NEVER_PUSHED)]


def _is_inert(name: str) -> bool:
    return matches(name.lower(), INERT) and not matches(name.lower(), VOCABULARIES)


def _is_of_lfs(line: str) -> bool:
    """Whether a line of `.gitattributes` or `.gitignore` does nothing but assign files to LFS."""
    words = line.split()
    return not words or words[0].startswith("#") or set(words[1:]) == LFS_ATTRIBUTES


def _same_content(addition: CommitOperationAdd, remote_file: RepoFile | None) -> bool:
    """Whether the Hub's file equals the local one: by SHA-256 for LFS files, else by git's object id."""
    size = addition.upload_info.size
    if remote_file is None or remote_file.size != size:
        return False
    if remote_file.lfs is not None:
        return remote_file.lfs.sha256 == addition.upload_info.sha256.hex()
    with addition.as_file() as file:
        return remote_file.blob_id == hashlib.sha1(b"blob %d\0" % size + file.read()).hexdigest()
