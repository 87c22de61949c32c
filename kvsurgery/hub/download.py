"""Download checkpoints from the Hub, headers before weights, to refuse unsupported checkpoints in seconds."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

from kvsurgery.checkpoint.headers import MAX_HEADER_BYTES
from kvsurgery.checkpoint.patterns import matches
from kvsurgery.checkpoint.side_code import SIDE_CONFIGS
from kvsurgery.checkpoint.side_files import KEPT, LEFT_OUT, LEFT_OUT_FOLDERS
from kvsurgery.checkpoint.source import ADAPTER_CONFIG, CONFIG, INDEX, SINGLE
from kvsurgery.errors import HubError, KVSurgeryError
from kvsurgery.hub.errors import explained, no_such_folder
from kvsurgery.hub.ranges import RemoteFile

# files that decide what conversion makes of a checkpoint
WHOLE = {CONFIG, INDEX, "generation_config.json", "README.md", "adapter_config.json", "kvsurgery.json", *SIDE_CONFIGS}


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint on the Hub as a folder without weights.

    Attributes:
        folder: a folder with complete configs, index, card and provenance. Each shard has its header, then a hole up to
            the true size, so that headers are read as in a local checkpoint. Offline, the cached snapshot itself.
        commit: its commit.
        files: the names of all files of this commit.
        shards: by name, the shards whose headers were fetched.
    """

    folder: Path
    commit: str
    files: tuple[str, ...]
    shards: Mapping[str, RemoteFile] = field(default_factory=dict)

    @property
    def needed_files(self) -> list[str]:
        """The files that conversion uses."""
        shards = {path.name for path in self.folder.glob("*.safetensors")}
        return [name for name in self.files if name in shards or name == INDEX or _is_side_file(name)]


def fetch_config(repo_id: str, revision: str | None = None, name: str = CONFIG) -> tuple[Path, str]:
    """Download only config.json, or another small file.

    Returns:
        Its folder in the Hub's cache, and the commit. A file that was fetched by branch or tag is also found offline.

    Raises:
        HubError: it cannot be downloaded; the line says why and what to do.
    """
    with no_such_folder(repo_id), explained(repo_id, revision):
        if not constants.HF_HUB_OFFLINE:
            HfApi().model_info(repo_id, revision=revision)  # fails at once, where a download retries for 23 s
        folder = Path(hf_hub_download(repo_id, name, revision=revision)).parent
    return folder, folder.name


def fetch_adapter(repo_id: str, revision: str | None = None) -> Path:
    """Download an adapter into the Hub's cache, without pickles and training leftovers.

    Raises:
        HubError: it cannot be downloaded; the line says why and what to do.
    """
    folder, commit = fetch_config(repo_id, revision, ADAPTER_CONFIG)
    left_out = [pattern for pattern in LEFT_OUT if pattern != "*.safetensors"]
    with explained(repo_id, revision):
        snapshot_download(repo_id, revision=commit, ignore_patterns=[*left_out, *(f"{x}/*" for x in LEFT_OUT_FOLDERS)])
    return folder


@contextmanager
def headers(repo_id: str, revision: str | None = None) -> Generator[RemoteCheckpoint]:
    """Fetch a checkpoint without its weights into a folder that is removed afterwards.

    Errors raised inside the block name the repository in place of the temporary folder.

    Raises:
        HubError: it cannot be downloaded; the line says why and what to do.
    """
    if constants.HF_HUB_OFFLINE:
        with no_such_folder(repo_id), explained(repo_id, revision):
            # without the patterns, a snapshot that `fetch_checkpoint` made counts as incomplete
            ignore_patterns = [*LEFT_OUT, *(f"{name}/*" for name in LEFT_OUT_FOLDERS)]
            snapshot = snapshot_download(
                repo_id, revision=revision, local_files_only=True, ignore_patterns=ignore_patterns
            )
        folder = Path(snapshot)
        yield RemoteCheckpoint(folder, folder.name, tuple(path.name for path in folder.iterdir()))
        return
    _, commit = fetch_config(repo_id, revision)
    with tempfile.TemporaryDirectory(prefix="kvsurgery-") as temporary:
        folder = Path(temporary)
        with explained(repo_id, revision):
            files = tuple(file.rfilename for file in HfApi().model_info(repo_id, revision=commit).siblings or ())
            shards = _fetch_headers(repo_id, commit, files, folder)
        try:
            yield RemoteCheckpoint(folder, commit, files, shards)
        except KVSurgeryError as error:
            if temporary not in str(error):
                raise
            raise type(error)(str(error).replace(temporary, repo_id)) from error


def fetch_checkpoint(
    repo_id: str, revision: str | None = None, check: Callable[[Path], object] | None = None
) -> tuple[Path, str]:
    """Download a checkpoint into the Hub's cache; a second call downloads only what is missing.

    Args:
        repo_id, revision: the checkpoint; a branch or tag is pinned to its commit first.
        check: called with the folder of `headers` before any weight is downloaded; its errors end the call.

    Returns:
        The snapshot folder and its commit.

    Raises:
        HubError: it cannot be downloaded; the line says why and what to do.
    """
    with headers(repo_id, revision) as remote:
        if check:
            check(remote.folder)
        if constants.HF_HUB_OFFLINE:
            return remote.folder, remote.commit
        needed_files = remote.needed_files
    with explained(repo_id, revision):
        folder = Path(snapshot_download(repo_id, revision=remote.commit, allow_patterns=[*map(escape, needed_files)]))
    # huggingface_hub 0.x returns what the cache holds when the Hub is gone in between
    if missing_files := [name for name in needed_files if not (folder / name).exists()]:
        raise HubError(f"{repo_id}: {missing_files[0]} did not arrive; check the network and run again")
    return folder, remote.commit


def _fetch_headers(repo_id: str, commit: str, files: Sequence[str], folder: Path) -> dict[str, RemoteFile]:
    for name in (name for name in files if name in WHOLE or (name.endswith(".py") and _is_side_file(name))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(hf_hub_download(repo_id, name, revision=commit), folder / name)
    for name in files:
        # their presence is all that anyone looks at
        if name.endswith((".bin", ".gguf", ".pt", ".pth")) and Path(name).name == name:
            (folder / name).touch()
    try:
        indexed_names = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        indexed_names = set()  # `Checkpoint.open` says what is wrong with an index
    names = [name for name in files if (name in indexed_names or name == SINGLE) and Path(name).name == name]
    shards = {name: RemoteFile(repo_id, commit, name) for name in names}
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(lambda shard: _fetch_header(shard, folder / shard.name), shards.values()))
    return shards


def _fetch_header(shard: RemoteFile, path: Path) -> None:
    """Write a shard's header by ranged requests, and a hole as large as its tensors."""
    content = b"".join(shard.chunks(0, 8))
    length = int.from_bytes(content, "little")
    assert shard.size is not None  # which the first request tells
    # an impossible length is left to whoever reads the file
    if 0 < length <= min(MAX_HEADER_BYTES, shard.size - 8):
        content += b"".join(shard.chunks(8, 8 + length))
    with open(path, "wb") as file:
        file.write(content)
        file.truncate(shard.size)


def _is_side_file(name: str) -> bool:
    """Whether conversion uses a file that holds no weights of the checkpoint."""
    *folders, base = name.split("/")
    if any(matches(folder.lower(), LEFT_OUT_FOLDERS) for folder in folders):
        return False
    return matches(base, KEPT) or not matches(base.lower(), LEFT_OUT)
